"""Decode several tokens per forward: MARS (arXiv 2604.07023, sections 3 and 4.5).

    python decode.py --prompt "..." --tau 0.8

B masks follow the text. One causal forward gives B + 1 candidates: the last real token predicts the
first, and each mask predicts one further. They are accepted from the left while their confidence
passes tau, the first one always; then the window of masks moves on. tau = 1 is plain autoregression
(AR).

          feed   [ accepted last time | M  M  M  M ]            one row, B = 4
    candidates                     c1   c2 c3 c4 c5             c1 c2 c3 pass: they are fed next

What is unusual here:
  * B masks are B + 1 candidates; the paper's decoder ignores what the last mask predicts;
  * every row has its own cursor in the cache (future work in the paper): no row waits for another,
    and a prompt gives the same tokens in a batch as alone (sampled: if its `index` is the same).
    `block_cache` is the paper's policy;
  * a row that is done takes the next prompt at once; tau may change between any two forwards;
  * `verify` checks guesses before they count, so that the text is AR's: see lossless.py;
  * `naive` is the method at its simplest; the tests compare everything else with it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import lossless
from kv_cache import KVCache
from model import Qwen2, load
from plumbing import attention
from plumbing.arguments import Parser, check_options, find_device, option, read_options
from plumbing.errors import UserError, run_main
from plumbing.packing import round_up
from plumbing.scheduler import Scheduler, Text
from plumbing.terminal import note, print_answer
from plumbing.threads import free_cores

TOY = Path(__file__).parent / "toy" / "mars"
METRICS = ("probability", "margin", "entropy")
NUM_EXACT = 8  # logits that are computed again in float32, where the model is in bfloat16
Tau = float | Callable[[int], float]  # a number, or a function of the number of waiting prompts


@dataclass
class Options:
    """How to decode. Each field is also an option of the command line."""

    tau: Tau | None = option(
        None,
        "accept tokens at least this confident; 1 is plain AR (default: 0.95). "
        "With --verify: check guesses at least this confident (default: all)",
        kind=float,
    )
    metric: str = option(
        "probability",
        "measure of confidence; for entropy tau is in nats, 0 is plain AR",
        choices=METRICS,
    )
    block: int | None = option(None, "B, masks in a group (default: as in training)", int, least=1)
    block_cache: int | None = option(None, "the paper's cache, in blocks of N tokens", int, least=1)
    verify: bool = option(False, "lossless: AR checks every guess")
    groups: int | None = option(
        None, "with --verify: groups of masks (default: the likely ones)", int, least=1
    )
    max_new: int = option(256, "maximum number of new tokens", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0, below=1e30)
    seed: int = option(0, "sampling seed", least=0, below=2**62)
    compile: bool = option(False, "torch.compile: a slow start, then fast on a GPU")

    def __post_init__(self) -> None:
        check_options(self)
        if self.tau is None:
            self.tau = default_tau(self)
        if not callable(self.tau):
            check_tau(self.tau, self.metric)
        if self.verify and self.block_cache:
            raise UserError("verify cannot be combined with block_cache")


class Answer(Text):
    """One prompt and its growing answer: its tau, its guesses, and what it feeds next.

    `ids` are prompt and answer, `tokens` the answer alone (see Text).
    """

    def __init__(self, prompt: list[int], model: Qwen2, options: Options, index=0, tau=None):
        """index: with the seed it fixes the random draws. tau: overrides options.tau."""
        super().__init__(prompt, options.max_new, model.config)
        self.index = index
        self.options = options
        self.given_tau = options.tau if tau is None else tau
        self.block = block_of(model, options)
        self.guesses: list[int] = []  # what the next forward checks: lossless.py
        self.groups = [0]  # of masks in the next forward; group j sees the first j guesses
        self.checked: list[int] = []  # how many guesses each forward checked
        self.update_tau(waiting=0)

    @property
    def num_in_open_block(self) -> int:
        """Tokens in the cache block that is not full yet; they are fed again at every forward."""
        if self.options.block_cache is None:
            return 0
        return len(self.tokens) % self.options.block_cache

    @property
    def num_masks(self) -> int:
        """Masks in a group of the next forward, each giving one more candidate.

        Without `verify` there is one group; with it, one for each likely number of right guesses.
        """
        if is_plain_ar(self.tau, self.options.metric):
            return 0
        if self.options.block_cache is None:
            return self.block
        room = self.options.block_cache - self.num_in_open_block
        return min(self.block, room - 1)  # no candidate beyond the end of the cache block

    def update_tau(self, waiting: int) -> None:
        """Set the tau of the next forward; a function is asked before each one."""
        given = self.given_tau
        self.tau = float(given(waiting) if callable(given) else given)
        check_tau(self.tau, self.options.metric)

    def feed(self, num_cached: int, mask_id: int) -> list[tuple[int, int, int]]:
        """(token, pos, prefix) of the next forward: see `visible` in model.py.

        The text a b c of which a b are cached, the guess d (lossless), B = 2 masks:

            token    c | d | M M | M M
            pos      2 | 3 | 3 4 | 4 5
            prefix   3 | 4 | 3 3 | 4 4
        """
        entries = []
        for pos, token in enumerate(self.ids[num_cached:] + self.guesses, start=num_cached):
            entries.append((token, pos, pos + 1))
        for pos, prefix in lossless.mask_groups(len(self.ids), self.groups, self.num_masks):
            entries.append((mask_id, pos, prefix))
        return entries


def block_of(model: Qwen2, options: Options) -> int:
    """B, the number of masks that follow a text."""
    config = model.config
    block = options.block or config.block_size or 4
    if config.mask_token_id is None:
        raise UserError("the model has no mask token; load it with model.load")
    if block > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UserError(f"block {block} exceeds the model's {limit} positions")
    return block


# ------------------------------------------------------------------------------------- acceptance


def check_tau(tau: float, metric: str) -> None:
    """Raise UserError for an impossible tau."""
    if metric not in METRICS:
        raise UserError(f"metric {metric!r}: must be one of {', '.join(METRICS)}")
    if metric == "entropy" and not tau >= 0:
        raise UserError(f"tau {tau}: must be at least 0 (nats) for the metric entropy")
    if metric != "entropy" and not 0 <= tau <= 1:
        raise UserError(f"tau {tau}: must be between 0 and 1 for the metric {metric}")


def default_tau(options: Options) -> float:
    """How sure a token must be to be accepted; with `verify`, every guess is worth checking."""
    if not options.verify:
        return 0.95
    return math.inf if options.metric == "entropy" else 0.0


def is_plain_ar(tau: float, metric: str) -> bool:
    """Is this tau plain AR? Then no masks are fed, or a probability rounded to 1.0 would pass."""
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


class Outputs(NamedTuple):
    """What the model says at C columns of R rows."""

    hidden: Tensor  # (R, C, D)
    logits: Tensor  # (R, C, V)


def choose(
    model: Qwen2,
    outputs: Outputs,
    batch: list[Answer | None],
    options: Options,
    held: Tensor | None = None,
) -> Tensor:
    """The best tokens (R, C); at temperature T > 0, draws from p^(1/T).

    Column c of a row is for position len(ids) + held + c. held (R, 1): how many guesses hold; None
    counts as 0.
    """
    scores = outputs.logits
    if options.temperature > 0:
        noise = torch.zeros_like(scores)
        num_held = [0] * len(batch) if held is None else held[:, 0].tolist()
        for of_row, answer, ahead in zip(noise, batch, num_held):
            if answer:
                for position, of_column in enumerate(of_row, start=len(answer.ids) + ahead):
                    of_column += lossless.dice(options.seed, answer.index, position, of_column)
        # The best of logits / T + noise is a draw. (T may be tiny, so both are multiplied by it.)
        scores = scores + options.temperature * noise
    if model.dtype != torch.bfloat16:
        return scores.argmax(-1)

    # Of rounded logits two are often equal, and which is the best depends on how many positions are
    # fed. So the best few are computed again.
    best = scores.topk(min(NUM_EXACT, scores.size(-1))).indices  # (R, C, K)
    exact = model.exact_logits(outputs.hidden.flatten(0, 1), best.flatten(0, 1)).view(best.shape)
    if options.temperature > 0:
        exact += options.temperature * noise.gather(-1, best)
    return best.gather(-1, exact.argmax(-1, keepdim=True))[..., 0]


def propose(
    model: Qwen2,
    outputs: Outputs,
    batch: list[Answer | None],
    options: Options,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates (R, C), how many of each row pass (R,), and their probabilities (R, C).

    The columns are those of `choose`. Candidates that pass are accepted; with `verify` they only
    become guesses. A single candidate always passes: it gets the probability 1, without a softmax.

    At temperature T > 0 every candidate is drawn from p^(1/T) of its own position, independently of
    the others, and its confidence is taken at T = 1, as in the paper's code. So with several tokens
    per forward the text is NOT a sample of the AR distribution. With `verify` it is.
    """
    candidates = choose(model, outputs, batch, options, held)
    if candidates.size(1) == 1:
        one = torch.ones_like(candidates)
        return candidates, one[:, 0], one
    device = candidates.device
    taus = [answer.tau if answer else 0.0 for answer in batch]
    tau = torch.tensor(taus, device=device, dtype=outputs.logits.dtype)  # (R,)
    sizes = [1 + answer.num_masks if answer else 1 for answer in batch]
    num_candidates = torch.tensor(sizes, device=device)  # (R,)
    probs = outputs.logits.softmax(-1)
    confidence = confidences(probs, candidates, options.metric)
    counts = passing_lengths(confidence, tau, options.metric)
    chances = probs.gather(-1, candidates[..., None])[..., 0]
    return candidates, counts.minimum(num_candidates), chances


def outputs_at(model: Qwen2, hidden: Tensor, columns: Tensor) -> Outputs:
    """The hidden states (R, T, D) at columns (R, C), and their logits.

    Shorter rows read a clamped column; the result is ignored.
    """
    columns = columns.clamp(max=hidden.size(1) - 1)
    picked = hidden.gather(1, columns[..., None].expand(-1, -1, hidden.size(-1)))
    logits = model.logits(picked.flatten(0, 1)).unflatten(0, columns.shape)
    return Outputs(picked, logits)


@torch.inference_mode()
def naive(model: Qwen2, prompt: list[int], index: int = 0, **options) -> Answer:
    """The method at its simplest: one row, no cache, plain causal attention over the whole text."""
    options = Options(**options)
    if options.verify:
        raise UserError("naive does not verify: compare verify with naive at tau = 1")
    answer = Answer(prompt, model, options, index)
    while not answer.done:
        answer.update_tau(waiting=0)
        masks = [model.config.mask_token_id] * answer.num_masks
        feed = torch.tensor([answer.ids + masks], device=model.device)  # (1, T)
        positions = torch.arange(feed.size(1), device=model.device)[None]
        hidden = model(feed, positions, None)
        last = len(answer.ids) - 1
        outputs = outputs_at(model, hidden, positions[:, last:])  # without a cache also columns
        candidates, counts, _ = propose(model, outputs, [answer], options)
        answer.take(candidates[0, : counts.item()].tolist(), feed.size(1))
    return answer


# ------------------------------------------------------------------------------- the decoding loop


class Decision(NamedTuple):
    """What one forward decided for a row."""

    tokens: list[int]  # accepted
    guesses: list[int] = []  # for the next forward to check (lossless)
    groups: list[int] = [0]  # of masks in the next forward, by the number of guesses that they see
    num_held: int = 0  # how many guesses this forward found right


class Decoder(Scheduler):
    """The loop for many rows: append to `waiting` at any time; each `step` is one forward."""

    def __init__(self, model: Qwen2, answers: list[Answer], options: Options, rows=8, longest=0):
        """longest: an upper bound on prompt plus answer, for texts appended later."""
        self.model = model
        self.options = options
        self.widest = widest_feed(options, block_of(model, options))
        for answer in answers:
            longest = max(longest, len(answer.ids) + answer.max_new)
        unit = attention.span_unit(model, options.compile)
        capacity = round_up(longest + self.widest, unit)
        cache = KVCache(model.config, rows, capacity, model.device, model.dtype, unit)
        super().__init__(answers, rows, cache)
        self.prefill, self.advance = attention.fast_forwards(model, cache, options.compile)
        # Called at each forward with batch, outputs, candidates, decisions: see apps/trace.py.
        self.watch = None

    def __iter__(self) -> Iterator[tuple[Answer, list[int]]]:
        """Yield every answer with its new tokens, as they come, until all are done."""
        while news := self.step():
            yield from news

    @torch.inference_mode()
    def step(self) -> list[tuple[Answer, list[int]]]:
        """Prefill waiting prompts if rows are free, else advance the rows; [] if all are done."""
        free_cores.use()
        admitted = self.admit()
        if self.rows[admitted]:  # at least one row
            return self.forward(self.rows[admitted], admitted, is_prefill=True)
        live = [answer for answer in self.rows if answer and not answer.done]
        if not live:
            return []  # the rows keep their texts, for a later prompt with the same beginning
        self.clear_done()
        ready = live
        if self.options.block_cache:
            # The paper's policy: a row that has just filled a block (its next one is not open yet)
            # waits until no row has an open block.
            unfinished = [answer for answer in live if answer.num_in_open_block > 0]
            ready = unfinished or live
        batch = [answer if answer in ready else None for answer in self.rows]
        return self.forward(batch, slice(None))

    def forward(
        self, batch: list[Answer | None], where: slice, is_prefill: bool = False
    ) -> list[tuple[Answer, list[int]]]:
        """One forward of the cache's rows `where`; a row that is None in `batch` is idle."""
        mask_id = self.model.config.mask_token_id
        feeds = []
        num_real = []  # per row: tokens that are fed and known to be part of the text
        for answer, num_cached in zip(batch, self.cache.lengths[where]):
            if answer is None:
                feeds.append([])
                num_real.append(0)
                continue
            answer.update_tau(len(self.waiting))
            feeds.append(answer.feed(num_cached, mask_id))
            num_real.append(len(answer.ids) - num_cached)

        width = max(map(len, feeds))
        if self.options.compile and not is_prefill and width > 1:
            width = self.widest  # only two widths to compile: 1 (plain AR) and this
        padding = (mask_id, 0, 1)  # sees slot 0: a softmax over nothing would be NaN
        padded = [feed + [padding] * (width - len(feed)) for feed in feeds]
        tokens, pos, prefix = torch.tensor(padded, device=self.model.device).unbind(-1)  # (R, T)
        last_column = torch.tensor(num_real, device=tokens.device)[:, None] - 1  # (R, 1)
        last_column = last_column.clamp(min=0)  # an idle row has no real token
        self.cache.reserve(width, where)
        mask = self.cache.mask(pos, prefix)
        run_model = self.prefill if is_prefill else self.advance
        hidden = run_model(tokens, pos, mask)
        decisions = self.decide(hidden, last_column, batch)

        # What stays in the cache: the real tokens, except those of an open cache block, and the
        # guesses that hold. Masks and guesses that failed are overwritten by the next forward.
        counts = []
        for answer, real, decision in zip(batch, num_real, decisions):
            if answer is None:
                counts.append(0)
            else:
                counts.append(real - answer.num_in_open_block + decision.num_held)
        self.cache.commit(counts)
        news = []
        for answer, decision in zip(batch, decisions):
            if answer:
                answer.checked.append(len(answer.guesses))
                answer.guesses = decision.guesses
                answer.groups = decision.groups
                news.append((answer, answer.take(decision.tokens, width)))
        return news

    def decide(
        self, hidden: Tensor, last_column: Tensor, batch: list[Answer | None]
    ) -> list[Decision]:
        """Accept what passes tau. hidden (R, T, D); last_column (R, 1): of the last real token."""
        if self.options.verify:
            return self.check(hidden, last_column, batch)
        num_candidates = 1 + max(answer.num_masks for answer in batch if answer)
        columns = last_column + torch.arange(num_candidates, device=hidden.device)
        outputs = outputs_at(self.model, hidden, columns)
        candidates, counts, _ = propose(self.model, outputs, batch, self.options)
        fetched = torch.cat([counts[:, None], candidates], dim=1).tolist()  # one copy to the host
        decisions = [Decision(tokens[:count]) for count, *tokens in fetched]
        if self.watch:
            self.watch(batch, outputs, candidates, decisions)
        return decisions

    def check(
        self, hidden: Tensor, last_column: Tensor, batch: list[Answer | None]
    ) -> list[Decision]:
        """Accept the guesses that AR agrees with and AR's next token: see lossless.py."""
        guesses = [answer.guesses if answer else [] for answer in batch]
        groups = [answer.groups if answer else [0] for answer in batch]
        num_guesses = [len(tokens) for tokens in guesses]
        num_masks = [answer.num_masks if answer else 0 for answer in batch]
        columns = last_column + torch.arange(1 + max(num_guesses), device=hidden.device)
        outputs = outputs_at(self.model, hidden, columns)
        ar_tokens = choose(self.model, outputs, batch, self.options)
        held = lossless.count_held(ar_tokens, guesses)  # (R, 1)

        columns, has_group = lossless.candidate_columns(
            last_column, num_guesses, groups, num_masks, held
        )
        outputs = outputs_at(self.model, hidden, columns)
        candidates, counts, chances = propose(self.model, outputs, batch, self.options, held)
        counts = counts.where(has_group[:, 0], 1)  # without the group there are no new guesses
        decisions = []
        fields = (held[:, 0], ar_tokens, counts, candidates, chances)
        for num_held, ar, count, tokens, odds in zip(*(field.tolist() for field in fields)):
            accepted = ar[: num_held + 1]  # the guesses that hold, and AR's next token
            new_guesses = tokens[1:count]  # candidate 0 is AR's next token once more
            new_groups = self.groups_for(odds[1:count])
            decisions.append(Decision(accepted, new_guesses, new_groups, num_held))
        if self.watch:
            self.watch(batch, outputs, candidates, decisions)
        return decisions

    def groups_for(self, chances: list[float]) -> list[int]:
        """The groups of masks of the next forward, from the probabilities of its guesses."""
        most = self.options.groups
        if most is None and self.options.temperature > 0:
            return list(range(len(chances) + 1))  # shared dice: improbable guesses often hold
        if most is None and self.model.device.type == "cpu" and len(self.rows) > 1:
            most = 1  # every row is as wide as the widest, and a CPU computes each position
        return lossless.likely_groups(chances, most or len(chances) + 1)


def widest_feed(options: Options, block: int) -> int:
    """The largest number of positions that a step can feed."""
    if options.verify:  # a token, B guesses, B + 1 groups of B masks
        return 1 + block + (block + 1) * block
    if options.block_cache:  # all of an open block, and the masks
        return min(options.block_cache, options.max_new) + block
    return (block + 1) + block  # what was accepted last time, and the masks


def generate(
    model: Qwen2, prompts: list[list[int]], rows=8, tau: Tau | list[Tau] | None = None, **options
) -> list[Answer]:
    """Decode prompts (token ids), `rows` at a time; tau for all, or a list with one per prompt.

    The other options are the fields of `Options`.
    """
    taus = list(tau) if isinstance(tau, list | tuple) else [tau] * len(prompts)
    if len(taus) != len(prompts):
        raise UserError(f"{len(taus)} values of tau for {len(prompts)} prompts")
    options = Options(**options)
    answers = []
    for index, (prompt, own_tau) in enumerate(zip(prompts, taus)):
        answers.append(Answer(prompt, model, options, index, own_tau))
    decoder = Decoder(model, answers, options, min(rows, max(1, len(answers))))
    for _ in decoder:
        pass
    return answers


# ------------------------------------------------------------------------------------ command line


def load_for_decoding(args, options: Options) -> tuple:
    """The model and chat of --model, or the bundled ones; a note if it may not know masks."""
    device, dtype = find_device(args.device, args.dtype)
    if args.model is None:
        note("the bundled toy/mars solves only problems like those in toy/test.jsonl; see --model")
    model, chat = load(str(TOY) if args.model is None else args.model, device, dtype)
    uses_masks = not is_plain_ar(options.tau, options.metric)
    if uses_masks and not options.block and not model.config.block_size:
        note("config.json has no block_size: if the model was not trained by MARS, use --tau 1")
    return model, chat


def main() -> None:
    parser = Parser("Answer a prompt, several tokens per forward (MARS).")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    parser.add_argument("--show", action="store_true", help="shade tokens accepted in one forward")
    parser.add_model(None, "directory or hub id (default: the bundled toy/mars)")
    parser.add_options(Options)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args, options)
    messages = [{"role": "user", "content": args.prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    answer = Answer(chat.encode(chat.prompt(messages)), model, options)
    print_answer(Decoder(model, [answer], options, rows=1), chat, args.show)
    uses_masks = not is_plain_ar(answer.tau, options.metric)
    if uses_masks and answer.forwards >= 8 and answer.tokens_per_forward < 1.05:
        note("this model hardly accepts more than one token per forward: train it, or use --tau 1")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
