"""Decode several tokens per forward: MARS (arXiv 2604.07023).

    python decode.py --prompt "..." --tau 0.8

Behind the prefix stand B masks. One causal forward gives B + 1 candidates: the last real token
predicts the first, every mask one more. They are accepted from the left while their confidence
passes tau, the first one always; the window slides behind them. tau = 1 is plain autoregression.

          feed   [ accepted last time | M  M  M  M ... ]        one row, B = 4
    candidates                     c1   c2 c3 c4 c5             c1 c2 c3 pass: they are fed next

What is unusual here:
  * the last mask counts too: B masks are B + 1 candidates (the paper's decoder reads B of them);
  * every row has its own cursor in the cache (the paper's future work): no row waits for another, a
    finished row takes the next prompt at once, and a batch gives what its prompts give alone;
  * after the prefill every feed is 2B + 1 wide: rows with fewer accepted tokens carry more masks;
  * `naive` does the same without a cache, one row at a time; the tests hold the loop to it.
"""

import argparse
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import KVCache
from model import Chat, Qwen2, UserError, load, place, run

TOY = Path(__file__).parent / "toy" / "mars"
METRICS = ("probability", "margin", "entropy")

# --------------------------------------------------------------------------- requests and results


@dataclass
class Options:
    """How to decode; tau is one number, or one per prompt."""

    tau: float | Sequence[float] = 0.95
    metric: str = "probability"
    block: int | None = None  # B, the number of masks; None: the checkpoint's own, else 4
    max_new: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Result:
    """What one prompt gave."""

    tokens: list[int] = field(default_factory=list)  # with the end-of-turn token, if it came
    accepted: list[int] = field(default_factory=list)  # tokens from each forward, prefill included
    positions: int = 0  # that the model computed, masks included

    @property
    def forwards(self) -> int:
        return len(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        return len(self.tokens) / max(1, self.forwards)

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards gave 1, 2, ... tokens."""
        return dict(sorted(Counter(self.accepted).items()))


class Request:
    """One prompt on its way: what it asks for, its random numbers, its result so far."""

    def __init__(self, prompt: list[int], index: int, tau: float, model: Qwen2, options: Options):
        self.prompt, self.index, self.tau = prompt, index, tau
        self.one_token = plain_ar(tau, options.metric)
        block = options.block or model.config.block_size or 4
        self.candidates = 1 if self.one_token else block + 1
        self.max_new, self.stop = options.max_new, set(model.config.eos_token_id)
        self.generator = torch.Generator(model.device).manual_seed(options.seed + index)
        self.last, self.done, self.result = prompt, False, Result()

    def take(self, guesses: list[int], count: int, positions: int) -> list[int]:
        """Accept `count` guesses, but nothing behind an end-of-turn token or max_new."""
        room = self.max_new - len(self.result.tokens)
        kept = guesses[: min(count, room)]
        ends = [i for i, token in enumerate(kept) if token in self.stop]
        kept = kept[: ends[0] + 1] if ends else kept
        self.last, self.done = kept, bool(ends) or len(kept) == room
        self.result.tokens += kept
        self.result.accepted.append(len(kept))
        self.result.positions += positions
        return kept


def prepare(model: Qwen2, prompts: list[list[int]], options: Options) -> list[Request]:
    """A request for each prompt; raises UserError for what could not run, before anything runs."""
    for name, least in (("block", 1), ("max_new", 1), ("temperature", 0)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise UserError(f"{name} {value}: must be at least {least}")
    if not math.isfinite(options.temperature) or not 0 <= options.seed < 2**62:
        raise UserError(f"temperature {options.temperature}, seed {options.seed}: out of range")
    if model.config.mask_token_id is None:
        raise UserError("the model has no mask token; load it with model.load")
    positions, words = model.config.max_position_embeddings, model.config.vocab_size
    if (options.block or 0) > positions:
        raise UserError(f"block {options.block}: the model has {positions} positions in all")
    taus = options.tau if isinstance(options.tau, Sequence) else [options.tau] * len(prompts)
    if len(taus) != len(prompts):
        raise UserError(f"{len(taus)} values of tau for {len(prompts)} prompts")
    for prompt in prompts:
        if not prompt or not all(0 <= token < words for token in prompt):
            raise UserError(f"a prompt must be token ids below {words}, at least one")
        if len(prompt) + options.max_new > positions:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {options.max_new} new ones exceed the "
                f"model's {positions} positions: shorten the prompt or lower max_new"
            )
    return [Request(p, i, float(t), model, options) for i, (p, t) in enumerate(zip(prompts, taus))]


# ------------------------------------------------------------------------------------- acceptance


def plain_ar(tau: float, metric: str) -> bool:
    """Is this the one-token tau? Decided on tau alone: no confidence can round its way past it."""
    if metric not in METRICS:
        raise UserError(f"metric {metric!r}: must be one of {', '.join(METRICS)}")
    if not tau >= 0 or (metric != "entropy" and tau > 1):
        bounds = "at least 0 (nats)" if metric == "entropy" else "between 0 and 1"
        raise UserError(f"tau {tau}: must be {bounds} for the metric {metric}")
    return tau <= 0 if metric == "entropy" else tau >= 1


def confidences(probs: Tensor, guesses: Tensor, metric: str) -> Tensor:
    """(R, C), of probabilities (R, C, V) and the guessed tokens (R, C)."""
    if metric == "entropy":
        return torch.special.entr(probs).sum(-1)
    if metric == "margin":
        best, second = probs.topk(2).values.unbind(-1)
        return best - second
    return probs.gather(-1, guesses[..., None])[..., 0]


def accepted_lengths(confidence: Tensor, tau: Tensor, metric: str) -> Tensor:
    """Length (R,) of the leading run in (R, C) that passes tau (R,); the first always does."""
    tau = tau[:, None]
    passed = confidence <= tau if metric == "entropy" else confidence >= tau
    passed[:, 0] = True
    return passed.long().cumprod(-1).sum(-1)


def guess(
    logits: Tensor, requests: list[Request | None], options: Options
) -> tuple[Tensor, Tensor]:
    """Guessed tokens (R, C), and how many of each row to accept (R,), from logits (R, C, V).

    At temperature T a guess is drawn from p^(1/T) of its own position; its confidence is taken at
    T = 1, as in the paper's code. Every draw is blind to the ones beside it, so below tau = 1 the
    text is NOT a sample of the autoregressive distribution.
    """
    # In bfloat16 a probability of 0.9989 would round to 1.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs, guesses = logits.softmax(-1), logits.argmax(-1)
    if options.temperature > 0:  # argmax(p / Exp(1)) is a draw from p
        noise = torch.ones_like(probs)
        for row, request in zip(noise, requests):
            if request:  # its own generator: no draw depends on a neighbour
                row[: request.candidates].exponential_(generator=request.generator)
        logits = logits - logits.amax(-1, keepdim=True)  # small temperatures must not overflow
        guesses = ((logits / options.temperature).softmax(-1) / noise).argmax(-1)
    tau = torch.tensor(
        [r.tau if r else 0 for r in requests], device=probs.device, dtype=probs.dtype
    )
    one_token = torch.tensor([not r or r.one_token for r in requests], device=probs.device)
    confidence = confidences(probs, guesses, options.metric)
    counts = accepted_lengths(confidence, tau, options.metric)
    return guesses, counts.masked_fill(one_token, 1)


# ------------------------------------------------------------------------------- the decoding loop


def cached_mask(slots: Tensor, span: int) -> Tensor:
    """Mask (R, 1, T, span): new positions in `slots` (R, T) against the first `span` of the cache.

    In a feed [real | masks] the one window of masks comes last, and there `visible` is plain
    causality. It also hides what earlier forwards left behind the new positions.
    """
    return torch.arange(span, device=slots.device) <= slots[:, None, :, None]


def forward(
    model: Qwen2, cache: KVCache, feeds: list[list[int]], width: int, rows: slice, C: int
) -> Tensor:
    """Logits (R, C, V) at the last real token of each row's feed and at C - 1 masks behind it.

    feeds: the real tokens that the cache does not have yet; masks fill each up to `width`.
    """
    device, mask_id = model.device, model.config.mask_token_id
    tokens = torch.tensor([f + [mask_id] * (width - len(f)) for f in feeds], device=device)
    real = torch.tensor([len(f) for f in feeds], device=device)[:, None]
    slots = cache.reserve(width, rows)  # a position's slot is its position id, too
    hidden = model(tokens, slots, cached_mask(slots, cache.span), cache)
    cache.commit([len(f) for f in feeds])  # the masks stay behind, as scratch
    at = (real - 1).clamp(min=0) + torch.arange(C, device=device)
    hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.size(-1)))
    return model.logits(hidden.flatten(0, 1)).unflatten(0, (len(feeds), C))


@torch.inference_mode()
def stream(
    model: Qwen2, prompts: list[list[int]], options: Options, rows: int = 8
) -> Iterator[tuple[Request, list[int]]]:
    """Decode prompts, `rows` at a time; yields each request with its new tokens, as they come."""
    if rows < 1:
        raise UserError(f"rows {rows}: must be at least 1")
    requests = prepare(model, prompts, options)
    if not requests:
        return
    waiting, live = deque(requests), [None] * min(rows, len(requests))
    C = max(request.candidates for request in requests)
    width = 2 * C - 1  # room for C accepted tokens, and C - 1 masks behind them
    capacity = max(map(len, prompts)) + options.max_new + width
    dtype = model.model.norm.weight.dtype
    cache = KVCache(model.config, len(live), capacity, model.device, dtype)

    def advance(batch: list[Request | None], width: int, where: slice):
        feeds = [request.last if request else [] for request in batch]
        guesses, counts = guess(forward(model, cache, feeds, width, where, C), batch, options)
        decided = torch.cat([guesses, counts[:, None]], dim=1).tolist()  # all rows in one copy
        for request, (*tokens, count) in zip(batch, decided):
            if request:
                yield request, request.take(tokens, count, width)

    def release(r: int) -> None:
        if live[r] and live[r].done:
            live[r] = None
            cache.rewind(r)

    while waiting or any(live):
        for r in range(len(live)):
            release(r)
            while waiting and not live[r]:  # prefill alone, then join the others
                live[r] = waiting.popleft()
                yield from advance([live[r]], len(live[r].prompt) + C - 1, slice(r, r + 1))
                release(r)
        if any(live):
            yield from advance(live, width, slice(None))


def generate(model: Qwen2, prompts: list[list[int]], rows: int = 8, **options) -> list[Result]:
    """Decode prompts (token ids), `rows` at a time; the options are the fields of `Options`."""
    results = [Result()] * len(prompts)
    for request, _ in stream(model, prompts, Options(**options), rows):
        results[request.index] = request.result
    return results


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], **options) -> Result:
    """The reference: one row, no cache, plain causal attention over the whole text each time."""
    options = Options(**options)
    [request] = prepare(model, [prompt], options)
    while not request.done:
        real = prompt + request.result.tokens
        masks = [model.config.mask_token_id] * (request.candidates - 1)
        feed = torch.tensor([real + masks], device=model.device)
        hidden = model(feed, torch.arange(feed.size(1), device=model.device)[None], None)
        logits = model.logits(hidden[0, len(real) - 1 :])
        guesses, counts = guess(logits[None], [request], options)
        request.take(guesses[0].tolist(), counts.item(), feed.size(1))
    return request.result


# ------------------------------------------------------------------------------------ command line


class TextStream:
    """Tokens to text as they come, whole characters only: an emoji may take several tokens."""

    def __init__(self, chat: Chat):
        self.chat, self.tokens, self.shown = chat, [], 0

    def add(self, tokens: list[int]) -> str:
        """The text that is certain now and was not before."""
        self.tokens += tokens
        text = self.chat.decode(self.tokens).rstrip("\ufffd")  # half a character decodes to that
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new


def note(line: str) -> None:
    print(line, file=sys.stderr)


def statistics(result: Result, seconds: float) -> str:
    count, ratio = len(result.tokens), f"{result.tokens_per_forward:.2f} tokens per forward"
    return f"{count} tokens in {result.forwards} forwards: {ratio}, {count / seconds:.0f} tok/s"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Answer a prompt, several tokens per forward (MARS).",
        usage='%(prog)s --prompt "..." [option ...]',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--prompt", required=True, help="what the user says")
    add("--system", help="a system message before it; None: as the chat template has it")
    add("--model", help="directory or hub id; None: the bundled toy/mars")
    add("--tau", type=float, default=0.95, help="the confidence to accept a token; 1 is plain AR")
    add("--metric", choices=METRICS, default="probability", help="entropy: nats, plain AR is 0")
    add("--block", type=int, help="masks per forward; None: what the checkpoint learnt, else 4")
    add("--max-new", type=int, default=256, help="most tokens to generate")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plain = plain_ar(args.tau, args.metric)
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    device, dtype = place(args.device, args.dtype)
    if args.model is None:
        note("toy/mars, the bundled model: only for problems like toy/test.jsonl's (see --model)")
    model, chat = load(str(TOY) if args.model is None else args.model, device, dtype)
    unknown = not (plain or args.block or model.config.block_size)
    if unknown:
        note("config.json names no block_size: if the model never learnt masks, use --tau 1")
    messages = [{"role": "system", "content": args.system}] if args.system else []
    prompt = chat.encode(chat.prompt([*messages, {"role": "user", "content": args.prompt}]))
    options = Options(args.tau, args.metric, args.block, args.max_new, args.temperature, args.seed)

    prepare(model, [prompt], options)
    next(stream(model, [prompt[:1]], options))  # the first forward pays for start-up, untimed
    text, result, began = TextStream(chat), None, time.perf_counter()
    try:
        for request, tokens in stream(model, [prompt], options):
            result = request.result
            print(text.add(tokens), end="", flush=True)
    finally:  # also after Ctrl-C: the text so far stays, with its statistics
        if result:
            print("\n" + statistics(result, time.perf_counter() - began))
    if not plain and not unknown and result.forwards >= 8 and result.tokens_per_forward < 1.05:
        note("this model accepts 1.0 tokens per forward; train it more or use --tau 1")


if __name__ == "__main__":
    run(main)
