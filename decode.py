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
    until another has filled a cache block, and a prompt gives the same tokens in a batch as alone,
    up to rounding. `block_cache` is the paper's way: see kv_cache.py;
  * a row that is done takes the next prompt at once; tau may change between any two forwards;
  * `verify` checks guesses before they count, so that the text is AR's: see lossless.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import make_cache
from lossless import Lossless
from model import Qwen2, load
from plumbing.arguments import Parser, check_options, check_tau, find_device, option, read_options
from plumbing.attention import additive_mask, attend_folded, compiled
from plumbing.cpu import fast_copy
from plumbing.errors import UserError, run_main
from plumbing.sampling import dice_of_rows
from plumbing.scheduler import Decision, Fed, Scheduler, Sequence
from plumbing.terminal import note, note_mode, print_answer

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


# ------------------------------------------------------------------------------------------ options

METRICS = ("probability", "margin", "entropy")


@dataclass
class Options:
    """How to decode. Each field is also an option of the command line."""

    tau: float | None = option(
        None,
        "(default: --verify) accept a token at least this confident; 1 is plain AR, below it the "
        "text may differ from AR's. With --metric entropy: at most this many nats, 0 is AR",
        kind=float,
    )
    metric: str = option("probability", "measure of confidence", choices=METRICS)
    block: int | None = option(
        None, "B, number of masks (default: as in training, or 4)", int, 1, 1000
    )
    block_cache: int | None = option(None, "the paper's cache, in blocks of N tokens", int, 1)
    verify: bool = option(False, "lossless: the text of --tau 1 up to rounding, in fewer forwards")
    max_new: int = option(256, "maximum number of new tokens", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0, below=1e30)
    seed: int = option(0, "sampling seed", least=0, below=2**62)
    compile: bool = option(False, "torch.compile: a slow start, then fast on a GPU")

    def __post_init__(self) -> None:
        check_options(self)
        if self.tau is not None and self.verify:
            raise UserError("--verify takes no --tau, for it checks every guess: leave out one")
        if self.tau is not None:
            check_tau(self.tau, self.metric)
            return
        self.verify = True
        if self.block_cache or self.metric != "probability":
            raise UserError("--block-cache and --metric need a --tau, without --verify")


# --------------------------------------------------------------------------------------- acceptance


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


class Threshold:
    """The paper's method: feed B masks after the text, accept while the confidence passes tau.

    Its two calls are those of `Method` (plumbing/scheduler.py); lossless.py is the other one.
    """

    def __init__(self, block: int, metric: str, mask_id: int):
        """block: the number of masks, B."""
        self.block = block
        self.metric = metric
        self.mask_id = mask_id
        self.widest = 2 * block + 1  # as many tokens as were accepted last time, and the masks

    def feed(self, sequence: Sequence) -> list[Fed]:
        """The masks that follow a text. They see all of it: their prefix is its length."""
        if sequence.tau == (0 if self.metric == "entropy" else 1):
            return []  # plain AR needs none, and a confidence that was rounded to 1 would pass
        end = len(sequence.text)
        return [(self.mask_id, pos, end) for pos in range(end, end + self.block)]

    def decide(self, sequence: Sequence, best: list[int], sure: list[float]) -> Decision:
        """The candidates up to the first that does not pass.

        The first one always does: it is AR's own, for the last real token sees no mask.
        """
        count = 1
        for confidence in sure[1:]:
            if self.metric == "entropy":
                passes = confidence <= sequence.tau
            else:
                passes = confidence >= sequence.tau
            if not passes:
                break
            count += 1
        return Decision(best[:count], num_held=0)


# ----------------------------------------------------------------------------------------- the loop


class Decoder:
    """Decodes many sequences, each in a row of one cache. `add` prompts at any time.

    Every `step` is one forward: feed, predict, decide. A row feeds the tokens of its text that are
    not in the cache yet, then what its method adds: masks or guesses. From the last real token on,
    each position predicts a token, and the method says which of these are accepted. Accepted tokens
    enter the cache when the next forward feeds them; guesses that hold were fed already. (When the
    weights change, make a new decoder: the cache holds what the old ones computed.)
    """

    def __init__(self, model: Qwen2, options: Options, rows: int, longest: int):
        """longest: the most tokens that a prompt and its answer may have together."""
        config = model.config
        if config.mask_token_id is None:
            raise UserError("the model has no mask token; load it with model.load")
        self.options = options
        self.config = config
        self.longest = min(longest, config.max_position_embeddings)
        self.block = options.block or config.block or 4  # B
        if options.verify:
            is_batch_on_cpu = rows > 1 and model.device.type == "cpu"
            self.method = Lossless(self.block, config.mask_token_id, is_batch_on_cpu)
        else:
            self.method = Threshold(self.block, options.metric, config.mask_token_id)
        self.widest = self.method.widest  # positions of a forward, prefills aside
        if options.block_cache:
            self.widest += min(options.block_cache, self.longest)  # a cache block is fed as a whole
        self.cache = make_cache(model, rows, self.longest + self.widest, options)
        self.scheduler = Scheduler(self.cache, rows, self.block, options.compile)
        self.model = fast_copy(model, options.compile)
        self.num_threads = torch.get_num_threads()  # attention depends on it: see additive_mask
        self.fast_forward = self.forward
        if options.compile:
            self.fast_forward = compiled(self.forward, self.cache)
        self.num_added = 0

    def add(self, prompt: list[int], tau: float | None = None, max_new=None, index=None):
        """Let a prompt (token ids) wait for a row. Returns its Sequence, which `step` fills.

        tau, max_new: instead of the options'. index: see Sequence; by default, how many prompts
        were added before. UserError if the prompt cannot be decoded here.
        """
        if tau is None:
            tau = self.options.tau
        elif self.options.verify:
            raise UserError("a tau of its own needs --tau: without that, AR checks every guess")
        else:
            check_tau(tau, self.options.metric)
        max_new = self.options.max_new if max_new is None else max_new
        index = self.num_added if index is None else index
        sequence = Sequence(prompt, self.config, max_new, tau, index)
        if len(prompt) + max_new > self.longest:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and up to {max_new} new ones exceed the "
                f"{self.longest} positions of this decoder: shorten it, or lower --max-new"
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
        """One forward; the sequences in it, with their new tokens. [] if all are done.

        A position is fed (token, pos, prefix): prefix is how many tokens of the text it sees
        (`visible` in model.py). The text a b c, of which the cache has a b, and B = 2 masks:

            token    c | M M
            pos      2 | 3 4
            prefix   3 | 3 3
        """
        rows, sequences, is_prefill = self.scheduler.schedule()
        if not rows:
            return []
        feeds = []  # of each row: what its positions are fed
        num_real = []  # of each row: how many of them are tokens of its text
        for row, sequence in zip(rows, sequences):
            real = []
            after = []
            if sequence:  # else the row is idle, or waits: it is fed padding
                text = sequence.text
                num_cached = self.cache.lengths[row]
                real = [(text[pos], pos, pos + 1) for pos in range(num_cached, len(text))]
                # A cache block may have room for fewer tokens than the method would give; the last
                # real token gives the first of them.
                after = self.method.feed(sequence)[: self.cache.room(row, len(text)) - 1]
            feeds.append(real + after)
            num_real.append(len(real))
        best, sure = self.predict(rows, sequences, feeds, num_real, is_prefill)

        news = []
        counts = []
        for i, sequence in enumerate(sequences):
            num_held = 0  # accepted tokens that were fed as guesses
            if sequence:
                n = 1 + len(feeds[i]) - num_real[i]  # predictions, without those of padding
                tokens, num_held = self.method.decide(sequence, best[i][:n], sure[i][:n])
                news.append((sequence, sequence.take(tokens, self.cache.width)))
            # cached tokens += real tokens that were fed + guesses that hold
            counts.append(num_real[i] + num_held)
        self.cache.commit(counts)
        return news

    def predict(
        self,
        rows: list[int],
        sequences: list,
        feeds: list[list[Fed]],
        num_real: list[int],
        is_prefill: bool,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For each row the tokens predicted from its last real token on, and how sure they are.

        At a temperature T > 0 every token is drawn from p^(1/T) of its own position, independently
        of the others. So with several tokens per forward (and no `verify`) the text is not a sample
        of the AR distribution.
        """
        first = [max(0, real - 1) for real in num_real]  # the last real token; 0 in an idle row
        width = max(map(len, feeds))
        num_columns = max(len(feed) - column for feed, column in zip(feeds, first))
        if self.options.compile and not is_prefill and width > 1:
            # So there are two widths to compile: this, and a single position (plain AR).
            width = num_columns = self.widest
        # Padding is a clean token (prefix = pos + 1) after every text: no token of a text sees it.
        end_of_cache = self.cache.capacity
        padding = (self.config.mask_token_id, end_of_cache, end_of_cache + 1)
        padded = [feed + [padding] * (width - len(feed)) for feed in feeds]
        fed = torch.tensor(padded, device=self.cache.device)  # (R, T, 3)
        columns = torch.tensor(first)[:, None] + torch.arange(num_columns)  # (R, C)
        columns = columns.clamp(max=width - 1)  # of rows that need fewer; `step` cuts them off
        noise = None
        if self.options.temperature > 0:
            shape = (len(rows), num_columns, self.config.vocab_size)
            # A position at pos predicts the token at pos + 1.
            predicted = []
            for feed, column in zip(feeds, first):
                predicted.append([pos + 1 for _, pos, _ in feed[column:]])
            noise = dice_of_rows(self.options.seed, sequences, predicted, shape, fed.device)
        self.cache.reserve(width, rows)
        forward = self.forward if is_prefill else self.fast_forward
        best, sure = forward(fed, columns.to(fed.device), noise).tolist()
        return [[int(token) for token in row] for row in best], sure

    def forward(self, fed: Tensor, columns: Tensor, noise: Tensor | None) -> Tensor:
        """The best token of each column (R, C) and how sure it is: (2, R, C), one copy to the host.

        fed (R, T, 3): token, pos and prefix. noise: the dice (R, C, V). --compile compiles this.
        """
        mask = self.cache.mask(fed[..., 1:])
        mask = additive_mask(mask, self.config, self.num_threads, self.cache.dtype)
        hidden = self.model(fed[..., 0], fed[..., 1], mask, self.cache, attend_folded)  # (R, T, D)
        logits = self.model.logits_at(hidden, columns)  # (R, C, V)
        scores = logits
        if noise is not None:  # the best of logits + T * dice is a draw from p^(1/T)
            scores = logits + self.options.temperature * noise
        best = scores.argmax(-1)
        # Confidence is taken at T = 1, without dice (as in the paper's code). A guess of `verify`
        # is checked with the same dice: one that they favour by far is likely to hold.
        probs = (scores if self.options.verify else logits).softmax(-1)
        sure = confidences(probs, best, self.method.metric)
        return torch.stack([best.to(sure.dtype), sure])  # float32 or more: exact for token ids


def generate(model: Qwen2, prompts: list[list[int]], rows=8, **options) -> list[Sequence]:
    """Decode prompts (token ids), `rows` at a time; the options are the fields of `Options`."""
    options = Options(**options)
    if any(isinstance(prompt, int) for prompt in prompts):
        raise UserError("prompts: a list of prompts, each of them a list of token ids")
    longest = max(map(len, prompts), default=0) + options.max_new
    decoder = Decoder(model, options, min(rows, max(1, len(prompts))), longest)
    sequences = [decoder.add(prompt) for prompt in prompts]
    for _ in decoder:
        pass
    return sequences


# ------------------------------------------------------------------------------------ command line


def load_for_decoding(args) -> tuple:
    """The model and chat of --model, or the bundled ones with a note."""
    device, dtype = find_device(args.device, args.dtype)
    if args.model is None:
        note("the bundled toy/mars solves only problems like those in toy/test.jsonl; see --model")
    model, chat = load(str(TOY) if args.model is None else args.model, device, dtype)
    needs_masks = args.tau is not None and args.tau < 1
    if needs_masks and args.block is None and model.config.block is None:
        note(f"{args.model}: was not trained with masks: what a tau below 1 accepts is garbage")
    if not chat.has_template:
        note(f"{args.model}: has no chat template, so it may not know where an answer ends")
    return model, chat


def main() -> None:
    parser = Parser("Answer a prompt, several tokens per forward (MARS).")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model(None, "directory or hub id (default: the bundled toy/mars)")
    parser.add_options(Options)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args)
    prompt = chat.encode_prompt([{"role": "user", "content": args.prompt}])
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    note_mode(options)
    print_answer(decoder, chat)


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
