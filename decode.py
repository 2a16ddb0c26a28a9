"""Decode several tokens per forward: MARS (arXiv 2604.07023, sections 3 and 4.5).

    python decode.py --prompt "..." --tau 0.8

B masks (a block) follow the text. One causal forward gives B + 1 candidates: the last real token
predicts the first, and each mask predicts one further. They are accepted from the left while their
confidence passes tau, the first one always; then the masks move on. tau = 1 is plain autoregression
(AR).

          feed   [ accepted last time | M  M  M  M ]            one row, B = 4
    candidates                     c1   c2 c3 c4 c5             c1 c2 c3 pass: they are fed next

`naive` is all of that. The rest of the file does the same for many sequences at once, with a cache;
the tests compare the two. What is unusual here:
  * B masks are B + 1 candidates; the paper's decoder ignores what the last mask predicts;
  * every row of a batch has its own length in the cache (future work in the paper): no row waits
    until another has filled a cache block, and a prompt gives the same tokens in a batch as alone,
    up to rounding. `block_cache` is the paper's way: see kv_cache.py;
  * a row that is done takes the next prompt at once; tau may change between any two forwards;
  * `verify` checks guesses before they count, so that the text is AR's: see lossless.py.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import nan
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import BlockCache, KVCache
from lossless import Lossless
from model import Config, Qwen2, load
from plumbing.arguments import (
    Parser,
    check_options,
    check_request,
    find_device,
    option,
    read_options,
)
from plumbing.attention import FastModel, span_unit
from plumbing.errors import UserError, run_main
from plumbing.packing import round_up
from plumbing.sampling import with_dice
from plumbing.scheduler import Scheduler
from plumbing.terminal import note, print_answer

TOY = Path(__file__).parent / "toy" / "mars"


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], tau: float, block: int, max_new: int) -> list[int]:
    """The method at its simplest: greedy, one text, no cache. Returns the new tokens."""
    text = list(prompt)
    masks = [model.config.mask_token_id] * block
    while True:
        tokens = torch.tensor([text + masks], device=model.device)  # (1, T)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, mask=None)  # plain causal attention
        # The last token of the text predicts the next one, and each mask the one after its place.
        columns = torch.arange(len(text) - 1, len(text) + block, device=model.device)[None]
        logits = model.logits_at(hidden, columns)  # (1, B + 1, V)
        confidence, candidates = logits[0].softmax(-1).max(-1)
        for i, token in enumerate(candidates.tolist()):
            passes = confidence[i] >= tau and tau < 1  # a confidence may be rounded to 1
            if i > 0 and not passes:
                break
            text.append(token)
            is_full = len(text) == len(prompt) + max_new
            if is_full or token in model.config.eos_token_id:
                return text[len(prompt) :]


# ---------------------------------------------------------------------------- options and sequences

DEFAULT_TAU = {"probability": 0.95, "margin": 0.95, "entropy": 0.2}  # of each metric
Tau = float | Callable[[int], float]  # a number, or a function of the number of waiting prompts
Fed = tuple[int, int, int]  # what a forward is fed at a position: see `Decoder.advance`


@dataclass
class Options:
    """How to decode. Each field is also an option of the command line."""

    tau: Tau | None = option(
        None,
        "accept a token at least this confident, 1 is plain AR (default: 0.95); with --metric "
        "entropy: at most this many nats, 0 is plain AR (default: 0.2)",
        kind=float,
    )
    metric: str = option("probability", "measure of confidence", choices=tuple(DEFAULT_TAU))
    block: int | None = option(None, "B, the number of masks (default: as in training)", int, 1)
    block_cache: int | None = option(None, "the paper's cache, in blocks of N tokens", int, 1)
    verify: bool = option(False, "lossless: AR checks every guess; takes no tau")
    groups: int | None = option(
        None,
        "with --verify: most groups of masks in a forward, see docs/lossless.md (default: all "
        "likely ones; one in a batch on a CPU)",
        int,
        least=1,
    )
    max_new: int = option(256, "maximum number of new tokens", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0, below=1e30)
    seed: int = option(0, "sampling seed", least=0, below=2**62)
    compile: bool = option(False, "torch.compile: a slow start, then fast on a GPU")

    def __post_init__(self) -> None:
        check_options(self)
        if self.verify and self.block_cache:
            raise UserError("--verify and --block-cache cannot be combined: leave out one")
        if self.verify and self.tau is not None:
            raise UserError("--verify takes no --tau, for it checks every guess: leave out one")
        if not self.verify and self.tau is None:
            self.tau = DEFAULT_TAU[self.metric]
        if self.tau is not None and not callable(self.tau):
            check_tau(self.tau, self.metric)


class Sequence:
    """A prompt and the tokens accepted after it. `Decoder.add` makes them."""

    def __init__(self, prompt: list[int], config: Config, max_new: int, tau: Tau | None, index=0):
        """index: with the seed it fixes the random draws. UserError for an impossible prompt."""
        check_request(prompt, max_new, config.vocab_size)
        max_new = int(max_new)  # a sum with a number of numpy's small kinds may overflow
        if len(prompt) + max_new > config.max_position_embeddings:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {max_new} new ones exceed the model's "
                f"{config.max_position_embeddings} positions: shorten it, or lower --max-new"
            )
        # The prompt, then every accepted token. (int: a prompt may hold numpy's numbers.)
        self.text = [int(token) for token in prompt]
        self.prompt_length = len(prompt)
        self.max_new = max_new
        self.tau = tau  # read before every forward
        self.index = index
        self.stop = set(config.eos_token_id)
        self.state = None  # what the decoding method keeps from one call to the next
        self.done = False  # set it to cancel the sequence
        self.error: Exception | None = None  # why it ended early
        self.confidences: list[float] = []  # of each accepted token: how sure the model was
        # An entry for each forward, prefill included:
        self.accepted: list[int] = []  # number of accepted tokens
        self.widths: list[int] = []  # number of positions computed, masks and padding included

    @property
    def tokens(self) -> list[int]:
        """The accepted tokens, with the end-of-turn token if it came."""
        return self.text[self.prompt_length :]

    @property
    def forwards(self) -> int:
        return len(self.accepted)

    def is_complete(self) -> bool:
        num_new = len(self.text) - self.prompt_length
        return num_new >= self.max_new or (num_new > 0 and self.text[-1] in self.stop)

    def take(self, tokens: list[int], width: int, confidences=None) -> list[int]:
        """Accept what one forward gave, up to an end-of-turn token and max_new.

        confidences: of the tokens; NaN if they are not given.
        """
        # An interrupt between a confidence and its token may have left one too many.
        del self.confidences[len(self.text) - self.prompt_length :]
        kept = []
        for token, confidence in zip(tokens, confidences or itertools.repeat(nan)):
            if self.done or self.is_complete():
                break
            self.confidences.append(confidence)
            self.text.append(token)
            kept.append(token)
        self.done = self.done or self.is_complete()
        self.accepted.append(len(kept))
        self.widths.append(width)
        return kept


# ------------------------------------------------------------------------------------- acceptance


def check_tau(tau: float, metric: str) -> None:
    """Raise UserError for an impossible tau."""
    if not isinstance(tau, Real):
        raise UserError(f"tau {tau!r}: must be a number, or a function")
    if metric == "entropy" and not 0 <= tau < 1e30:
        raise UserError(f"tau {tau}: must be at least 0 (nats) for the metric entropy")
    if metric != "entropy" and not 0 <= tau <= 1:
        raise UserError(f"tau {tau}: must be between 0 and 1 for the metric {metric}")


def is_plain_ar(tau: float, metric: str) -> bool:
    """Is this tau plain AR? Then no masks are fed, so no probability that rounds to 1 can pass."""
    return tau == 0 if metric == "entropy" else tau == 1


def confidences(probs: Tensor, candidates: Tensor, metric: str) -> Tensor:
    """Confidence (R, C) from probabilities (R, C, V) and candidate tokens (R, C).

    Entropy is lower where the model is surer; margin is the best token's lead over the second. They
    depend on the distribution only, not on the candidate.
    """
    if metric == "entropy":
        return torch.special.entr(probs).sum(-1)
    if metric == "margin":
        best, second = probs.topk(2).values.unbind(-1)
        return best - second
    return probs.gather(-1, candidates[..., None])[..., 0]


def passing_lengths(confidence: Tensor, tau: Tensor, metric: str) -> Tensor:
    """Length (R,) of the leading run in (R, C) that passes tau (R,); the first always does."""
    if metric == "entropy":
        passes = confidence <= tau[:, None]
    else:
        passes = confidence >= tau[:, None]
    passes[:, 0] = True
    return passes.long().cumprod(-1).sum(-1)


class Threshold:
    """The paper's method: feed B masks after the text, accept while the confidence passes tau.

    A decoding method has two calls: `feed` says what a forward is fed after a text. `decide` gives
    each row its new tokens, their confidences, and how many of them were fed as guesses (none here;
    lossless.py, the other method, has guesses). In `sequence.state` Threshold keeps tau and the
    number of masks from one call to the other.
    """

    def __init__(self, block: int, options: Options, mask_id: int, longest: int):
        """block: B. longest: the most tokens of a text."""
        self.block = block
        self.options = options
        self.mask_id = mask_id
        most_real = block + 1  # KVCache: the tokens that the last forward accepted
        if options.block_cache:
            most_real = min(options.block_cache, longest)  # BlockCache: a whole cache block
        self.widest = most_real + block  # positions of a forward, prefills aside

    def feed(self, sequence: Sequence, room: float, num_waiting: int) -> list[Fed]:
        """The masks that follow a text. Raises whatever a tau function does, or UserError.

        room: how many tokens this forward may accept, as the cache says; KVCache sets no limit.
        num_waiting: prompts without a row.
        """
        tau = sequence.tau
        if callable(tau):
            tau = float(tau(num_waiting))
            check_tau(tau, self.options.metric)
        num_masks = 0
        if not is_plain_ar(tau, self.options.metric):
            # The first candidate needs no mask, so room - 1 masks are enough.
            num_masks = min(self.block, room - 1)
        sequence.state = (tau, num_masks)
        end = len(sequence.text)  # the masks' prefix: they see all of the text
        return [(self.mask_id, pos, end) for pos in range(end, end + num_masks)]

    def decide(
        self, model: FastModel, hidden: Tensor, last: list[int], sequences: list[Sequence | None]
    ) -> list[tuple[list[int], list[float], int]]:
        """For each row the candidates that pass tau, their confidences, and 0: none was a guess.

        hidden (R, T, D) of what was fed; last: the column of each row's last real token.

        At a temperature T > 0 every candidate is drawn from p^(1/T) of its own position,
        independently of the others, and its confidence is taken at T = 1, as in the paper's code.
        So with several tokens per forward the text is NOT a sample of the AR distribution.
        """
        options = self.options
        states = [sequence.state if sequence else (1.0, 0) for sequence in sequences]
        taus = [tau for tau, _ in states]
        num_candidates = [1 + num_masks for _, num_masks in states]
        # Rows with fewer candidates get columns to spare (`logits_at` clamps them to hidden). What
        # is there is cut off in the last loop, so that a row at tau 1 takes one candidate.
        most = max(num_candidates)
        columns = torch.tensor([list(range(first, first + most)) for first in last])
        logits = model.logits_at(hidden, columns.to(hidden.device))  # (R, C, V)
        ahead = [0] * len(sequences)  # places between a row's text and its first candidate
        scores = with_dice(logits, sequences, options.temperature, options.seed, ahead)
        candidates = scores.argmax(-1)  # (R, C): with dice a draw, without the best
        confidence = confidences(logits.softmax(-1), candidates, options.metric)
        tau = torch.tensor(taus, device=hidden.device, dtype=confidence.dtype)
        lengths = passing_lengths(confidence, tau, options.metric).tolist()
        decisions = []
        rows = zip(candidates.tolist(), confidence.tolist(), lengths, num_candidates)
        for tokens, confident, length, count in rows:
            num_accepted = min(length, count)
            decisions.append((tokens[:num_accepted], confident[:num_accepted], 0))
        return decisions


# --------------------------------------------------------------------------------------- the loop


class Decoder:
    """Decodes many sequences, each in a row of one cache. `add` prompts at any time.

    Every `step` is one forward: a prefill of prompts that got a row, if there are any, else one of
    all rows that go on.
    A row feeds the tokens of its text that are not in the cache yet; the method adds masks or
    guesses, and says what is accepted. Accepted tokens enter the cache when the next forward feeds
    them. (When the weights of the model change, make a new decoder: this one keeps a copy of the
    weights, and the cache holds what the old ones computed.)
    """

    def __init__(self, model: Qwen2, options: Options, rows: int, longest: int):
        """longest: the most tokens that a prompt and its answer may have together."""
        config = model.config
        if config.mask_token_id is None:
            raise UserError("the model has no mask token; load it with model.load")
        limit = config.max_position_embeddings
        self.options = options
        self.longest = min(longest, limit)
        self.block = options.block or config.block or 4  # B
        if self.block > limit:
            raise UserError(f"block {self.block} exceeds the model's {limit} positions")
        self.mask_id = config.mask_token_id
        if options.verify:
            is_batch_on_cpu = rows > 1 and model.device.type == "cpu"
            self.method = Lossless(self.block, options, self.mask_id, is_batch_on_cpu)
        else:
            self.method = Threshold(self.block, options, self.mask_id, self.longest)

        unit = span_unit(model, options.compile)
        capacity = round_up(self.longest + self.method.widest, unit)
        new_cache = KVCache
        if options.block_cache:
            new_cache = functools.partial(BlockCache, size=options.block_cache)
        self.cache = new_cache(config, rows, capacity, model.device, model.dtype, unit)
        self.scheduler = Scheduler(self.cache, rows, self.block)
        self.model = FastModel(model, self.cache, options.compile)
        self.num_added = 0

    def add(self, prompt: list[int], tau: Tau | None = None, max_new=None, index=None) -> Sequence:
        """Let a prompt (token ids) wait for a row. UserError if it cannot be decoded here.

        tau, max_new: instead of the options'. index: see Sequence; by default, how many prompts
        were added before.
        """
        if tau is None:
            tau = self.options.tau
        elif self.options.verify:
            raise UserError("verify takes no tau, for it checks every guess")
        elif not callable(tau):
            check_tau(tau, self.options.metric)
        max_new = self.options.max_new if max_new is None else max_new
        index = self.num_added if index is None else index
        sequence = Sequence(prompt, self.model.config, max_new, tau, index)
        if len(prompt) + sequence.max_new > self.longest:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {max_new} new ones exceed the "
                f"{self.longest} that this decoder was made for: shorten it, or lower max_new"
            )
        self.num_added += 1
        self.scheduler.waiting.append(sequence)
        return sequence

    def __iter__(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Yield every sequence with its new tokens, as they come, until all are done."""
        while news := self.step():
            yield from news

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, list[int]]]:
        """One forward; the sequences in it, with their new tokens. [] if all are done."""
        scheduler = self.scheduler
        scheduler.admit()
        rows = scheduler.rows_to_prefill()  # a slice: adjacent rows
        if prompts := scheduler.sequences[rows]:
            return self.advance(prompts, rows, is_prefill=True)
        text_lengths = {}  # of each row that goes on
        for row, sequence in enumerate(scheduler.sequences):
            if sequence and not sequence.done:
                text_lengths[row] = len(sequence.text)
        if not text_lengths:
            return []
        scheduler.clear_done()  # after `admit`, which may reuse what their rows hold
        sequences = list(scheduler.sequences)
        for row in self.cache.rows_that_wait(text_lengths):
            sequences[row] = None
        return self.advance(sequences, slice(None), is_prefill=False)

    def advance(
        self, sequences: list[Sequence | None], rows: slice, is_prefill: bool
    ) -> list[tuple[Sequence, list[int]]]:
        """One forward of some rows of the cache; a row is idle if its sequence is None.

        A position is fed (token, pos, prefix): prefix is how many tokens of the text it sees
        (`visible` in model.py). The text a b c, of which the cache has a b, and B = 2 masks:

            token    c | M M
            pos      2 | 3 4
            prefix   3 | 3 3
        """
        num_waiting = self.scheduler.num_waiting()
        feeds = []  # per row: its positions
        num_real = []  # per row: how many of them are tokens of its text
        for row, sequence in zip(range(len(self.cache.lengths))[rows], sequences):
            real = []
            after_text = []
            if sequence:
                for pos in range(self.cache.lengths[row], len(sequence.text)):
                    real.append((sequence.text[pos], pos, pos + 1))
                after_text = self.feed_after_text(sequence, row, num_waiting)
            feeds.append(real + after_text)
            num_real.append(len(real))

        width = max(map(len, feeds))
        if self.options.compile and not is_prefill and width > 1:
            width = max(width, self.method.widest)  # so only two widths: 1 (plain AR) and this
        padding = (self.mask_id, 0, 1)  # it sees one token: a softmax over nothing would be NaN
        padded = [feed + [padding] * (width - len(feed)) for feed in feeds]
        tokens, pos, prefix = torch.tensor(padded, device=self.cache.device).unbind(-1)  # (R, T)
        self.cache.reserve(width, rows)
        mask = self.cache.mask(pos, prefix)
        hidden = self.model(tokens, pos, mask, is_prefill)  # (R, T, D)

        # A sequence whose tau failed has no state for this forward.
        without_errors = [None if each and each.error else each for each in sequences]
        last = [max(0, real - 1) for real in num_real]  # column of the last real token
        decisions = self.method.decide(self.model, hidden, last, without_errors)
        news = []
        for sequence, (accepted, confidences, _) in zip(sequences, decisions):
            if sequence:
                kept = sequence.take(accepted, width, confidences)  # none if it is done
                news.append((sequence, kept))
        # cached tokens += real tokens that were fed + accepted tokens that were fed as guesses.
        # (This comes last: if an interrupt hits before it, the tokens are merely fed again.)
        self.cache.commit([real + guesses for real, (_, _, guesses) in zip(num_real, decisions)])
        return news

    def feed_after_text(self, sequence: Sequence, row: int, num_waiting: int) -> list[Fed]:
        """What the method feeds. If its tau fails, the sequence ends, with the error."""
        room = self.cache.room(row, len(sequence.text))
        try:
            return self.method.feed(sequence, room, num_waiting)
        except Exception as error:  # a tau function may fail in any way; the other rows go on
            sequence.error = error
            sequence.done = True
            return []


def generate(model: Qwen2, prompts: list[list[int]], rows=8, **options) -> list[Sequence]:
    """Decode prompts (token ids), `rows` at a time; the options are the fields of `Options`."""
    options = Options(**options)
    longest = max(map(len, prompts), default=0) + options.max_new
    decoder = Decoder(model, options, min(rows, max(1, len(prompts))), longest)
    sequences = [decoder.add(prompt) for prompt in prompts]
    for _ in decoder:
        pass
    for sequence in sequences:
        if sequence.error:
            raise sequence.error
    return sequences


# ------------------------------------------------------------------------------------ command line


def load_for_decoding(args) -> tuple:
    """The model and chat of --model, or the bundled ones with a note."""
    device, dtype = find_device(args.device, args.dtype)
    if args.model is None:
        note("the bundled toy/mars solves only problems like those in toy/test.jsonl; see --model")
    model, chat = load(str(TOY) if args.model is None else args.model, device, dtype)
    chat.template_options = dict(args.template_option)
    return model, chat


def main() -> None:
    parser = Parser("Answer a prompt, several tokens per forward (MARS).")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    parser.add_argument("--show", action="store_true", help="shade tokens accepted in one forward")
    parser.add_model(None, "directory or hub id (default: the bundled toy/mars)")
    parser.add_template_option()
    parser.add_options(Options)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args)
    messages = [{"role": "user", "content": args.prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    prompt = chat.encode(chat.prompt(messages))
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    print_answer(decoder, chat, args.show)


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
