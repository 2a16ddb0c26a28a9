"""Ours beside transformers' `generate`: the same weights and prompts, in turn, in one run.

    python bench/peers.py                                     # the bundled model on its problems
    python bench/peers.py --shape 0.5B --dtype bfloat16       # what real ones cost

Random weights accept nothing, so of a shape there is only AR, and what a forward of more positions
costs: 5 are a token and B = 4 masks, 9 the usual feed, 25 a verifying one. That cost and the
bundled model's tokens per forward make a projection, which is labelled so.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile

try:
    import transformers
except ImportError:
    sys.exit("error: transformers is not installed: pip install -r bench/requirements.txt")

from bench.pareto import ROOT, encode, read_problems, tokens_per_forward
from bench.report import table
from bench.speed import SHAPES, machine, random_model, wait
from decode import Answer, Decoder, Options, compiled, fast_for_one, generate
from kv_cache import KVCache
from model import Qwen2, UserError, load, place, run
from train import peak_memory

WAYS = {  # ours: options of `generate`
    "AR": {"tau": 1.0},
    "tau 0.95": {"tau": 0.95},
    "verify, tau 0": {"tau": 0.0, "verify": True},
}
LOOKUP = 10  # tokens that transformers' prompt lookup proposes
READ = {1: 1, 5: 5, 9: 5, 25: 10}  # logits that a forward of so many positions is asked for, B = 4


def theirs(model: Qwen2) -> transformers.Qwen2ForCausalLM:
    """transformers' model around our tensors, as they are laid out before our first decoding."""
    config = vars(model.config) | {"eos_token_id": list(model.config.eos_token_id)}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    config = transformers.Qwen2Config(**config)
    with torch.device("meta"):
        other = transformers.Qwen2ForCausalLM(config)
    other.load_state_dict(model.state_dict(), strict=False, assign=True)
    if model.config.tie_word_embeddings:
        other.lm_head.weight = other.model.embed_tokens.weight
    rotary = type(other.model.rotary_emb)
    other.model.rotary_emb = rotary(config).to(model.device)  # not in a state_dict
    other.generation_config.eos_token_id = config.eos_token_id
    other.generation_config.pad_token_id = 0
    return other.eval()


def their_answers(model, prompts: list[list[int]], rows: int, max_new: int, **options) -> list:
    """Token ids of greedy answers; `rows` prompts at a time, padded at the left."""
    answers, ends = [], set(model.generation_config.eos_token_id)
    for first in range(0, len(prompts), rows):
        batch = prompts[first : first + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=seen.to(model.device),
                max_new_tokens=max_new,
                do_sample=False,
                **options,
            )
        for new in out[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
            answers.append(new[:end])
    return answers


def timed(device: torch.device, answer: Callable[[], list]) -> tuple[list, float]:
    wait(device)
    began = time.perf_counter()
    answers = answer()
    wait(device)
    return answers, time.perf_counter() - began


def contestants(model: Qwen2, other, rows: int, ways: dict, longest: int) -> dict[str, Callable]:
    """By name: prompts and max_new -> answers, ours as `Answer`, theirs as ids."""

    def ours(options: dict) -> Callable:
        decoder = Decoder(model, [], Options(**options), rows, longest)  # one: it may be compiled

        def answer(prompts: list, max_new: int) -> list[Answer]:
            given = Options(**options, max_new=max_new)
            answers = [Answer(prompt, model, given, i) for i, prompt in enumerate(prompts)]
            decoder.rows = [None] * rows  # or prompts that it holds would cost it nothing
            decoder.waiting.extend(answers)
            for _ in decoder:
                pass
            return answers

        return answer

    found = {"transformers": lambda p, n: their_answers(other, p, rows, n)}
    if rows == 1:  # the only batch it takes
        found["transformers, prompt lookup"] = lambda p, n: their_answers(
            other, p, 1, n, prompt_lookup_num_tokens=LOOKUP
        )
    return found | {f"ours, {name}": ours(options) for name, options in ways.items()}


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [timed(device, lambda: target.copy_(source))[1] for _ in range(9)]
    return 2 * source.numel() / statistics.median(times)


def weights_read(model: Qwen2) -> int:
    """Bytes that every forward reads. Of an embedding that is not the head, it reads few rows."""
    untied = None if model.config.tie_word_embeddings else model.model.embed_tokens.weight
    read = (p for p in model.parameters() if p is not untied)
    return sum(p.numel() * p.element_size() for p in read)


def attention_kernels(model: Qwen2, prompt: list[int], options: dict) -> str:
    """What ran for attention, as torch's profiler names it."""
    gpu = [ProfilerActivity.CUDA] * (model.device.type == "cuda")
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as seen:
        generate(model, [prompt], 1, max_new=3, **options)
    names = {event.key for event in seen.key_averages()}
    known = re.compile("flash|fmha|efficient_attention|attention_math|cudnn.*attention", re.I)
    return ", ".join(sorted(name[:60] for name in names if known.search(name))) or "none known"


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: the next peak of resident memory is from here on
            Path("/proc/self/clear_refs").write_text("5")


class Timed:
    """What a contestant gave, and the seconds of its rounds: of the prompts alone, of all."""

    def __init__(self, answer: Callable):
        self.answer, self.answers, self.first, self.whole = answer, [], [], []
        self.peak = 0.0  # GiB

    def round(self, device: torch.device, prompts: list, max_new: int) -> None:
        forget_peak(device)
        self.first.append(timed(device, lambda: self.answer(prompts, 1))[1])
        self.answers, seconds = timed(device, lambda: self.answer(prompts, max_new))
        self.whole.append(seconds)
        self.peak = max(self.peak, peak_memory(device))

    def ids(self) -> list[list[int]]:
        return [a.tokens if isinstance(a, Answer) else a for a in self.answers]

    def speeds(self) -> list[float]:
        """Tokens per second, of each round."""
        return [sum(map(len, self.ids())) / seconds for seconds in self.whole]

    def ratio(self, other: "Timed") -> float:
        """Of speeds, round by round."""
        return statistics.median(a / b for a, b in zip(self.speeds(), other.speeds()))

    def behind_the_prompts(self) -> float:
        """Seconds."""
        return statistics.median(whole - first for whole, first in zip(self.whole, self.first))


def compare(model: Qwen2, other, prompts: list, rows: int, ways: dict, args) -> None:
    """A table: all contestants in turn, `rounds` times."""
    longest = max(map(len, prompts)) + args.max_new
    found = contestants(model, other, rows, ways, longest)
    competing = {name: Timed(answer) for name, answer in found.items()}
    for one in competing.values():
        one.answer(prompts[:rows], args.max_new)  # start-up, untimed
    for _ in range(args.rounds):
        for one in competing.values():
            one.round(model.device, prompts, args.max_new)
    them, ar, limit = competing["transformers"], competing["ours, AR"], bandwidth(model.device)
    lines = []
    for name, one in competing.items():
        mine, share = isinstance(one.answers[0], Answer), ""
        if args.shape and one in (them, ar):  # all answers are as long: a forward per token
            read = weights_read(model) * (args.max_new - 1) / one.behind_the_prompts()
            share = f"{read / limit:.0%}"
        lines.append(
            [
                name,
                f"{statistics.median(one.speeds()):.{0 if one.speeds()[0] > 100 else 1}f}",
                f"{one.ratio(them):.2f}",
                f"{one.ratio(ar):.2f}",
                f"{tokens_per_forward(one.answers):.2f}" if mine else "",
                f"{1000 * statistics.median(one.first) / len(prompts):.1f}",
                f"{one.peak:.2f}",
                share,
            ]
        )
    head = [f"{rows} row{'s' * (rows > 1)}", "tok/s", "x transformers", "x our AR"]
    head += ["tokens/forward", "ms/prompt", "peak, GiB", "of bandwidth"]
    print(f"\n{table(head, lines)}\n")
    same = sum(a == b for a, b in zip(them.ids(), ar.ids()))
    kernels = attention_kernels(model, prompts[0], ways["AR"])
    print(
        f"{same} of {len(prompts)} AR answers are the same, token for token. Attention: {kernels}"
    )
    print(f"A copy reads and writes {limit / 1e9:.0f} GB/s. Peaks are those of the whole process.")


@torch.inference_mode()
def forward_times(model: Qwen2, widths: tuple[int, ...], args) -> dict[int, float]:
    """Milliseconds of a forward of so many positions of one row behind 200, in turn; medians."""
    dtype, hidden_states = model.model.norm.weight.dtype, compiled(model) if args.compile else model
    cache = KVCache(model.config, 1, 256, model.device, dtype)
    cache.lengths = [200]
    taken = {width: [] for width in widths}
    for _ in range(args.rounds + 2):
        for width in widths:
            tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
            pos = 200 + torch.arange(width, device=model.device)[None]

            def forward(tokens=tokens, pos=pos, width=width) -> list:
                cache.reserve(width)
                with fast_for_one(model, tokens):
                    hidden = hidden_states(tokens, pos, cache.mask(pos, pos + 1), cache)
                    return model.logits(hidden[0, : READ[width]].clone()).argmax(-1).tolist()

            taken[width].append(1000 * timed(model.device, forward)[1])
    return {width: statistics.median(times[2:]) for width, times in taken.items()}


def project(model: Qwen2, bundled: Qwen2, prompts: list, args) -> None:
    """What a forward costs here, and what tokens per forward as the bundled model's would give."""
    times = forward_times(model, tuple(READ), args)
    rows = [[str(width), f"{ms:.1f}", f"{ms / times[1]:.2f}"] for width, ms in times.items()]
    print(f"\n{table(['positions', 'ms/forward', 'x one position'], rows)}")
    print("\nProjection, not a measurement: with the bundled model's tokens per forward")
    for name, width in (("tau 0.95", 9), ("verify, tau 0", 25)):
        speed = tokens_per_forward(generate(bundled, prompts, 8, **WAYS[name]))
        ratio = speed * times[1] / times[width]
        print(f"{name}: {speed:.2f} tokens per forward, {ratio:.2f} x AR at one row")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ours beside transformers' generate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--shape", choices=SHAPES, help="random weights in the shape of that Qwen2.5 instead")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--limit", type=int, default=32, help="only the first so many problems")
    add("--rows", type=int, nargs="+", default=[1, 8], help="problems decoded at a time")
    add("--compile", action="store_true", help="torch.compile ours")
    add("--rounds", type=int, default=9, help="of which the median is printed")
    add("--max-new", type=int, help="most tokens per answer; None: 256, or 16 of a --shape")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()
    args.max_new = (16 if args.shape else 256) if args.max_new is None else args.max_new
    if min(args.rounds, *args.rows) < 1 or args.max_new < 2:
        raise UserError("--rounds and --rows must be at least 1, --max-new at least 2")
    device, dtype = place(args.device, args.dtype)
    bundled, chat = load(args.model, device, dtype)
    prompts = encode(chat, read_problems(args.data, args.limit))
    model = random_model(args.shape, device, dtype) if args.shape else bundled
    print(f"{args.shape or args.model}, {len(prompts)} prompts; {machine(model)}, transformers")
    print(f"{transformers.__version__}; medians of {args.rounds} rounds, all in turn in each")
    ways = {name: options | {"compile": args.compile} for name, options in WAYS.items()}
    other, ways = theirs(model), {"AR": ways["AR"]} if args.shape else ways
    for rows in args.rows:
        some = prompts[:rows] if args.shape else prompts  # of a shape every answer is as long
        compare(model, other, some, rows, ways, args)
    if args.shape:
        project(model, bundled, prompts, args)


if __name__ == "__main__":
    run(main)
