"""Speed of decoding, and the cost of a training step: all settings in turn, in one run.

    python -m bench.speed --lossless        # AR, tau, and --verify in several ways
    python -m bench.speed --transformers    # and transformers' generate and its prompt lookup
    python -m bench.speed --block-caches    # the paper's Table 5: no cache, its cache, ours
    python -m bench.speed --widths          # what a forward of 1, 5, 9 and 25 positions costs
    python -m bench.speed --training        # a step of MARS next to one of ordinary fine-tuning

--shape 0.5B replaces the model by random weights in the shape of that Qwen2.5. They cost what
trained weights do but accept nothing, so --transformers then compares AR alone.

A ratio is taken within a round, in which all settings run in turn; tables have the median and the
range over rounds.

Tokens per forward counts all tokens of an answer, its end of turn included, and all forwards of its
row, the prefill included.
"""

import functools
import random
import statistics
from collections.abc import Callable

import torch

import train
from bench import common
from decode import Decoder, Options, Sequence
from kv_cache import KVCache
from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number
from plumbing.attention import FastModel
from plumbing.chat import Chat
from plumbing.config import config_json
from plumbing.data import Example
from plumbing.errors import run_main
from plumbing.processes import arithmetic_in

RIVALS = ("prompt lookup", "AR")  # of --transformers
BLOCK_CACHES = (4, 16, 64, 256)  # tokens
# Positions of a forward, and how many of them need logits, with B = 4: one token; a token and its
# masks; five accepted tokens and their masks; a token, four guesses and five groups of masks.
NUM_LOGITS = {1: 1, 5: 5, 9: 5, 25: 10}


Way = Callable[[list[list[int]], int], list[Sequence]]  # of prompts and max_new

# ----------------------------------------------------------------------------------- ways to decode


class Ours:
    """Our decoder, made (and compiled) once for all calls."""

    def __init__(self, model: Qwen2, rows: int, longest: int, **options):
        self.decoder = Decoder(model, Options(**options), rows, longest)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Sequence]:
        sequences = [self.decoder.add(prompt, max_new=max_new) for prompt in prompts]
        for _ in self.decoder:
            pass
        self.decoder.scheduler.clear_done()  # or the same prompts would cost nothing the next time
        return sequences


class Theirs:
    """transformers' generate on the same tensors."""

    def __init__(self, model: Qwen2):
        import transformers

        self.config = model.config
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

    @torch.inference_mode()
    def __call__(
        self, prompts: list[list[int]], max_new: int, rows: int, **options
    ) -> list[Sequence]:
        """Greedy answers, `rows` prompts at a time, padded on the left."""
        answers = []
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            width = max(map(len, batch))
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            output = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max_new,
                do_sample=False,
                **options,
            )
            for prompt, tokens in zip(batch, output[:, width:].tolist()):
                answer = Sequence(prompt, self.config, max_new, tau=None)
                answer.take(tokens, width=0)  # up to the end of its turn; the rest is padding
                answers.append(answer)
        return answers


def make_ways(model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    options = {"compile": args.compile, "temperature": args.temperature}
    ours = functools.partial(Ours, model, rows, longest, **options)
    ways = {}
    if args.transformers:
        theirs = Theirs(model)
        ways["transformers"] = functools.partial(theirs, rows=rows)
        if rows == 1:  # prompt lookup takes no batches
            ways["prompt lookup"] = functools.partial(theirs, rows=1, prompt_lookup_num_tokens=10)
    ways["AR"] = ours(tau=1.0)
    if args.shape:  # random weights: no guess holds
        return ways
    ways[f"tau {args.tau:g}"] = ours(tau=args.tau)
    if args.block_caches:
        ways["no cache"] = ours(tau=args.tau)
        ways["no cache"].decoder.cache.commit = lambda counts: None  # so it computes the whole text
        for size in BLOCK_CACHES:
            ways[f"blocks of {size}"] = ours(tau=args.tau, block_cache=size)
        return ways
    ways["verify"] = ours(verify=True)
    ways["verify, groups 1"] = ours(verify=True, groups=1)
    ways["verify, B 3"] = ours(verify=True, block=3)  # fewer positions
    if rows == 1:
        ways["verify, no lookup"] = ours(verify=True)
        ways["verify, no lookup"].decoder.method.looks_up = False
    return ways


# --------------------------------------------------------------------------------------- the tables


def compare(model: Qwen2, chat: Chat, problems: list[dict], args) -> None:
    """Print a table for every --rows; ratios are to the first of the ways, and to RIVALS."""
    longest = max(map(len, common.encode(chat, problems))) + args.max_new
    for rows in args.rows:
        # Random weights end no answer early: one batch is enough.
        asked = problems[:rows] if args.shape else problems
        prompts = common.encode(chat, asked)
        ways = make_ways(model, rows, longest, args)
        work = {}
        for name, way in ways.items():
            way(prompts[:rows], args.max_new)  # start-up, not timed
            work[name] = functools.partial(way, prompts, args.max_new)
        answers, seconds = common.in_turn(work, args.rounds, model.device)

        base = next(iter(ways))
        rivals = dict.fromkeys([base, *(name for name in RIVALS if name in ways)])
        speeds = {}  # tokens per second in every round
        for name in ways:
            num_tokens = sum(len(answer.tokens) for answer in answers[name])
            speeds[name] = [num_tokens / taken for taken in seconds[name]]
        lines = []
        for name in ways:
            ratios = [common.ratios(speeds[name], speeds[rival]) for rival in rivals]
            per_forward = ["", ""]  # transformers does not tell
            if isinstance(ways[name], Ours):
                per_forward[0] = f"{common.tokens_per_forward(answers[name]):.2f}"
                per_forward[1] = f"{common.positions_per_forward(answers[name]):.2f}"
            same = [a.tokens == b.tokens for a, b in zip(answers[name], answers[base])]
            lines.append(
                [
                    name,
                    f"{statistics.median(speeds[name]):.1f}",
                    *map(common.spread, ratios),
                    *per_forward,
                    f"{sum(same) / len(same):.1%}",
                ]
            )
        head = [f"rows: {rows}", "tok/s", *(f"x {rival} (range)" for rival in rivals)]
        head += ["tokens/forward", "positions/forward", f"text of {base}"]
        print(f"\n{common.table(head, lines)}", flush=True)


def widths(model: Qwen2, args) -> None:
    """Print what a forward of one row costs after 200 tokens, by the number of its positions."""
    cache = KVCache(model.config, 1, 256, model.device, model.dtype)
    cache.lengths = [200]
    advance = FastModel(model, cache, args.compile)

    @torch.inference_mode()
    def forward(width: int) -> list[int]:
        tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
        pos = cache.reserve(width)
        mask = cache.mask(pos, pos + 1)
        hidden = advance(tokens, pos, mask, is_prefill=False)
        columns = torch.arange(NUM_LOGITS[width], device=model.device)[None]
        return advance.logits_at(hidden, columns).argmax(-1).tolist()

    work = {width: functools.partial(forward, width) for width in NUM_LOGITS}
    common.in_turn(work, 2, model.device)  # start-up, not looked at
    _, seconds = common.in_turn(work, args.rounds, model.device)
    rows = []
    for width in NUM_LOGITS:
        ratios = common.ratios(seconds[width], seconds[1])
        typical = 1000 * statistics.median(seconds[width])
        rows.append([f"{width}", f"{typical:.2f}", common.spread(ratios)])
    print(f"\n{common.table(['positions', 'ms/forward', 'x one position (range)'], rows)}")


def training(model: Qwen2, args) -> None:
    """Print what a step costs, for every --rows: so many examples, random, half of each prompt."""
    settings = train.parse_arguments(["--data", "none"])  # train.py's defaults
    autocast = arithmetic_in(model.dtype, model.device)
    model.float().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(forwards: list[train.ForwardInput], block: int | None) -> None:
        model.config.block = block
        train.add_gradients(model, forwards, settings, autocast)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    blocks = {"SFT": None, "MARS": model.config.block or settings.block}
    rows = []
    for num_examples in args.rows:
        examples = random_examples(num_examples, args.max_new, model.config.mask_token_id)
        steps = {}
        for name, block in blocks.items():
            model.config.block = block
            width = train.packed_width(model, settings.max_length)
            forwards = train.forward_inputs(examples, model.config, settings, width)
            steps[name] = functools.partial(step, forwards, block)
            steps[name]()  # start-up, not timed
        _, seconds = common.in_turn(steps, args.rounds, model.device)
        for name in steps:
            typical = statistics.median(seconds[name])
            ratios = common.ratios(seconds[name], seconds["SFT"])
            rows.append([f"{name}, {num_examples}", f"{typical:.3f}", common.spread(ratios)])
    print(f"\n{common.table(['step of so many examples', 's/step', 'x SFT (range)'], rows)}")


def random_examples(count: int, length: int, num_tokens: int) -> list[Example]:
    """A prompt and a response of `length` tokens each, out of the first num_tokens there are."""
    rng = random.Random(0)
    texts = [[rng.randrange(num_tokens) for _ in range(2 * length)] for _ in range(count)]
    return [Example(text, prompt_length=length) for text in texts]


# --------------------------------------------------------------------------------- the command line


def parse_arguments():
    parser = Parser("Speed of decoding: all settings in turn, in one run.")
    add = parser.add_argument
    add("--lossless", action="store_true", help="AR, tau, and --verify in several ways")
    add("--transformers", action="store_true", help="the same, next to transformers' generate")
    add("--block-caches", action="store_true", help="AR and tau, and the paper's cache")
    add("--widths", action="store_true", help="what a forward of more positions costs")
    add("--training", action="store_true", help="a step of --rows examples, next to SFT")
    add("--tau", type=number(float, 0), default=0.95, help="of MARS")
    add("--temperature", type=number(float, 0), default=0.0, help="of ours; 0 is greedy")
    add("--compile", action="store_true", help="torch.compile ours")
    add("--rounds", type=number(int, 1), default=5, help="how often all settings run in turn")
    add("--shape", choices=common.SHAPES, help="random weights in this shape")
    common.add_problems(parser, limit=100)
    common.add_rows(parser, default=[1, 4, 8, 16])
    args = parser.parse_args()
    args.decoding = args.lossless or args.transformers or args.block_caches
    if not (args.decoding or args.widths or args.training):
        parser.error("choose --lossless, --transformers, --block-caches, --widths or --training")
    if args.shape and (args.lossless or args.block_caches):
        parser.error("--shape has random weights: only --transformers, --widths and --training")
    if args.transformers:
        common.require("transformers")
    return args


def main() -> None:
    args = parse_arguments()
    problems = common.read_problems(args.data, args.limit)
    device, dtype = find_device(args.device, args.dtype)
    model, chat = load(args.model, device, dtype)
    if args.shape:
        model = common.random_model(args.shape, device, dtype)
    print(f"{args.shape or args.model}, {len(problems)} problems, {args.rounds} rounds")
    print(common.machine(model))
    if args.decoding:
        compare(model, chat, problems, args)
    if args.widths:
        widths(model, args)
    if args.training:  # last: it changes the weights
        training(model, args)


if __name__ == "__main__":
    run_main(main)
