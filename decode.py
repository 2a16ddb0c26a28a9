"""Decode several tokens per forward: MARS (arXiv 2604.07023, sections 3.4 and 4.5).

    python decode.py --prompt "..." --tau 0.8

Behind the prefix stand B masks. One causal forward gives B + 1 candidates: the last real token predicts the
first, every mask one more. They are accepted from the left while the confidence passes tau, the first one
always; the window slides behind them, and so on. tau = 1 is plain autoregression, without masks.

         feed   [ accepted by the last forward | M  M  M  M .. ]      one row, B = 4
    candidates                           c1      c2 c3 c4 c5          3 pass: feed c1 c2 c3 next

What is unusual here:
  * the last mask counts too: B masks are B + 1 candidates (the paper's decoder reads B of them);
  * rows never wait for each other, and a finished row takes the next prompt at once: every row has its
    own cursor in the cache (the paper's future work), so a batch gives what its prompts give alone;
  * a feed is always 2B + 1 wide: rows with fewer accepted tokens carry more masks, which is harmless;
  * `naive` below does the same without a cache, one row at a time. The tests hold the loop to it.
"""

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import KVCache
from model import Chat, Qwen2, UserError, load, pick_device, pick_dtype, run, visible

TOY = Path(__file__).parent / "toy" / "mars"
METRICS = ("probability", "margin", "entropy")

# ------------------------------------------------------------------------------------ what goes in and out


@dataclass
class Options:
    """How to decode. tau is one number or one per prompt; entropy is in nats, and accepts below tau."""

    tau: float | Sequence[float] = 0.95
    metric: str = "probability"
    block: int = 4  # B, the number of masks
    max_new: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Result:
    """What one prompt gave. `tokens` ends with the end-of-turn token if there was room for it."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # tokens that each forward gave; the prefill is one
    positions: int = 0  # computed by the model, masks included

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
    """One prompt on its way: its options, its random numbers, its result so far."""

    def __init__(self, index: int, prompt: list[int], model: Qwen2, options: Options):
        tau, config = options.tau, model.config
        self.index, self.prompt, self.max_new = index, prompt, options.max_new
        self.tau = float(tau if isinstance(tau, int | float) else tau[index])
        self.one_token = plain_ar(self.tau, options.metric)
        self.candidates = 1 if self.one_token else options.block + 1
        self.stop = set(config.eos_token_id)
        self.generator = torch.Generator(model.device).manual_seed(options.seed + index)
        self.last, self.done, self.result = prompt, False, Result()
        if not prompt:
            raise UserError("an empty prompt: there is nothing to continue")
        if len(prompt) + options.max_new > config.max_position_embeddings:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {options.max_new} new ones do not fit into the model's "
                f"{config.max_position_embeddings} positions; shorten the prompt or lower max_new"
            )

    def take(self, guesses: list[int], count: int, positions: int) -> list[int]:
        """Accept the first `count` guesses, up to an end-of-turn token or max_new; returns those kept."""
        room = self.max_new - len(self.result.tokens)
        kept = guesses[: min(count, room)]
        ends = [i for i, token in enumerate(kept) if token in self.stop]
        kept = kept[: ends[0] + 1] if ends else kept
        self.last, self.done = kept, bool(ends) or len(kept) == room
        self.result.tokens += kept
        self.result.accepted.append(len(kept))
        self.result.positions += positions
        return kept


# ------------------------------------------------------------------------------------------ acceptance


def plain_ar(tau: float, metric: str) -> bool:
    """Is this tau the one-token point? A decision about tau alone: no confidence can slip through."""
    if metric not in METRICS:
        raise UserError(f"metric {metric!r}: must be one of {', '.join(METRICS)}")
    if not 0 <= tau or (metric != "entropy" and tau > 1):
        bounds = "at least 0 (nats)" if metric == "entropy" else "between 0 and 1"
        raise UserError(f"tau {tau}: must be {bounds} for the metric {metric}")
    return tau <= 0 if metric == "entropy" else tau >= 1


def confidences(probs: Tensor, guesses: Tensor, metric: str) -> Tensor:
    """(R, C) from probabilities (R, C, V) and the guessed tokens (R, C); see section 3.4."""
    if metric == "entropy":
        return torch.special.entr(probs).sum(-1)
    if metric == "margin":
        best, second = probs.topk(2).values.unbind(-1)
        return best - second
    return probs.gather(-1, guesses[..., None])[..., 0]


def accepted_lengths(confidence: Tensor, tau: Tensor, metric: str) -> Tensor:
    """Length (R,) of the leading run of candidates (R, C) that pass tau (R,); the first always does."""
    passed = confidence <= tau[:, None] if metric == "entropy" else confidence >= tau[:, None]
    passed[:, 0] = True
    return passed.long().cumprod(-1).sum(-1)


def guess(logits: Tensor, requests: list[Request | None], options: Options) -> tuple[Tensor, Tensor]:
    """Guessed tokens (R, C) and how many of each row to accept (R,), from logits (R, C, V).

    At temperature T a guess is drawn from p^(1/T) of its own position; its confidence is its probability
    at T = 1, as in the paper's code. Drawn so, several tokens per forward are NOT a sample of the AR
    distribution, since each is blind to the others; at tau = 1 they are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # 0.9989 is 1.0 in bfloat16
    probs = logits.softmax(-1)
    guesses = logits.argmax(-1)
    if options.temperature > 0:  # argmax(p / Exp(1)) is a draw from p
        noise = torch.ones_like(probs)
        for row, request in zip(noise, requests):
            if request:  # its own generator: what a row draws does not depend on its neighbours
                row[: request.candidates].exponential_(generator=request.generator)
        guesses = ((logits / options.temperature).softmax(-1) / noise).argmax(-1)
    tau = torch.tensor([r.tau if r else 0.0 for r in requests], device=logits.device, dtype=probs.dtype)
    one_token = torch.tensor([not r or r.one_token for r in requests], device=logits.device)
    counts = accepted_lengths(confidences(probs, guesses, options.metric), tau, options.metric)
    return guesses, counts.masked_fill(one_token, 1)


# --------------------------------------------------------------------------------------- the decoding loop


def cached_mask(slots: Tensor, span: int, pos: Tensor, start: Tensor) -> Tensor:
    """Mask (R, 1, T, span) of T new positions (R, T) at `slots` (R, T), against all slots of the cache.

    A committed key is clean and its position is its slot. What lies behind a row's length is left over
    from earlier forwards and hidden, except for the new positions themselves.
    """
    k_pos = torch.arange(span, device=pos.device).repeat(len(pos), 1)
    k_start, k_doc = k_pos + 1, (k_pos >= slots[:, :1]).long()
    k_pos.scatter_(1, slots, pos)
    k_start.scatter_(1, slots, start)
    k_doc.scatter_(1, slots, 0)
    q_pos, q_start = pos[:, None, :, None], start[:, None, :, None]
    return visible(q_pos, q_start, 0, k_pos[:, None, None], k_start[:, None, None], k_doc[:, None, None])


def forward(model: Qwen2, cache: KVCache, feeds: list[list[int]], width: int, rows: slice, C: int) -> Tensor:
    """Logits (R, C, V) of each row's last real token and of C - 1 masks behind it.

    feeds: the real tokens of each row that the cache does not have yet; masks fill them up to `width`.
    """
    device, mask_id = model.device, model.config.mask_token_id
    tokens = torch.tensor([feed + [mask_id] * (width - len(feed)) for feed in feeds], device=device)
    real = torch.tensor([len(feed) for feed in feeds], device=device)[:, None]
    slots = cache.reserve(width, rows)  # in this policy a position is its slot
    is_mask = torch.arange(width, device=device) >= real
    start = torch.where(is_mask, slots[:, :1] + real, slots + 1)
    hidden = model(tokens, slots, cached_mask(slots, cache.span, slots, start), cache)
    at = (real - 1).clamp(min=0) + torch.arange(C, device=device)
    hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.size(-1)))
    cache.commit([len(feed) for feed in feeds])  # masks stay behind the length, as scratch
    return model.logits(hidden.flatten(0, 1)).unflatten(0, (len(feeds), C))


@torch.inference_mode()
def stream(
    model: Qwen2, prompts: list[list[int]], options: Options, rows: int = 8
) -> Iterator[tuple[Request, list[int]]]:
    """Decode all prompts, `rows` at a time; yields a request and its new tokens after each of its forwards."""
    check(model, options)
    requests = [Request(i, prompt, model, options) for i, prompt in enumerate(prompts)]
    waiting = deque(requests)
    C = max((request.candidates for request in requests), default=1)
    width = 2 * C - 1  # C accepted tokens at most, C - 1 masks at least
    capacity = max((len(prompt) for prompt in prompts), default=0) + options.max_new + width
    live: list[Request | None] = [None] * min(rows, len(prompts))
    cache = KVCache(model.config, len(live), capacity, model.device, model.model.norm.weight.dtype)

    def advance(batch: list[Request | None], width: int, at: slice) -> Iterator[tuple[Request, list[int]]]:
        feeds = [request.last if request else [] for request in batch]
        logits = forward(model, cache, feeds, width, at, C)
        guesses, counts = guess(logits, batch, options)
        decided = torch.cat([guesses, counts[:, None]], dim=1).tolist()  # the only wait for the device
        for request, (*tokens, count) in zip(batch, decided):
            if request:
                yield request, request.take(tokens, count, width)

    while waiting or any(live):
        for r in range(len(live)):
            while waiting and not live[r]:  # prefill alone, then join the others
                live[r] = waiting.popleft()
                cache.rewind(r)
                yield from advance([live[r]], len(live[r].prompt) + C - 1, slice(r, r + 1))
                live[r] = None if live[r].done else live[r]
        if any(live):
            yield from advance(live, width, slice(None))
        live = [None if not request or request.done else request for request in live]


def generate(model: Qwen2, prompts: list[list[int]], rows: int = 8, **options) -> list[Result]:
    """Decode prompts (token ids), `rows` at a time, with the fields of `Options`; a Result for each."""
    results = {i: Result() for i in range(len(prompts))}
    for request, _ in stream(model, prompts, Options(**options), rows):
        results[request.index] = request.result
    return list(results.values())


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], index: int = 0, **options) -> Result:
    """The reference: one row, no cache, plain causal attention over the whole sequence, every time."""
    options = Options(**options)
    check(model, options)
    request = Request(index, prompt, model, options)
    while not request.done:
        real = prompt + request.result.tokens
        feed = torch.tensor([real + [model.config.mask_token_id] * (request.candidates - 1)])
        feed = feed.to(model.device)
        hidden = model(feed, torch.arange(feed.size(1), device=model.device)[None], None)
        logits = model.logits(hidden[0, len(real) - 1 :])[None]
        guesses, counts = guess(logits, [request], options)
        request.take(guesses[0].tolist(), counts.item(), feed.size(1))
    return request.result


def check(model: Qwen2, options: Options) -> None:
    """Raise UserError for options that no prompt could run with."""
    for name, least in (("block", 1), ("max_new", 1), ("temperature", 0)):
        if not getattr(options, name) >= least:
            raise UserError(f"{name} {getattr(options, name)}: must be at least {least}")
    if model.config.mask_token_id is None:
        raise UserError("the model has no mask token: set config.mask_token_id, or use model.load")


# ------------------------------------------------------------------------------------------- command line


class TextStream:
    """Turns tokens into text as they come, in whole characters: an emoji may take several tokens."""

    def __init__(self, chat: Chat):
        self.chat, self.tokens, self.shown = chat, [], 0

    def add(self, tokens: list[int]) -> str:
        """The text that is certain now and was not before."""
        self.tokens += tokens
        text = self.chat.decode(self.tokens).rstrip("\ufffd")  # what a cut character decodes to
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Answer a prompt several tokens per forward (MARS).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--prompt", required=True, help="what the user says")
    add("--system", help="a system message before it; None leaves it to the chat template")
    add("--model", help="directory or hub id; None is the bundled toy/mars")
    add("--tau", type=float, default=0.95, help="accept a token while its confidence passes; 1 is plain AR")
    add("--metric", choices=METRICS, default="probability", help="of confidence; entropy: plain AR is 0")
    add("--block", type=int, help="masks per forward; None is what the checkpoint was trained with, else 4")
    add("--max-new", type=int, default=256, help="most tokens to generate")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None is bfloat16 on cuda, else float32")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plain = plain_ar(args.tau, args.metric)
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    device = pick_device(args.device)
    if not args.model:
        print("model: toy/mars, bundled; it solves small word problems (--model takes yours)", file=sys.stderr)
    model, chat = load(args.model or str(TOY), device, pick_dtype(args.dtype, device))
    block = args.block if args.block is not None else model.config.block_size or 4
    options = Options(args.tau, args.metric, block, args.max_new, args.temperature, args.seed)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    prompt = chat.encode(chat.prompt([*messages, {"role": "user", "content": args.prompt}]))

    text, began = TextStream(chat), time.perf_counter()
    request = None
    try:
        for request, tokens in stream(model, [prompt], options):
            print(text.add(tokens), end="", flush=True)
    finally:  # after Ctrl-C too: the text so far stays, and its statistics
        print()
        if request:
            print(statistics(request.result, time.perf_counter() - began))
    if not plain and request.result.forwards >= 8 and request.result.tokens_per_forward == 1:
        print("this checkpoint accepts 1.0 tokens per forward; train it or use --tau 1", file=sys.stderr)


def statistics(result: Result, seconds: float) -> str:
    tokens, forwards = len(result.tokens), result.forwards
    return (
        f"{tokens} tokens in {forwards} forwards: {result.tokens_per_forward:.2f} tokens per forward, "
        f"{tokens / seconds:.0f} tok/s"
    )


if __name__ == "__main__":
    run(main)
