"""Decode several tokens per forward: MARS (arXiv 2604.07023).

    python decode.py --prompt "..." --tau 0.8

Behind the prefix stand B masks. One causal forward gives B + 1 candidates: the last real token
predicts the first, every mask one more. They are accepted from the left while their confidence
passes tau, the first one always; the window slides behind them. tau = 1 is plain autoregression.

          feed   [ accepted last time | M  M  M  M ... ]        one row, B = 4
    candidates                     c1   c2 c3 c4 c5             c1 c2 c3 pass: they are fed next

What is unusual here:
  * the last mask counts too: B masks are B + 1 candidates (the paper's decoder reads B of them);
  * every row has its own cursor in the cache (the paper's future work): none waits for another, and
    a batch gives what its prompts give alone. The paper's blocks are two properties of `Answer`;
  * a finished row takes the next prompt at once; tau may change between any two forwards;
  * `verify` makes it lossless: the next forward carries the guesses as if they were real, with a
    group of masks for each outcome, and says itself what AR would have said there:

          feed   [ x  g1 g2 | M M M M | M M M M | M M M M ]     x, the last token, and two guesses
       AR says     g1  y  .   behind x  behind g1  behind g2    g1 holds, g2 does not: accept g1 y;
                                                                the masks behind g1 guess on
  * `naive` is the loop without cache, batch and `verify`; the tests hold the loop to it.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os.path import commonprefix  # of any two lists
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kv_cache import KVCache
from model import Chat, Qwen2, UserError, load, place, run

TOY = Path(__file__).parent / "toy" / "mars"
PREFILL = 4096  # positions of prompts, and of the padding beside shorter ones, in one forward
METRICS = ("probability", "margin", "entropy")
Tau = float | Callable[[int], float]  # a number, or a function of how many prompts wait


@dataclass
class Options:
    """How to decode."""

    tau: Tau = 0.95
    metric: str = "probability"
    block: int | None = None  # B, the number of masks; None: the checkpoint's own, else 4
    block_cache: int | None = None  # B_cache of the paper's block policy; None: the cursor's
    verify: bool = False  # check guesses before they count: text, or draws, are those of tau = 1
    max_new: int = 256
    temperature: float = 0.0
    seed: int = 0
    compile: bool = False  # static shapes: slow to begin with each Decoder, then fast on a GPU

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("block_cache", 1), ("max_new", 1), ("temperature", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"{name} {value}: must be at least {least}")
        if not math.isfinite(self.temperature) or not 0 <= self.seed < 2**62:
            raise UserError(f"temperature {self.temperature}, seed {self.seed}: out of range")
        if self.verify and self.block_cache:
            raise UserError("verify has no block_cache: what was checked is in the cache already")


class Answer:
    """One prompt and what becomes of it: `tokens`, how many each forward gave, what it cost."""

    def __init__(self, prompt: list[int], model: Qwen2, options: Options, index=0, tau=None):
        """It draws with seed + index; its tau is the options' unless it has its own."""
        positions, words = model.config.max_position_embeddings, model.config.vocab_size
        self.block = options.block or model.config.block_size or 4
        if model.config.mask_token_id is None:
            raise UserError("the model has no mask token; load it with model.load")
        if not prompt or not all(0 <= token < words for token in prompt):
            raise UserError(f"a prompt must be token ids below {words}, at least one")
        if len(prompt) + options.max_new > positions or self.block > positions:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {options.max_new} new ones, or "
                f"{self.block} masks, exceed the model's {positions} positions"
            )
        self.ids, self.index, self.options = list(prompt), index, options  # tokens are added
        self.knob = options.tau if tau is None else tau
        self.tokens: list[int] = []  # with the end-of-turn token, if it came
        self.guesses: list[int] = []  # to verify: what the next forward checks
        self.accepted: list[int] = []  # tokens from each forward, prefill included
        self.positions: list[int] = []  # that each forward computed, masks included
        self.done, self.stop = False, set(model.config.eos_token_id)
        self.generator = torch.Generator(model.device).manual_seed(options.seed + index)
        self.read_tau(waiting=0)

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

    @property
    def unfilled(self) -> int:
        """Block policy (4.5): tokens of a block not yet full; not cached, but fed every time."""
        return len(self.tokens) % (self.options.block_cache or 1)

    @property
    def candidates(self) -> int:
        """Tokens that one forward may give; block policy: none behind the end of the block."""
        room = (self.options.block_cache or math.inf) - self.unfilled
        return 1 if self.one_token else min(self.block + 1, room)

    def read_tau(self, waiting: int) -> None:
        """What the next forward goes by; a function is asked before each."""
        self.tau = float(self.knob(waiting) if callable(self.knob) else self.knob)
        self.one_token = plain_ar(self.tau, self.options.metric)

    def feed(self, cached: int, mask_id: int) -> list[tuple[int, int, int]]:
        """(token, pos, start) for the next forward: see `visible` in model.py.

        What is not in the cache, the guesses, and a group of masks behind each number of them.
        """
        end, news = len(self.ids), self.ids[cached:] + self.guesses
        clean = [(token, pos, pos + 1) for pos, token in enumerate(news, cached)]
        groups = range(end, end + len(self.guesses) + 1)
        window = range(self.candidates - 1)
        return clean + [(mask_id, start + i, start) for start in groups for i in window]

    def take(self, tokens: list[int], guesses: list[int], positions: int) -> list[int]:
        """Accept tokens, but nothing behind an end-of-turn token or max_new."""
        room = self.options.max_new - len(self.tokens)
        kept, self.guesses = tokens[:room], guesses
        ends = [i for i, token in enumerate(kept) if token in self.stop]
        kept = kept[: ends[0] + 1] if ends else kept
        self.done = bool(ends) or len(kept) == room
        self.ids += kept
        self.tokens += kept
        self.accepted.append(len(kept))
        self.positions.append(positions)
        return kept


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


def choose(logits: Tensor, batch: list[Answer | None], options: Options) -> Tensor:
    """The best tokens (R, C) of logits (R, C, V), or draws from p^(1/T) at a temperature T."""
    if options.temperature == 0:
        return logits.argmax(-1)
    noise = torch.ones_like(logits)  # argmax(p / Exp(1)) is a draw from p
    for row, answer in zip(noise, batch):
        if answer:  # its own generator: no draw depends on a neighbour
            count = len(answer.guesses) + 1 if options.verify else answer.candidates
            row[:count].exponential_(generator=answer.generator)
    logits = logits - logits.amax(-1, keepdim=True)  # small temperatures must not overflow
    return ((logits / options.temperature).softmax(-1) / noise).argmax(-1)


def guess(logits: Tensor, batch: list[Answer | None], options: Options) -> tuple[Tensor, Tensor]:
    """Guessed tokens (R, C), and how many of each row to accept (R,), from logits (R, C, V).

    At temperature T a guess is drawn from p^(1/T) of its own position; its confidence is taken at
    T = 1, as in the paper's code. Every draw is blind to the ones beside it, so below tau = 1 the
    text is NOT a sample of the autoregressive distribution. With `verify`, which checks guesses,
    it is; there a guess is the best token, whatever the temperature.
    """
    guesses = logits.argmax(-1) if options.verify else choose(logits, batch, options)
    if guesses.size(1) == 1:  # the first is accepted in any case
        return guesses, torch.ones_like(guesses[:, 0])
    probs = logits.softmax(-1)
    limits = [(answer.tau, answer.candidates) if answer else (0, 1) for answer in batch]
    tau, most = torch.tensor(limits, device=probs.device, dtype=probs.dtype).unbind(-1)
    counts = accepted_lengths(confidences(probs, guesses, options.metric), tau, options.metric)
    return guesses, counts.minimum(most.long())


# ------------------------------------------------------------------------------- the decoding loop
#
# On a CPU, reading the weights is what a forward of one position costs, and torch's default kernels
# read them at half the speed of the memory. What the next two do was measured with
# bench/peers.py --shape 0.5B.


def tall_by_columns(model: Qwen2) -> None:
    """Lay matrices with more rows than columns out by columns. Shapes and values stay the same.

    Not those of a model in training: its optimizer goes by their layout.
    """
    for weight in model.parameters():
        tall = weight.dim() == 2 and weight.size(0) > weight.size(1) and weight.is_contiguous()
        if tall and not weight.requires_grad:
            weight.data = weight.data.t().contiguous().t()


def compiled(model: Qwen2) -> Callable[..., Tensor]:
    """Its forward for static shapes; on a GPU as CUDA graphs, which spare it waiting for Python."""
    torch._dynamo.config.recompile_limit = 256  # graphs: two widths for each 256 slots of span
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return torch.compile(model.forward, dynamic=False, mode=mode)


ONEDNN = torch.backends.mkldnn.enabled


@contextmanager
def fast_for_one(model: Qwen2, tokens: Tensor) -> Iterator[None]:
    """In bfloat16 torch's own product with one vector is faster than oneDNN's; with more it is not.

    The switch is the whole process's: another thread may be slower meanwhile, but not otherwise.
    """
    alone = tokens.numel() == 1 and model.model.norm.weight.dtype == torch.bfloat16
    torch.backends.mkldnn.enabled = ONEDNN and not alone
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = ONEDNN


def logits_at(model: Qwen2, hidden: Tensor, at: Tensor) -> Tensor:
    """Logits (R, C, V), in float32 at least, of hidden states (R, T, D) at positions (R, C).

    A row that has fewer than C candidates may ask for positions that are not there, and not look.
    """
    at = at.clamp(max=hidden.size(1) - 1)[..., None]
    picked = hidden.gather(1, at.expand(-1, -1, hidden.size(-1)))
    logits = model.logits(picked.flatten(0, 1)).unflatten(0, at.shape[:2])
    # In bfloat16 a probability of 0.9989 would round to 1.
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Decoder:
    """The loop: append to `waiting` whenever a prompt comes; each `step` is one forward."""

    def __init__(self, model: Qwen2, answers: list[Answer], options: Options, rows=8, longest=0):
        """`longest`: of the prompts that will come later with their answers, in tokens."""
        if rows < 1:
            raise UserError(f"rows {rows}: must be at least 1")
        self.model, self.options, self.waiting = model, options, deque(answers)
        self.hidden_states = compiled(model) if options.compile else model
        self.rows: list[Answer | None] = [None] * rows
        longest = max([longest, *(len(answer.ids) + options.max_new for answer in answers)])
        block = options.block or model.config.block_size or 4
        # Behind what is committed: accepted tokens (of a whole block, if blocks are used), masks;
        # with verify one token, B guesses and B + 1 groups of B masks.
        fed = max(block + 1, min(options.block_cache or 0, options.max_new))
        fed = block * (block + 1) + 1 if options.verify else fed
        dtype = model.model.norm.weight.dtype
        if (model.device.type, dtype) == ("cpu", torch.float32):
            tall_by_columns(model)
        self.widest, unit = fed + block, 256 if options.compile else 64
        capacity = -(-(longest + self.widest) // unit) * unit
        self.cache = KVCache(model.config, rows, capacity, model.device, dtype, unit)
        if options.compile:
            for k, v in self.cache.layers:  # or a CUDA graph would copy them every time
                torch._dynamo.mark_static_address(k)
                torch._dynamo.mark_static_address(v)

    def __iter__(self) -> Iterator[tuple[Answer, list[int]]]:
        """Until all is done: every answer with its new tokens, as they come."""
        while news := self.step():
            yield from news

    @torch.inference_mode()
    def step(self) -> list[tuple[Answer, list[int]]]:
        """Prefill waiting prompts if rows are free, else advance all; [] if none is left."""
        admitted = self.admit()
        if self.rows[admitted]:
            return self.forward(self.rows[admitted], admitted)
        live = [row for row in self.rows if row and not row.done]
        for r, row in enumerate(self.rows):
            if live and row and row.done:  # or the span would still cover it
                self.rows[r] = None
                self.cache.rewind(r)
        # Block policy: a row with a full block sits out until there is no other.
        ready = [row for row in live if row.unfilled] or live
        batch = [row if row in ready else None for row in self.rows]
        return self.forward(batch, slice(None)) if live else []

    def admit(self) -> slice:
        """Give waiting prompts the first free rows that lie side by side; these."""
        free = [row is None or row.done for row in self.rows]
        first = last = free.index(True) if self.waiting and True in free else len(free)
        held, width = 0, 0  # the most of any row
        while self.waiting and last < len(free) and free[last]:
            old, new = self.rows[last], self.waiting[0]
            # What the row still holds is not fed again: a conversation, a system message.
            kept = old.ids[: self.cache.lengths[last]] if old else []
            kept = len(commonprefix([kept, new.ids[:-1]]))
            held, width = max(held, kept), max(width, len(new.ids) - kept + new.block)
            too_wide = width * (last - first + 1) > PREFILL or held + width > self.cache.capacity
            if last > first and too_wide:
                break
            self.cache.rewind(last, kept)
            self.rows[last] = self.waiting.popleft()  # after that: Ctrl-C may come in between
            last += 1
        return slice(first, last)

    def forward(self, batch: list[Answer | None], where: slice) -> list[tuple[Answer, list[int]]]:
        """One forward of the rows `where` of the cache; one that is None in `batch` sits it out."""
        for answer in filter(None, batch):
            answer.read_tau(len(self.waiting))
        device, mask_id = self.model.device, self.model.config.mask_token_id
        lengths = self.cache.lengths[where]
        feeds = [answer.feed(n, mask_id) if answer else [] for answer, n in zip(batch, lengths)]
        width, model = max(map(len, feeds)), self.model
        if self.options.compile and where == slice(None):  # one graph for all steps of a bucket
            width, model = 1 if width == 1 else self.widest, self.hidden_states
        padded = [feed + (width - len(feed)) * [(mask_id, 0, 1)] for feed in feeds]
        tokens, pos, start = torch.tensor(padded, device=device).unbind(-1)
        self.cache.reserve(width, where)
        real = [len(answer.ids) - n if answer else 0 for answer, n in zip(batch, lengths)]
        last = torch.tensor(real, device=device)[:, None].sub(1).clamp(min=0)
        with fast_for_one(self.model, tokens):
            hidden = model(tokens, pos, self.cache.mask(pos, start), self.cache)
            decided = (self.check if self.options.verify else self.accept)(hidden, last, batch)

        # What is not kept is scratch: masks, guesses that failed, the tokens of an unfilled block.
        rows = list(zip(batch, real, decided))
        self.cache.commit([n - a.unfilled + held if a else 0 for a, n, (_, _, held) in rows])
        return [
            (answer, answer.take(tokens, guesses, width))
            for answer, _, (tokens, guesses, _) in rows
            if answer
        ]

    def accept(self, hidden: Tensor, last: Tensor, batch: list[Answer | None]) -> list[tuple]:
        """What passes tau, from the last real token, at `last` (R, 1), through the masks behind it.

        Per row: tokens, guesses that the next forward is to check, and how many held in this one.
        """
        C = max(answer.candidates for answer in batch if answer)
        at = last + torch.arange(C, device=last.device)
        guesses, counts = guess(logits_at(self.model, hidden, at), batch, self.options)
        rows = torch.cat([counts[:, None], guesses], dim=1).tolist()  # all rows in one copy
        return [(tokens[:count], [], 0) for count, *tokens in rows]

    def check(self, hidden: Tensor, last: Tensor, batch: list[Answer | None]) -> list[tuple]:
        """What AR says as long as the guesses hold, and one token more; per row as in `accept`.

        The clean stream decides, so this is the text of tau = 1. The new guesses come from the one
        group of masks that stands behind the guesses that held.
        """
        given = [answer.guesses if answer else [] for answer in batch]
        window = [answer.candidates - 1 if answer else 0 for answer in batch]
        K, B, device = max(map(len, given)), max(window), last.device
        ahead = torch.arange(max(K + 1, B), device=device)
        said = choose(logits_at(self.model, hidden, last + ahead[: K + 1]), batch, self.options)
        padded = torch.tensor([g + [-1] * (K - len(g)) for g in given], device=device)
        held = (said[:, :K] == padded).long().cumprod(-1).sum(-1, keepdim=True)  # (R, 1)

        sizes, windows = torch.tensor([list(map(len, given)), window], device=device)[..., None]
        group = last + 1 + sizes + held * windows + ahead[:B]  # (R, B)
        at = torch.cat([last + held, group], dim=1)
        guesses, counts = guess(logits_at(self.model, hidden, at), batch, self.options)
        rows = torch.cat([held, counts[:, None], said, guesses], dim=1).tolist()
        return [(row[: n + 1], row[K + 2 : K + 1 + count], n) for n, count, *row in rows]


def generate(model: Qwen2, prompts: list[list[int]], rows=8, tau=0.95, **options) -> list[Answer]:
    """Decode prompts (token ids), `rows` at a time; tau for all, or a list with one for each.

    The other options are the fields of `Options`.
    """
    taus = tau if isinstance(tau, Sequence) else [tau] * len(prompts)
    if len(taus) != len(prompts):
        raise UserError(f"{len(taus)} values of tau for {len(prompts)} prompts")
    options, pairs = Options(**options), zip(prompts, taus)
    answers = [Answer(prompt, model, options, i, tau) for i, (prompt, tau) in enumerate(pairs)]
    for _ in Decoder(model, answers, options, min(rows, len(answers) or rows)):
        pass
    return answers


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], **options) -> Answer:
    """The reference: one row, no cache, plain causal attention over the whole text each time."""
    options = Options(**options)
    if options.verify:
        raise UserError("naive does not verify; compare verify with tau = 1")
    answer = Answer(prompt, model, options)
    while not answer.done:
        masks = [model.config.mask_token_id] * (answer.candidates - 1)
        feed = torch.tensor([answer.ids + masks], device=model.device)
        hidden = model(feed, torch.arange(feed.size(1), device=model.device)[None], None)
        at = torch.arange(len(answer.ids) - 1, feed.size(1), device=model.device)[None]
        guesses, counts = guess(logits_at(model, hidden, at), [answer], options)
        answer.take(guesses[0, : counts.item()].tolist(), [], feed.size(1))
    return answer


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


def shade(text: str, count: int) -> str:
    """Black on blue, the deeper the more tokens came together, whatever the terminal's colours."""
    colour = f"\033[38;5;16;48;5;{(255, 195, 153, 117, 111, 75)[min(count, 6) - 1]}m"
    words = text.lstrip()  # a gap before each forward's shows where it begins
    gap = text[: len(text) - len(words)]
    return gap + colour + words.replace("\n", f"\033[0m\n{colour}") + "\033[0m"


def note(line: str) -> None:
    print(line, file=sys.stderr)


def speed(tokens: int, forwards: int, seconds: float) -> str:
    return f"{tokens / max(1, forwards):.2f} tokens per forward, {tokens / seconds:.0f} tok/s"


def say(decoder: Decoder, chat: Chat, answer: Answer, show: bool) -> None:
    """Print an answer as it comes, and its statistics, also after Ctrl-C."""
    text, began = TextStream(chat), time.perf_counter()
    decoder.waiting.append(answer)
    try:
        for _, tokens in decoder:
            piece = text.add(tokens)
            print(shade(piece, len(tokens)) if show else piece, end="", flush=True)
    finally:
        answer.done = True
        decoder.waiting.clear()
        counts = len(answer.tokens), answer.forwards
        figures = speed(*counts, time.perf_counter() - began)
        print(f"\n{counts[0]} tokens in {counts[1]} forwards: {figures}")
        if show:
            legend = [shade(f"{n} ", n) for n in range(1, min(answer.block + 1, 6) + 1)]
            print("tokens that came together:", *legend, "or more" * (answer.block > 5))


def warm_up(decoder: Decoder, length: int) -> None:
    """A prompt of that many tokens and what follows, or start-up would be in the figures."""
    answer = Answer([0] * length, decoder.model, decoder.options)
    decoder.waiting.append(answer)
    decoder.step()
    decoder.step()
    answer.done = True


def converse(model: Qwen2, chat: Chat, options: Options, system: list[dict], show: bool) -> None:
    """A conversation; the cache keeps it, so that every turn feeds only what is new."""
    with suppress(ImportError):  # on Windows
        import readline  # noqa: F401  arrow keys and history for input()
    decoder = Decoder(model, [], options, 1, model.config.max_position_embeddings)
    messages, turn = list(system), 0
    note("/tau 0.7 sets tau, /reset forgets, Ctrl-C ends an answer, Ctrl-D the conversation")
    while True:
        try:
            line = input(f"tau {options.tau:g}> ").strip()
            if line.startswith("/tau "):
                plain_ar(float(line[5:]), options.metric)
                options.tau = float(line[5:])
            elif line == "/reset":
                messages = list(system)
            elif line.startswith("/"):
                raise UserError(f"{line}: there are /tau 0.7 and /reset")
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                answer = Answer(chat.encode(chat.prompt(asked)), model, options, turn)
                with suppress(KeyboardInterrupt):
                    say(decoder, chat, answer, show)
                said = {"role": "assistant", "content": chat.decode(answer.tokens)}
                messages, turn = [*asked, said], turn + 1
        except EOFError:
            return print()
        except KeyboardInterrupt:  # of a half-typed line
            print()
        except ValueError as error:  # a UserError is one, too
            note(f"error: {error}")


def read_prompts(path: Path, system: list[dict], model: Qwen2, chat: Chat, options: Options):
    """(id, answer-to-be) of a prompt per line, or JSON lines with `prompt` or `messages`."""
    pairs, number = [], 0
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line := line.strip():
                row = json.loads(line) if line.startswith("{") else {"prompt": line}
                user = {"role": "user", "content": row.get("prompt")}
                messages = row.get("messages") or [*system, user]
                if not all(isinstance(m, dict) and type(m.get("content")) is str for m in messages):
                    raise ValueError("neither a prompt nor messages of text")
                prompt = chat.encode(chat.prompt(messages))
                answer = Answer(prompt, model, options, len(pairs), row.get("tau"))
                pairs.append((row.get("id", number), answer))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not a usable prompt ({error})") from None
    if not pairs:
        raise UserError(f"{path}: empty; expected a prompt per line, or JSONL")
    return pairs


def serve(decoder: Decoder, chat: Chat, pairs: list[tuple], out) -> None:
    """Answer all; a line of JSON each, in input order, as soon as those before it are done."""
    tokens, forwards, began, left = 0, 0, time.perf_counter(), deque(pairs)
    with tqdm(total=len(pairs), unit="prompt", disable=None) as bar:
        for answer, news in decoder:
            tokens, forwards = tokens + len(news), forwards + 1
            bar.update(answer.done)
            bar.set_postfix_str(speed(tokens, forwards, time.perf_counter() - began), refresh=False)
            while left and left[0][1].done:
                name, first = left.popleft()
                row = {"id": name, "text": chat.decode(first.tokens), "tokens": len(first.tokens)}
                print(json.dumps(row | {"forwards": first.forwards}), file=out, flush=True)
    note(f"{tokens} tokens: {speed(tokens, forwards, time.perf_counter() - began)}")


def parse_arguments() -> argparse.Namespace:
    # fmt: off
    parser = argparse.ArgumentParser(
        description="Answer prompts, several tokens per forward (MARS).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--prompt", help="what the user says")
    add("--prompts", type=Path, help="a file: one per line, or JSONL (prompt or messages; id, tau)")
    add("--chat", action="store_true", help="a conversation, with a knob: /tau 0.7")
    add = parser.add_argument
    add("--system", help="a system message before it; None: as the chat template has it")
    add("--model", help="directory or hub id; None: the bundled toy/mars")
    add("--tau", type=float, default=0.95, help="the confidence to accept a token; 1 is plain AR")
    add("--tau-busy", type=float, help="with --prompts: tau while some still wait; None: --tau")
    add("--rows", type=int, default=8, help="with --prompts: how many to answer at a time")
    add("--out", type=Path, help="with --prompts: file for the results; None: standard output")
    add("--show", nargs="?", const="auto", choices=("auto", "always"),
        help="shade tokens by how many came together; auto: on a terminal")
    add("--metric", choices=METRICS, default="probability", help="entropy: nats, plain AR is 0")
    add("--block", type=int, help="masks per forward; None: what the checkpoint learnt, else 4")
    add("--block-cache", type=int, help="the paper's block cache of so many tokens; None: ours")
    add("--verify", action="store_true", help="lossless: tau says what to guess, the model checks")
    add("--compile", action="store_true", help="torch.compile: slow to begin, fast on a GPU")
    add("--max-new", type=int, default=256, help="most tokens to generate")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()
    if not args.prompts and (args.out or args.tau_busy is not None):
        parser.error("--out and --tau-busy go with --prompts")
    if args.out and args.out.resolve() == args.prompts.resolve():
        parser.error("--out would overwrite --prompts")
    return args


def main() -> None:
    args = parse_arguments()
    calm, busy = args.tau, args.tau if args.tau_busy is None else args.tau_busy
    plain = plain_ar(calm, args.metric) & plain_ar(busy, args.metric)  # both must be legal
    if args.prompt is not None and not args.prompt.strip():
        raise UserError("--prompt is empty")
    options = Options(**{k: v for k, v in vars(args).items() if k in Options.__dataclass_fields__})
    device, dtype = place(args.device, args.dtype)
    if args.model is None:
        note("toy/mars, the bundled model: only for problems like toy/test.jsonl's (see --model)")
    model, chat = load(str(TOY) if args.model is None else args.model, device, dtype)
    if not (plain or args.block or model.config.block_size):
        note("config.json names no block_size: if the model never learnt masks, use --tau 1")
    system = [{"role": "system", "content": args.system}] if args.system else []
    show = args.show == "always" or (args.show == "auto" and sys.stdout.isatty())
    if args.chat:
        return converse(model, chat, options, system, show)
    if args.prompts:
        options.tau = lambda waiting: busy if waiting else calm
        pairs = read_prompts(args.prompts, system, model, chat, options)
        answers = [answer for _, answer in pairs]
        decoder = Decoder(model, answers, options, min(args.rows, len(answers)))
        with open(args.out, "w", encoding="utf-8") if args.out else nullcontext(sys.stdout) as out:
            serve(decoder, chat, pairs, out)
    else:
        prompt = chat.prompt([*system, {"role": "user", "content": args.prompt}])
        answers = [Answer(chat.encode(prompt), model, options)]
        longest = len(answers[0].ids) + options.max_new
        decoder = Decoder(model, [], options, 1, longest)
        warm_up(decoder, len(answers[0].ids) if options.compile else 1)
        say(decoder, chat, answers[0], show)
    tokens, forwards = sum(len(a.tokens) for a in answers), sum(a.forwards for a in answers)
    if not plain and forwards >= 8 and tokens < 1.05 * forwards:
        note("this model accepts 1.0 tokens per forward; train it more or use --tau 1")


if __name__ == "__main__":
    run(main)
