"""Speed of decoding: all settings in turn, in one run.

    python -m bench.speed                   # AR, tau and lossless
    python -m bench.speed --transformers    # and transformers' generate and its prompt lookup
    python -m bench.speed --block-caches    # the paper's Table 5: no cache, its cache, ours
    python -m bench.speed --widths          # what a forward of 1, 5, 9 and 25 positions costs

--llama-cpp takes the addresses of running servers: docs/speed.md. They get the same token ids.
--shape 0.5B replaces the model by random weights in the shape of that Qwen2.5, at the same cost;
they accept nothing, so only AR is decoded. A ratio is taken within a round, in which all settings
run in turn; tables have the median and the range over rounds. Tokens per forward counts the end of
turn and the prefill, too.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.request import Request, urlopen

import torch

from bench import common
from decode import Decoder, Options, Sequence
from kv_cache import KVCache
from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.cpu import fast_copy, is_int8
from plumbing.errors import UserError, failure_as, require, run_main

BLOCK_CACHES = (4, 16, 64, 256)  # tokens
# Positions of a forward, and how many of them predict (B = 4): one token; a token and its masks;
# five accepted tokens and their masks; a token, sixteen guesses and two groups of masks.
NUM_PREDICTIONS = {1: 1, 5: 5, 9: 5, 25: 25}


def in_turn(
    ways: dict[str, Callable], rounds: int, device: torch.device
) -> tuple[dict, dict[str, list[float]]]:
    """Run all ways in turn, `rounds` times: a drift of the machine's speed hits all of them alike.

    Returns each way's last result and its milliseconds in every round.
    """
    results = {}
    milliseconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            began = now(device)
            results[name] = work()
            milliseconds[name].append(now(device) - began)
    return results, milliseconds


def now(device: torch.device) -> float:
    """Milliseconds, once a GPU has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * time.perf_counter()


def print_table(title: str, unit: str, values: dict, head=(), cells: dict | None = None) -> None:
    """values: of each way its figure in every round; ratios are to the first way.

    head, cells: more columns; by way, what stands in them.
    """
    first = next(iter(values))
    rows = []
    for name, mine in values.items():
        ratios = [a / b for a, b in zip(mine, values[first])]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        more = cells[name] if cells else []
        rows.append([name, f"{statistics.median(mine):.2f}", ratio, *more])
    print(f"\n{common.table([title, unit, f'x {first} (range)', *head], rows)}", flush=True)


# ----------------------------------------------------------------------------------- ways to decode


class Answer(NamedTuple):
    """What another program said."""

    tokens: list[int]
    forwards: int | None = None  # None: it does not tell


def ours(decoder: Decoder, prompts: list[list[int]], max_new: int) -> list[Sequence]:
    """By a decoder that is made (and compiled) once for all calls."""
    for row in range(len(decoder.cache.lengths)):
        decoder.cache.begin(row)  # what it holds of an earlier call is not used
    sequences = [decoder.add(prompt, max_new=max_new) for prompt in prompts]
    for _ in decoder:
        pass
    return sequences


class NoCache(KVCache):
    """Every forward computes the whole text. (So each has another width: it is never compiled.)"""

    def commit(self, counts: dict[int, int]) -> None:
        pass


class Theirs:
    """transformers' generate with the same weights."""

    def __init__(self, model: Qwen2):
        from transformers import AutoConfig, AutoModelForCausalLM  # of bench/requirements.txt

        ends = {"eos_token_id": list(model.config.eos_token_id)}
        config = AutoConfig.for_model(**model.config.to_json() | ends)
        with model.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
        self.model.load_state_dict(model.state_dict(), strict=False)  # a tied head is not in it
        self.padding = model.config.mask_token_id  # it is in no prompt and in no answer

    @torch.inference_mode()
    def __call__(
        self, prompts: list[list[int]], max_new: int, rows: int, **options
    ) -> list[Answer]:
        """Greedy answers, `rows` prompts at a time, padded on the left."""
        answers = []
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            width = max(map(len, batch))
            padded = [[self.padding] * (width - len(prompt)) + prompt for prompt in batch]
            padded = torch.tensor(padded, device=self.model.device)
            output = self.model.generate(
                padded,
                attention_mask=(padded != self.padding).long(),
                max_new_tokens=max_new,
                do_sample=False,
                pad_token_id=self.padding,
                **options,
            )
            for tokens in output[:, width:].tolist():
                answers.append(Answer([token for token in tokens if token != self.padding]))
        return answers


def llama_server(address: str, prompts: list[list[int]], max_new: int) -> list[Answer]:
    """By llama.cpp's server, greedily. What it holds of earlier prompts is not used."""
    answers = []
    for prompt in prompts:
        asked = {"prompt": prompt, "n_predict": max_new, "temperature": 0}
        asked |= {"cache_prompt": False, "return_tokens": True}
        with failure_as(f"--llama-cpp {address}"):
            with urlopen(Request(f"{address}/completion", json.dumps(asked).encode())) as reply:
                said = json.load(reply)
            # Each forward gives the drafts that it accepts and one token more.
            num_drafts = said["timings"].get("draft_n_accepted", 0)
            answers.append(Answer(said["tokens"], said["timings"]["predicted_n"] - num_drafts))
    return answers


def make_ways(model: Qwen2, fast: Qwen2, rows: int, longest: int, args) -> dict:
    """Functions of prompts and max_new that give answers; all our decoders share `fast`."""
    ways = {}

    def add(name: str, cache=None, compile=args.compile, **settings) -> None:
        options = Options(compile=compile, temperature=args.temperature, **settings)
        ways[name] = functools.partial(ours, Decoder(fast, options, rows, longest, cache=cache))

    if args.transformers:
        theirs = functools.partial(Theirs(model), rows=rows)
        ways["transformers"] = theirs
        if rows == 1:  # prompt lookup takes no batches
            ways["prompt lookup"] = functools.partial(theirs, prompt_lookup_num_tokens=10)
    add("AR", tau=1.0)
    for address in args.llama_cpp:
        ways[f"llama.cpp {address}"] = functools.partial(llama_server, address)
    if args.shape:  # random weights: no guess holds
        return ways
    add(f"tau {args.tau:g}", tau=args.tau)
    if args.block_caches:
        widest = 2 * (model.config.block or 4) + 1
        shape = (model.config, rows, longest + widest, model.device, model.dtype)
        add("no cache", cache=NoCache(*shape), compile=False, tau=args.tau)
        for size in BLOCK_CACHES:
            add(f"blocks of {size}", tau=args.tau, block_cache=size)
    else:
        add("lossless")
    return ways


def work_of(ways: dict, prompts: list[list[int]], max_new: int) -> dict[str, Callable]:
    """For `in_turn`: each way answers the prompts."""
    return {name: functools.partial(way, prompts, max_new) for name, way in ways.items()}


def decoding(model: Qwen2, chat: Chat, problems: list[dict], args) -> None:
    """Print tokens per second, for every --rows."""
    prompts = common.encode(chat, problems)
    longest = max(map(len, prompts)) + args.max_new
    fast = fast_copy(model, args.compile)
    for rows in args.rows:
        ways = make_ways(model, fast, rows, longest, args)
        work = work_of(ways, prompts, args.max_new)
        start_up = work  # with --compile all widths are met
        if not args.compile:
            start_up = work_of(ways, prompts[:rows], max_new=2)
        in_turn(start_up, 1, model.device)
        answers, milliseconds = in_turn(work, args.rounds, model.device)
        first = next(iter(ways))
        per_second = {}
        cells = {}
        for name, found in answers.items():
            num_tokens = sum(len(answer.tokens) for answer in found)
            per_second[name] = [1000 * num_tokens / taken for taken in milliseconds[name]]
            num_same = sum(a.tokens == b.tokens for a, b in zip(found, answers[first]))
            per_forward = f"{common.tokens_per_forward(found):.2f}" if found[0].forwards else ""
            cells[name] = [f"{num_same} of {len(found)}", per_forward]
        head = [f"same as {first}", "tokens/forward"]
        print_table(f"rows: {rows}", "tok/s", per_second, head, cells)
        if args.llama_cpp:
            _, begin = in_turn(work_of(ways, prompts, max_new=1), args.rounds, model.device)
            after = {}
            for name, found in answers.items():
                rest = sum(len(answer.tokens) - 1 for answer in found)
                taken = zip(milliseconds[name], begin[name])
                after[name] = [1000 * rest / (whole - prefill) for whole, prefill in taken]
            print_table("after each first token", "tok/s", after)


# --------------------------------------------------------------------------- what a forward costs


def widths(model: Qwen2, args) -> None:
    """Print what a forward of one row costs after 200 tokens, by the number of its positions."""
    decoder = Decoder(model, Options(compile=args.compile), rows=1, longest=256)
    decoder.cache.lengths = [200]
    decode = decoder.runner.compiled_forward or decoder.runner.forward

    @torch.inference_mode()
    def forward(width: int) -> list:
        inputs = [(0, pos, pos + 1) for pos in range(200, 200 + width)]
        inputs = torch.tensor([inputs], device=model.device)
        columns = torch.arange(width - NUM_PREDICTIONS[width], width, device=model.device)[None]
        decoder.cache.reserve(width, [0])
        return decode(inputs, columns, noise=None).tolist()

    work = {f"{width}": functools.partial(forward, width) for width in NUM_PREDICTIONS}
    in_turn(work, 2, model.device)  # with --compile the second run, too, is slow
    _, milliseconds = in_turn(work, args.rounds, model.device)
    print_table("positions", "ms/forward", milliseconds)


# --------------------------------------------------------------------------------- the command line


def main() -> None:
    parser = Parser("Speed of decoding: all settings in turn, in one run.")
    add = parser.add_argument
    add("--transformers", action="store_true", help="next to transformers' generate")
    add("--llama-cpp", nargs="+", default=[], metavar="ADDRESS", help="next to llama-server")
    add("--block-caches", action="store_true", help="tau with the paper's cache, not lossless")
    add("--widths", action="store_true", help="what a forward of more positions costs, instead")
    add("--tau", type=float, default=0.95, help="of MARS")
    add("--temperature", type=number(float, 0), default=0.0, help="of ours; 0 is greedy")
    add("--compile", action="store_true", help="torch.compile ours")
    add("--rounds", type=number(int, 1), default=5, help="how often all settings run in turn")
    add("--shape", choices=common.SHAPES, help="random weights in this shape")
    add("--rows", type=number(int, 1), nargs="+", default=[1], help="decoded at a time")
    add("--max-new", type=number(int, 1), default=256, help="tokens per answer")
    common.add_problems(parser, limit=100)
    args = parser.parse_args()
    if args.transformers:
        require("transformers", "-r bench/requirements.txt")
    problems = common.read_problems(args.data, args.limit)
    device, dtype = find_device(args.device, args.dtype)
    model, chat = load(args.model, device, dtype)
    dtype = torch.int8 if is_int8(model) else model.dtype
    if dtype == torch.int8 and (args.transformers or args.shape):
        raise UserError("--transformers, --shape: not in 8 bits; use --dtype float32 or bfloat16")
    if args.shape:
        model = common.random_model(args.shape, device, dtype)
    print(f"{args.shape or args.model}, {len(problems)} problems, {args.rounds} rounds")
    print(f"{model.device}, {dtype}, {torch.get_num_threads()} threads")
    if args.widths:
        widths(model, args)
    else:
        decoding(model, chat, problems, args)


if __name__ == "__main__":
    run_main(main)
