"""Speed of decoding, measured side by side in one run.

    python bench/speed.py --table5        # the paper's Table 5: what a cache buys in a batch
    python bench/speed.py --lossless      # AR, MARS, and MARS whose guesses are checked
    python bench/speed.py --long 4096     # one long answer: time and memory as it grows

A ratio is the median over rounds in which all settings run in turn, so that a machine whose speed
drifts is unfair to none. On a CPU in float32 a forward of more positions takes more time, which a
GPU that waits for its memory hardly notices: there the ratios are nearer to tokens per forward.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F

from bench.pareto import (
    ROOT,
    accuracy,
    encode,
    positions_per_forward,
    read_problems,
    tokens_per_forward,
)
from decode import Answer, Decoder, Options
from kv_cache import KVCache
from model import Chat, Config, Qwen2, UserError, initialize, load, place, run

BLOCKS = (4, 8, 16, 32, 64, 128, 256)
SHAPES = {  # Qwen2.5's: hidden, intermediate, layers, heads, KV heads, words, tied embeddings
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}


def machine(model: Qwen2) -> str:
    dtype = str(model.model.norm.weight.dtype).removeprefix("torch.")
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name(model.device)
    else:
        name = f"{model.device.type}, {torch.get_num_threads()} threads"
    return f"{name}, {dtype}, torch {torch.__version__}"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------ side by side


def forget(counts: list[int]) -> None:
    """In place of `KVCache.commit`: nothing is kept, so every forward feeds the whole text."""


def decode(model: Qwen2, prompts: list, options: Options, rows: int, cache: bool):
    """Answers to all prompts, and the seconds that they took."""
    answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
    decoder = Decoder(model, answers, options, rows)
    if not cache:
        decoder.cache.commit = forget
    wait(model.device)
    began = time.perf_counter()
    for _ in decoder:
        pass
    wait(model.device)
    return answers, time.perf_counter() - began


def spread(ratios: list[float]) -> str:
    """Their median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(model: Qwen2, chat: Chat, settings: dict, heading: str, figure, args) -> None:
    """A table per number of rows: tok/s, its ratio to AR of the same round, a last column.

    settings: name -> (options, with a cache?), AR among them. The last column is
    figure(answers, ratio), under that heading.
    """
    problems = read_problems(args.data, args.limit)
    prompts = encode(chat, problems)
    print(f"{args.model}, {len(problems)} problems; {machine(model)}")
    print(f"medians of {args.rounds} rounds, in each of which all settings run in turn")
    for rows in args.rows:
        seconds, answers = {name: [] for name in settings}, {}
        for options, cache in settings.values():
            decode(model, prompts[:rows], options, rows, cache)  # start-up, untimed
        for _ in range(args.rounds):
            for name, (options, cache) in settings.items():
                answers[name], taken = decode(model, prompts, options, rows, cache)
                seconds[name].append(taken)
        title = f"{rows} row{'s' * (rows > 1)}"
        figures = "tok/s | x AR (range)        | tokens/forward | accuracy"
        print(f"\n| {title:17} | {figures} | {heading} |\n|:--|--:|--:|--:|--:|--:|")
        ar_speeds = speeds(answers["AR"], seconds["AR"])
        for name, given in answers.items():
            here = speeds(given, seconds[name])
            ratios = [speed / ar for speed, ar in zip(here, ar_speeds)]
            print(
                f"| {name:17} | {statistics.median(here):5.0f} | {spread(ratios):19} "
                f"| {tokens_per_forward(given):14.2f} | {accuracy(chat, given, problems):8.1%} "
                f"| {figure(given, statistics.median(ratios)):{len(heading)}.2f} |",
                flush=True,
            )


def table5(model: Qwen2, chat: Chat, args: argparse.Namespace) -> None:
    mars = Options(tau=args.tau, max_new=args.max_new)
    settings = {"AR": (replace(mars, tau=1.0), True), "MARS, no cache": (mars, False)}
    settings |= {f"MARS, B_cache {n}": (replace(mars, block_cache=n), True) for n in BLOCKS}
    settings["MARS, cursor"] = (mars, True)

    def efficiency(given: list[Answer], ratio: float) -> float:
        return ratio / tokens_per_forward(given)

    compare(model, chat, settings, "efficiency", efficiency, args)


def lossless(model: Qwen2, chat: Chat, args: argparse.Namespace) -> None:
    """tau as it is, and verified over draft taus: the lower, the more and wider guesses."""
    mars = Options(tau=args.tau, max_new=args.max_new)
    settings = {"AR": (replace(mars, tau=1.0), True), f"tau {args.tau:g}": (mars, True)}
    for tau in (0.0, 0.3, 0.5, 0.7, 0.9):
        settings[f"verify, tau {tau:g}"] = (replace(mars, tau=tau, verify=True), True)

    def width(given: list[Answer], ratio: float) -> float:
        return positions_per_forward(given)

    compare(model, chat, settings, "positions/forward", width, args)


def speeds(answers: list[Answer], seconds: list[float]) -> list[float]:
    """Tokens per second in each round."""
    tokens = sum(len(answer.tokens) for answer in answers)
    return [tokens / taken for taken in seconds]


# --------------------------------------------------------------------------------- one long answer


def resident(device: torch.device) -> float:
    """MiB that torch has allocated on a GPU, or this process has in memory (known on Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        return float("nan")


def attention_alone(model: Qwen2, cache: KVCache, width: int, times: int = 30) -> float:
    """Milliseconds that all layers' attention takes for `width` new positions of one row."""
    config, like = model.config, cache.layers[0][0]
    pos = cache.reserve(width)
    mask = cache.mask(pos, pos + 1)
    heads = config.num_attention_heads * width // mask.size(2)
    q = torch.randn(1, heads, mask.size(2), config.head_dim).to(like)
    taken = []
    for _ in range(times):
        wait(like.device)
        began = time.perf_counter()
        for k, v in cache.layers:
            k, v = k[:, :, : cache.span], v[:, :, : cache.span]
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        wait(like.device)
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


def long_answer(model: Qwen2, args: argparse.Namespace) -> None:
    """tau = 0 accepts all guesses: what is said is nonsense, what it costs is not."""
    config = model.config
    config.max_position_embeddings = args.long + 1
    config.eos_token_id = (config.mask_token_id,)  # never predicted: nothing ends the answer
    options = Options(tau=0.0, max_new=args.long)
    before = resident(model.device)
    answer = Answer([0], model, options)
    decoder = Decoder(model, [answer], options, rows=1)
    size = sum(t.numel() * t.element_size() for kv in decoder.cache.layers for t in kv) / 2**20
    print(f"{args.shape or args.model}; {machine(model)}; cache {size:.1f} MiB\n")
    print("| tokens so far | ms/forward | attention alone | the rest | ms/token | memory, MiB |")
    print("|--------------:|-----------:|----------------:|---------:|---------:|------------:|")
    decoder.step()
    while not answer.done:
        start, taken = len(answer.tokens), []
        goal = min(args.long, start + args.long // 8)
        while len(answer.tokens) < goal:
            began = time.perf_counter()
            decoder.step()  # ends with a copy to the host, so it needs no other wait
            taken.append(time.perf_counter() - began)
        gained, ms = len(answer.tokens) - start, 1000 * statistics.median(taken)
        alone = attention_alone(model, decoder.cache, 2 * answer.block + 1)
        print(
            f"| {len(answer.tokens):13} | {ms:10.2f} | {alone:15.2f} | {ms - alone:8.2f} "
            f"| {1000 * sum(taken) / gained:8.2f} | {resident(model.device) - before:+11.1f} |",
            flush=True,
        )


def config_of(shape: str) -> Config:
    hidden, inner, layers, heads, kv_heads, words, tied = SHAPES[shape]
    return Config(
        words, hidden, inner, layers, heads, kv_heads, 32768, 1e6, tie_word_embeddings=tied,
        eos_token_id=(words - 1,), mask_token_id=words - 2,
    )  # fmt: skip


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> Qwen2:
    """Random weights in the shape of a Qwen2.5: they accept nothing, but cost what real ones do."""
    with device:  # a CPU would take a minute for the 7B
        return initialize(config_of(shape), seed=0).to(dtype).requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speed of decoding, measured side by side in one run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--table5", action="store_true", help="AR, no cache, block cache and cursor, in batches")
    add("--lossless", action="store_true", help="AR, tau, and --verify over draft taus")
    add("--long", type=int, help="one answer of so many tokens")
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--shape", choices=SHAPES, help="with --long: random weights in this shape instead")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--limit", type=int, default=100, help="only the first so many problems")
    add("--rows", type=int, nargs="+", default=[1, 4, 8, 16], help="problems decoded at a time")
    add("--rounds", type=int, default=5, help="of which the median is printed")
    add("--tau", type=float, default=0.95, help="of MARS")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()
    if not args.table5 and not args.lossless and args.long is None:
        parser.error("what to measure: --table5, --lossless or --long")
    for name, value, least in (("rounds", args.rounds, 1), ("long", args.long, 100)):
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    device, dtype = place(args.device, args.dtype)
    model, chat = load(args.model, device, dtype)
    if args.table5:
        table5(model, chat, args)
    if args.lossless:
        lossless(model, chat, args)
    if args.long:
        long_answer(random_model(args.shape, device, dtype) if args.shape else model, args)


if __name__ == "__main__":
    run(main)
