"""Decode several tokens per forward: MARS (arXiv 2604.07023, sections 3 and 4.5).

    python decode.py --prompt "..." --tau 0.8

B masks (a block) follow the text. One causal forward gives B + 1 candidates: the last real token
predicts the first, and each mask predicts one further. They are accepted from the left while their
confidence passes tau, the first one always; then the masks move on. tau = 1 is plain autoregression
(AR).

          feed   [ accepted last time | M  M  M  M ]            one row, B = 4
    candidates                     c1   c2 c3 c4 c5             c1 c2 c3 are accepted: fed next

`naive` is all of that. The rest of the file does the same for many sequences at once, with a cache;
the tests compare the two. What is unusual here:
  * B masks are B + 1 candidates; the paper's decoder ignores what the last mask predicts;
  * every row of a batch has its own length in the cache (future work in the paper): no row waits
    until another has caught up, and a prompt gives the same tokens in a batch as alone, up to
    rounding (drawn ones with the same `index`). With `block_cache`, the paper's way, rows wait:
    see kv_cache.py;
  * a row that is done takes the next prompt at once; tau may change between any two forwards;
  * without a tau, guesses are checked before they count, so that the text is AR's: lossless.py.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kv_cache import make_cache
from lossless import Lossless, guarded
from model import Qwen2, load
from plumbing.arguments import Parser, check_number, check_request, check_tau, find_device
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.runner import Runner
from plumbing.terminal import note, print_answer
from scheduler import Position, Scheduler, Sequence, num_in_common


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], tau: float, block: int, max_new: int) -> list[int]:
    """The method at its simplest: greedy, one text, no cache. Returns the new tokens."""
    text = list(prompt)
    masks = [model.config.mask_token_id] * block
    is_plain_ar = tau == 1  # no mask's token passes, not even with a confidence rounded to 1
    while True:
        tokens = torch.tensor([text + masks], device=model.device)  # (1, T)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, mask=None)  # plain causal attention
        # The last token of the text predicts the next one, and each mask the one after its place.
        columns = torch.arange(len(text) - 1, len(text) + block, device=model.device)[None]
        logits = model.logits_at(hidden, columns)  # (1, B + 1, V)
        confidence, candidates = logits[0].softmax(-1).max(-1)
        for i, token in enumerate(candidates.tolist()):
            passes = confidence[i] >= tau and not is_plain_ar
            if i > 0 and not passes:
                break
            text.append(token)
            is_full = len(text) == len(prompt) + max_new
            if is_full or token in model.config.eos_token_id:
                return text[len(prompt) :]


# --------------------------------------------------------------------------------------- acceptance


class Method(Protocol):
    """How to decode. Threshold is the paper's way; Guarded, and Lossless in lossless.py, are ours.

    Each forward calls, in this order, `additions`, `confidence` and `accept`. What a method keeps
    for the next forward of a sequence is in `sequence.state`.
    """

    widest: int  # the most positions of a row in a forward, without prefills and cache blocks

    def additions(self, sequence: Sequence) -> list[Position]:
        """What a forward is fed after the text: guesses and masks."""

    def confidence(self, logits: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
        """How sure the predicted tokens (R, C) are, from logits (R, C, V).

        scores (R, C, V): the tokens are their argmax. The scores are the logits; at a temperature
        T, logits + T * noise.
        """

    def accept(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> list[int]:
        """Which of the predicted tokens are accepted; each has a confidence.

        The last token of the text predicts tokens[0]; addition i - 1 predicts tokens[i].
        """


# The measures of confidence, and the tau at which each is plain AR. At that tau no masks are fed:
# the test alone would not do, for a confidence that is rounded to 1 (an entropy, to 0) passes it.
AR_TAU = {"probability": 1, "margin": 1, "entropy": 0}


class Threshold:
    """The paper's method: feed B masks after the text, accept while the confidence passes tau."""

    def __init__(self, block: int, mask_id: int, metric: str):
        """block: the number of masks, B."""
        self.block = block
        self.mask_id = mask_id
        self.metric = metric
        self.widest = (block + 1) + block  # the tokens accepted last time, and the masks

    def additions(self, sequence: Sequence) -> list[Position]:
        """The masks that follow a text. They see all of it: their prefix is its length."""
        if sequence.tau == AR_TAU[self.metric]:
            return []
        end = len(sequence.token_ids)
        return [Position(self.mask_id, pos, prefix=end) for pos in range(end, end + self.block)]

    def confidence(self, logits: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
        """The metric, computed from the logits even where noise chose the token.

        Entropy is lower where the model is surer; margin is the best token's lead over the second.
        They depend on the distribution only, not on the token.
        """
        probs = logits.softmax(-1)
        if self.metric == "entropy":
            return torch.special.entr(probs).sum(-1)
        if self.metric == "margin":
            best, second = probs.topk(2).values.unbind(-1)
            return best - second
        return probs.gather(-1, tokens[..., None])[..., 0]

    def accept(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> list[int]:
        """The first token, and those after it up to one that does not pass.

        The first is not tested. It is AR's own, for the last real token sees no mask.
        """
        accepted = tokens[:1]  # in plain AR there are no others
        for token, confidence in zip(tokens[1:], confidences[1:]):
            if not self.passes(confidence, sequence.tau):
                break
            accepted.append(token)
        return accepted

    def passes(self, confidence: float, tau: float) -> bool:
        if self.metric == "entropy":
            return confidence <= tau
        return confidence >= tau


# Where the text is silent a mask may have a twentieth of the doubt that tau allows. (Of 41 problems
# of HumanEval, on which it was chosen, a tenth had 19 right at tau .95, a twentieth 21 as tau 1.)
DOUBT_DIVISOR = 20


class Guarded(Threshold):
    """Ours, with --guard: what passes tau is cut where the text does not support it."""

    def accept(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> list[int]:
        """What passes tau, up to the first token that the text does not support: see `guarded`.

        is_sure: which tokens pass a stricter tau, nearer to AR's, as they must where the text is
        silent.
        """
        accepted = super().accept(sequence, tokens, confidences)
        ar_tau = AR_TAU[self.metric]
        strict_tau = ar_tau + (sequence.tau - ar_tau) / DOUBT_DIVISOR
        is_sure = [self.passes(confidence, strict_tau) for confidence in confidences]
        return guarded(sequence, accepted, is_sure)


# ------------------------------------------------------------------------------------------ options


@dataclass
class Options:
    """How to decode: without a tau lossless, with a tau as in the paper. UserError if impossible.

    Each field is also an option of the command line, where `add_options` says what it means.
    """

    tau: float | None = None
    metric: str = "probability"
    block: int | None = None
    block_cache: int | None = None
    guard: bool = False
    max_new: int = 256
    temperature: float = 0.0
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        if self.metric not in AR_TAU:
            raise UserError(f"metric: must be one of {', '.join(AR_TAU)}, not {self.metric!r}")
        if self.block is not None:
            check_number("block", self.block, int, 1, 999)
        if self.block_cache is not None:
            check_number("block_cache", self.block_cache, int, 1, 10**9)
        check_number("max_new", self.max_new, int, 1, 10**9)
        check_number("temperature", self.temperature, float, 0, 1e30)
        check_number("seed", self.seed, int, 0, 2**62)
        if self.tau is not None:
            check_tau(self.tau, self.metric)
        elif self.block_cache is not None or self.metric != "probability" or self.guard:
            raise UserError("--block-cache, --metric and --guard need a --tau")

    @property
    def is_lossless(self) -> bool:
        return self.tau is None

    @property
    def is_plain_ar(self) -> bool:
        return self.tau == AR_TAU[self.metric]


# ----------------------------------------------------------------------------------------- the loop


class Feed(NamedTuple):
    """What a row is fed: the tokens of its text that are not cached yet, then masks or guesses.

    Of the text a b c the cache has a b; B = 2 masks follow:

        token    c | M M
        pos      2 | 3 4
        prefix   3 | 3 3
    """

    row: int
    sequence: Sequence
    positions: list[Position]
    columns: range  # which positions predict: the last real token and all after it

    @property
    def predicted(self) -> list[tuple[int, int]]:
        """The index of the sequence and the pos of the token that each column predicts."""
        return [(self.sequence.index, self.positions[column].pos + 1) for column in self.columns]


class Decoder:
    """Decodes many sequences, each in a row of one cache. `add` prompts at any time.

    Every `step` is one forward: feed, predict, accept. A row feeds the tokens of its text that are
    not in the cache yet, then what its method adds: masks or guesses. From the last real token on,
    each position predicts a token, and the method says which of these are accepted. Accepted tokens
    enter the cache when the next forward feeds them; guesses that hold were fed already. (When the
    weights change, make a new decoder: the cache holds what the old ones computed.)
    """

    def __init__(
        self, model: Qwen2, options: Options, rows: int, longest: int, method=None, cache=None
    ):
        """longest: the most tokens that a prompt and its answer may have together.

        method, cache: instead of those that the options choose (a Method, a KVCache).
        """
        config = model.config
        if config.mask_token_id is None:
            raise UserError("the model has no mask token; load it with model.load")
        self.options = options
        self.config = config
        self.longest = min(longest, config.max_position_embeddings)
        self.block = options.block or config.block or 4  # B
        if method is not None:
            self.method = method
        elif options.is_lossless:
            on_cpu = model.device.type == "cpu"
            self.method = Lossless(self.block, config.mask_token_id, on_cpu, rows)
        else:
            kind = Guarded if options.guard else Threshold
            self.method = kind(self.block, config.mask_token_id, options.metric)
        widest = self.method.widest
        if options.block_cache:  # the tokens of an open block are fed again
            widest += min(options.block_cache, self.longest)
        self.cache = cache or make_cache(model, rows, self.longest + widest, options)
        self.scheduler = Scheduler(self.cache, rows, self.block)
        self.runner = Runner(model, self.method, self.cache, widest, options)
        self.num_added = 0

    def add(
        self,
        prompt: list[int],
        tau: float | None = None,
        max_new: int | None = None,
        index: int | None = None,
    ) -> Sequence:
        """Let a prompt (token ids) wait for a row. Returns its Sequence, which `step` fills.

        tau, max_new: instead of the options'. index: see Sequence; by default, how many prompts
        were added before. UserError if the prompt cannot be decoded here.
        """
        if tau is None:
            tau = self.options.tau
        elif self.options.is_lossless:
            raise UserError("a tau of its own needs --tau: without that, AR checks every guess")
        else:
            check_tau(tau, self.options.metric)
        max_new = self.options.max_new if max_new is None else max_new
        check_request(prompt, max_new, self.config.vocab_size)
        if len(prompt) + max_new > self.longest:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {max_new} new ones exceed the "
                f"{self.longest} positions of this decoder: shorten it, or lower --max-new"
            )
        index = self.num_added if index is None else index
        check_number("index", index, int, 0, 2**62)
        sequence = Sequence(prompt, self.config, max_new, tau, index)
        self.num_added += 1
        self.scheduler.queue.append(sequence)
        return sequence

    def __iter__(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Yield every sequence with its new tokens, as they come, until all are done."""
        while news := self.step():
            yield from news

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, list[int]]]:
        """Run one forward. Returns its sequences, each with its new tokens; [] if all are done."""
        rows, is_prefill = self.scheduler.schedule()
        if not rows:
            return []
        feeds = [self.feed(row, sequence) for row, sequence in rows.items()]
        news = []
        counts = {}  # how many of the positions of each row stay in the cache
        for feed, (tokens, confidences) in zip(feeds, self.runner.run(feeds, is_prefill)):
            accepted = self.method.accept(feed.sequence, tokens, confidences)
            news.append((feed.sequence, feed.sequence.take(accepted, self.cache.width)))
            # What was fed as text and is text now stays: real tokens, and guesses that held. They
            # come before all masks, so they are the first positions. (The last accepted token was
            # not fed: the next forward feeds it.)
            fed = [position.token for position in feed.positions if not position.is_mask]
            text = feed.sequence.token_ids[self.cache.lengths[feed.row] :]
            counts[feed.row] = num_in_common(fed, text)
        self.cache.commit(counts)
        return news

    def feed(self, row: int, sequence: Sequence) -> Feed:
        """What a row is fed in the next forward."""
        text = sequence.token_ids
        uncached = range(self.cache.lengths[row], len(text))
        real = [Position(text[pos], pos, prefix=pos + 1) for pos in uncached]
        room = self.cache.room(row, len(text))
        positions = real + self.method.additions(sequence)[:room]
        columns = range(len(real) - 1, len(positions))
        return Feed(row, sequence, positions, columns)


def generate(model: Qwen2, prompts: list[list[int]], rows=8, **options) -> list[Sequence]:
    """Decode prompts (token ids), `rows` at a time; the options are the fields of `Options`."""
    options = Options(**options)
    longest = max(map(len, prompts), default=0) + options.max_new
    decoder = Decoder(model, options, min(rows, max(1, len(prompts))), longest)
    sequences = [decoder.add(prompt) for prompt in prompts]
    for _ in decoder:
        pass
    return sequences


# ------------------------------------------------------------------------------------ command line


def add_options(parser: Parser, num_taus: str | None = None) -> None:
    """Add the fields of `Options` to a command line; num_taus: the nargs of --tau."""
    add = parser.add_argument
    default = Options()
    # fmt: off
    add("--tau", type=float, nargs=num_taus, help="accept a token at least this confident: 1 is "
        "plain AR, below it the text may differ from AR's; with --metric entropy at most this many "
        "nats, 0 is AR (default: no tau, lossless: the text of --tau 1, up to rounding, in fewer "
        "forwards)")
    add("--metric", choices=tuple(AR_TAU), default=default.metric, help="measure of confidence")
    add("--block", type=int, help="B, number of masks (default: as in training, or 4)")
    add("--block-cache", type=int, metavar="N", help="the paper's cache, in blocks of N tokens")
    add("--guard", action="store_true", help="with a tau: the text checks what masks predict, "
        "and where it is silent they must be surer (docs/lossless.md)")
    add("--max-new", type=int, default=default.max_new, help="maximum number of new tokens")
    add("--temperature", type=float, default=default.temperature, help="0 is greedy")
    add("--seed", type=int, default=default.seed, help="sampling seed")
    add("--compile", action="store_true", help="torch.compile: a slow start, then fast on a GPU")
    # fmt: on


def read_options(args: argparse.Namespace) -> Options:
    """The Options of a command line with `add_options`."""
    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def load_for_decoding(args: argparse.Namespace, options: Options) -> tuple[Qwen2, Chat]:
    """The model and chat of --model, or the bundled ones; with a note of what is unusual."""
    device, dtype = find_device(args.device, args.dtype)
    if args.model is None:
        note("the bundled toy/mars solves only problems like those in toy/test.jsonl; see --model")
    model, chat = load(args.model, device, dtype)
    # Who gives --block knows that masks were trained: the paper's checkpoints do not say their B.
    is_untrained = options.block is None and model.config.block is None
    if is_untrained and not (options.is_lossless or options.is_plain_ar):
        note(f"{args.model}: was not trained with masks: what this tau accepts is garbage")
    if not chat.has_template:
        note(f"{args.model}: has no chat template, so it may not know where an answer ends")
    return model, chat


def main() -> None:
    parser = Parser("Answer a prompt, several tokens per forward (MARS).")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model()
    add_options(parser)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    options = read_options(args)
    model, chat = load_for_decoding(args, options)
    prompt = chat.encode_prompt([{"role": "user", "content": args.prompt}])
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    print_answer(decoder, chat)


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
