"""Speed of decoding: all settings in turn, in one run.

    python -m bench.speed --lossless        # AR, tau, and --verify with several groups
    python -m bench.speed --transformers    # next to transformers' generate and its prompt lookup
    python -m bench.speed --widths          # what a forward of 1, 5, 9 and 25 positions costs
    python -m bench.speed --long 4096       # one long answer: time and memory as it grows

--shape 0.5B replaces the model by random weights in the shape of that Qwen2.5. They cost what
trained weights do but accept nothing, so --transformers then compares AR alone.

A ratio is taken within a round, in which all settings run in turn; tables have the median and the
range over rounds. Efficiency is the ratio divided by tokens per forward. On a CPU in float32 a
wider forward takes more time. A GPU with few rows waits for its memory, not for arithmetic, and
comes closer to an efficiency of 1.

Tokens per forward counts all tokens of an answer, its end of turn included, and all forwards of its
row, the prefill included. The gap is the time between one token and the next: of tokens that come
together all but the first have a gap of 0.
"""

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from bench import common
from decode import Decoder, Options, Sequence
from kv_cache import KVCache
from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number
from plumbing.attention import FastForward, attend_folded, fold
from plumbing.chat import Chat
from plumbing.config import config_json
from plumbing.errors import run_main
from plumbing.processes import peak_memory

GROUPS = (1, 2)
RIVALS = ("prompt lookup", "ours, AR")  # of --transformers
PER_FORWARD = ("tokens/forward", "positions/forward", "efficiency", "guesses held 1, 2, ... ahead")
# Positions of a forward, and how many of them need logits, with B = 4: one token; a token and its
# masks; five accepted tokens and their masks; a token, four guesses and five groups of masks.
NUM_LOGITS = {1: 1, 5: 5, 9: 5, 25: 10}


class Answer(NamedTuple):
    """What a way to decode gave for a prompt."""

    tokens: list[int]
    moments: list[float]  # when each token came, if that is known
    sequence: Sequence | None  # with statistics of our decoder


Way = Callable[[list[list[int]], int], list[Answer]]  # of prompts and max_new

# ----------------------------------------------------------------------------------- ways to decode


class Ours:
    """Our decoder, made (and compiled) once for all calls."""

    def __init__(self, model: Qwen2, rows: int, longest: int, **options):
        self.decoder = Decoder(model, Options(**options), rows, longest)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Answer]:
        sequences = [self.decoder.add(prompt, max_new=max_new) for prompt in prompts]
        moments = {sequence: [] for sequence in sequences}
        for sequence, tokens in self.decoder:
            moments[sequence] += [time.perf_counter()] * len(tokens)
        self.decoder.scheduler.clear_done()  # or the same prompts would cost nothing the next time
        return [Answer(sequence.tokens, moments[sequence], sequence) for sequence in sequences]


class Moments:
    """A streamer for transformers' generate: when each token of a batch came."""

    def __init__(self):
        self.moments = None  # until the first call, which has the prompts

    def put(self, tokens: torch.Tensor) -> None:
        """tokens: one for each row; or (1, N), several at once, from prompt lookup."""
        if self.moments is None:
            self.moments = []
            return
        count = tokens.size(1) if tokens.dim() == 2 else 1
        self.moments += [time.perf_counter()] * count

    def end(self) -> None:
        pass


class Theirs:
    """transformers' generate on the same tensors."""

    def __init__(self, model: Qwen2):
        import transformers

        ends = list(model.config.eos_token_id)
        config = transformers.Qwen2Config(**config_json(model.config) | {"eos_token_id": ends})
        with torch.device("meta"):
            self.model = transformers.Qwen2ForCausalLM(config).eval()
        self.model.load_state_dict(model.state_dict(), strict=False, assign=True)
        if config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        rotary = type(self.model.model.rotary_emb)  # its tensors are in no state_dict
        self.model.model.rotary_emb = rotary(config).to(model.device)
        self.model.generation_config.eos_token_id = ends
        self.model.generation_config.pad_token_id = 0
        self.ours = model

    @torch.inference_mode()
    def __call__(
        self, prompts: list[list[int]], max_new: int, rows: int, **options
    ) -> list[Answer]:
        """Greedy answers, `rows` prompts at a time, padded on the left."""
        answers = []
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            width = max(len(prompt) for prompt in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            streamer = Moments()
            output = self.model.generate(
                ids.to(self.ours.device),
                attention_mask=mask.to(self.ours.device),
                max_new_tokens=max_new,
                do_sample=False,
                streamer=streamer,
                **options,
            )
            for tokens in output[:, width:].tolist():
                tokens = through_end(tokens, self.ours.config.eos_token_id)
                answers.append(Answer(tokens, streamer.moments[: len(tokens)], None))
        return answers


def through_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens up to the first that ends a turn; transformers pads the shorter answers."""
    for count, token in enumerate(tokens, 1):
        if token in ends:
            return tokens[:count]
    return tokens


def lossless(model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    ways = {"AR": ours(tau=1.0), f"tau {args.tau:g}": ours(tau=args.tau)}
    ways["verify"] = ours(verify=True)
    for groups in GROUPS:
        ways[f"verify, groups {groups}"] = ours(verify=True, groups=groups)
    return ways


def next_to(theirs: Theirs, model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    ways = {"transformers": functools.partial(theirs, rows=rows)}
    if rows == 1:  # prompt lookup takes no batches
        ways["prompt lookup"] = functools.partial(theirs, rows=1, prompt_lookup_num_tokens=10)
    ways["ours, AR"] = ours(tau=1.0)
    if not args.shape:
        ways[f"ours, tau {args.tau:g}"] = ours(tau=args.tau)
        ways["ours, verify"] = ours(verify=True)
        ways["ours, verify, B 3"] = ours(verify=True, block=3)  # fewer positions
        if rows == 1:
            without = ours(verify=True)
            without.decoder.lossless.looks_up = False
            ways["ours, verify, no lookup"] = without
    return ways


def compare(
    make_ways: Callable, model: Qwen2, chat: Chat, problems: list[dict], args, one_batch=False
) -> None:
    """Print a table per number of rows; ratios are to the first of the ways, and to `RIVALS`.

    one_batch: only as many problems as rows.
    """
    longest = max(len(prompt) for prompt in common.encode(chat, problems)) + args.max_new
    for rows in args.rows:
        asked = problems[:rows] if one_batch else problems
        prompts = common.encode(chat, asked)
        ways = make_ways(model, rows, longest, args)
        work = {}
        for name, way in ways.items():
            way(prompts[:rows], args.max_new)  # start-up, not timed
            work[name] = functools.partial(way, prompts, args.max_new)
            work[f"{name}, first token"] = functools.partial(way, prompts, 1)
        answers, seconds = common.in_turn(work, args.rounds, model.device)

        base = next(iter(ways))
        rivals = [base, *(name for name in RIVALS if name in ways)]
        speeds = {name: tokens_per_second(answers[name], seconds[name]) for name in ways}
        lines = []
        for name in ways:
            ratios = [common.ratios(speeds[name], speeds[rival]) for rival in rivals]
            first_token = statistics.median(seconds[f"{name}, first token"])
            same = [a.tokens == b.tokens for a, b in zip(answers[name], answers[base])]
            lines.append(
                [
                    name,
                    f"{statistics.median(speeds[name]):.1f}",
                    *map(common.spread, ratios),
                    *per_forward(answers[name], statistics.median(ratios[0])),
                    f"{1000 * first_token / len(prompts):.1f}",
                    gaps(answers[name]),
                    f"{sum(same) / len(same):.1%}",
                    common.accuracy(chat, answers[name], asked),
                ]
            )
        head = [f"rows: {rows}", "tok/s", *(f"x {rival} (range)" for rival in rivals), *PER_FORWARD]
        head += ["first token, ms/prompt", "gap p50, p99, ms", f"text of {base}", "accuracy"]
        print(f"\n{common.table(head, lines)}", flush=True)


def tokens_per_second(answers: list[Answer], seconds: list[float]) -> list[float]:
    """In every round."""
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return [num_tokens / taken for taken in seconds]


def per_forward(answers: list[Answer], ratio: float) -> list[str]:
    """What `PER_FORWARD` names; empty for answers of others."""
    sequences = [answer.sequence for answer in answers if answer.sequence]
    if not sequences:
        return [""] * len(PER_FORWARD)
    tokens = common.tokens_per_forward(sequences)
    positions = common.positions_per_forward(sequences)
    efficiency = ratio / tokens
    return [f"{tokens:.2f}", f"{positions:.2f}", f"{efficiency:.2f}", held_ahead(sequences)]


def held_ahead(sequences: list[Sequence]) -> str:
    """Of the guesses that were checked 1, 2, ... places ahead, the share that held."""
    checked = Counter()
    held = Counter()
    for sequence in sequences:
        for num_checked, num_accepted in zip(sequence.checked, sequence.accepted):
            checked.update(range(1, num_checked + 1))
            held.update(range(1, num_accepted))
    return " ".join(f"{held[ahead] / checked[ahead]:.2f}" for ahead in sorted(checked))


def gaps(answers: list[Answer]) -> str:
    """The time between tokens of the last round: the median and the 99th percentile."""
    waits = []
    for answer in answers:
        waits += [later - earlier for earlier, later in pairwise(answer.moments)]
    if not waits:
        return ""
    waits.sort()
    return ", ".join(f"{1000 * waits[int(share * len(waits))]:.1f}" for share in (0.5, 0.99))


# --------------------------------------------------------------------------------- width and length


def widths(model: Qwen2, args) -> None:
    """Print what a forward of one row costs after 200 tokens, by the number of its positions."""
    cache = KVCache(model.config, 1, 256, model.device, model.dtype)
    cache.lengths = [200]
    advance = FastForward(model, cache, args.compile)

    @torch.inference_mode()
    def forward(width: int) -> list[int]:
        tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
        pos = cache.reserve(width)
        mask = cache.mask(pos, pos + 1)
        hidden = advance(tokens, pos, mask, is_prefill=False)
        columns = torch.arange(NUM_LOGITS[width], device=model.device)[None]
        return advance.logits_at(hidden, columns).argmax(-1).tolist()

    work = {width: functools.partial(forward, width) for width in NUM_LOGITS}
    source = torch.zeros(2**28, dtype=torch.uint8, device=model.device)
    work["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    common.in_turn(work, 2, model.device)  # start-up, not looked at
    _, seconds = common.in_turn(work, args.rounds, model.device)
    bandwidth = 2 * source.numel() / statistics.median(seconds["copy"])  # it reads and writes
    rows = []
    for width in NUM_LOGITS:
        typical = statistics.median(seconds[width])
        ratios = common.ratios(seconds[width], seconds[1])
        share = weights_read(model) / typical / bandwidth
        rows.append([f"{width}", f"{1000 * typical:.2f}", common.spread(ratios), f"{share:.0%}"])
    head = ["positions", "ms/forward", "x one position (range)", "of bandwidth"]
    print(f"\n{common.table(head, rows)}\n\nA copy reads and writes {bandwidth / 1e9:.0f} GB/s.")


def weights_read(model: Qwen2) -> int:
    """Bytes that every forward reads; of an embedding that is not the head, it reads few rows."""
    num_weights = sum(weight.numel() for weight in model.parameters())
    if not model.config.tie_word_embeddings:
        num_weights -= model.model.embed_tokens.weight.numel()
    return num_weights * model.dtype.itemsize


def long_answer(model: Qwen2, args) -> None:
    """Print the cost of each eighth of an answer. At tau 0 only the text is nonsense."""
    model.config.max_position_embeddings = args.long + 1
    model.config.eos_token_id = (model.config.mask_token_id,)  # never predicted: no early end
    options = Options(tau=0.0, max_new=args.long, compile=args.compile)
    decoder = Decoder(model, options, rows=1, longest=args.long + 1)
    answer = decoder.add([0])
    common.forget_peak(model.device)
    before = peak_memory(model.device)
    decoder.step()
    rows = []
    while not answer.done:
        first = len(answer.tokens)
        goal = min(args.long, first + args.long // 8)
        seconds = []
        while len(answer.tokens) < goal:
            seconds.append(common.timed(decoder.step, model.device)[1])
        typical = statistics.median(seconds)
        attention = attention_seconds(model, decoder.cache, answer.positions[-1])
        per_token = sum(seconds) / (len(answer.tokens) - first)
        times = [f"{1000 * each:.2f}" for each in (typical, attention, per_token)]
        peak = 1024 * (peak_memory(model.device) - before)
        rows.append([f"{len(answer.tokens)}", *times, f"+{peak:.1f}"])
    num_bytes = sum(t.numel() * t.element_size() for layer in decoder.cache.layers for t in layer)
    print(f"\ncache {num_bytes / 2**20:.1f} MiB\n")
    head = ["tokens so far", "ms/forward", "its attention", "ms/token", "peak memory, MiB"]
    print(common.table(head, rows))


def attention_seconds(model: Qwen2, cache: KVCache, width: int) -> float:
    """What the attention of all layers takes for `width` new positions of one row."""
    pos = cache.reserve(width)
    mask = fold(cache.mask(pos, pos + 1), model.config, torch.get_num_threads(), model.dtype)
    shape = (1, model.config.num_attention_heads, width, model.config.head_dim)
    q = torch.randn(shape, device=model.device, dtype=model.dtype)

    def attention() -> None:
        for k, v in cache.layers:
            attend_folded(q, k[:, :, : cache.span], v[:, :, : cache.span], mask)

    return statistics.median(common.timed(attention, model.device)[1] for _ in range(30))


def parse_arguments():
    parser = Parser("Speed of decoding: all settings in turn, in one run.")
    add = parser.add_argument
    add("--lossless", action="store_true", help="AR, tau, and --verify with several groups")
    add("--transformers", action="store_true", help="next to transformers' generate")
    add("--widths", action="store_true", help="what a forward of more positions costs")
    add("--long", type=number(int, 100), help="one answer of so many tokens")
    add("--shape", choices=common.SHAPES, help="random weights in this shape")
    add_settings(parser)
    args = parser.parse_args()
    if not (args.lossless or args.transformers or args.widths or args.long):
        parser.error("choose --lossless, --transformers, --widths or --long")
    if args.shape and args.lossless:
        parser.error("--shape has random weights: --lossless needs a trained model")
    if args.transformers:
        common.require("transformers")
    return args


def add_settings(parser: Parser) -> None:
    """Add what `compare` asks for."""
    add = parser.add_argument
    add("--tau", type=number(float, 0), default=0.95, help="of MARS")
    add("--compile", action="store_true", help="torch.compile ours")
    common.add_problems(parser, limit=100)
    common.add_rows(parser, default=[1, 4, 8, 16])
    common.add_rounds(parser, default=5)


def main() -> None:
    args = parse_arguments()
    problems = common.read_problems(args.data, args.limit)
    device, dtype = find_device(args.device, args.dtype)
    model, chat = load(args.model, device, dtype)
    if args.shape:
        model = common.random_model(args.shape, device, dtype)
    print(f"{args.shape or args.model}, {len(problems)} problems, {args.rounds} rounds")
    print(common.machine(model))
    if args.transformers:
        make_ways = functools.partial(next_to, Theirs(model))
        one_batch = bool(args.shape)  # random weights end no answer early: one batch is enough
        compare(make_ways, model, chat, problems, args, one_batch)
    if args.lossless:
        compare(lossless, model, chat, problems, args)
    if args.widths:
        widths(model, args)
    if args.long:
        long_answer(model, args)


if __name__ == "__main__":
    run_main(main)
