"""The paper's Tables 5 and 6: what each cache is worth, and what a draft model is worth.

    python -m experiments.paper.tables --table5
    python -m experiments.paper.tables --table6 toy/draft

How it is measured, and what the columns mean: bench/speed.py.

Table 6 (the paper's section 4.6): a draft model proposes K tokens. One forward of the target checks
them, and carries a group of masks for each number of them that may hold. What passes tau in the
group after those that held is accepted at once. That last part makes the composition lossy;
checking the draft is exact. `--verify` needs no draft, and checks in the next forward what the
masks say, too, so its text is that of AR. "AR" in the table is the MARS checkpoint at tau 1, as
target or as draft. Tokens per forward are those of the target's forwards.
"""

import functools

import torch

from bench import common
from bench.speed import Answer, Ours, Way, add_settings, compare
from decode import Decoder, Options, passing_lengths
from experiments.paper.baselines import is_complete, through_end
from kv_cache import KVCache
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.attention import FastModel
from plumbing.errors import UserError, run_main
from plumbing.scheduler import num_in_common

BLOCK_CACHES = (4, 8, 16, 32, 64, 128, 256)
NUM_PROPOSED = 4  # K


def table5(model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    ways = {"AR": ours(tau=1.0), "MARS, no cache": ours(tau=args.tau)}
    ways["MARS, no cache"].decoder.cache.commit = lambda counts: None  # each forward: all the text
    for size in BLOCK_CACHES:
        ways[f"MARS, B_cache {size}"] = ours(tau=args.tau, block_cache=size)
    ways["MARS, cursor"] = ours(tau=args.tau)
    return ways


def table6(draft: Qwen2, model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    with_draft = functools.partial(WithDraft, model, draft, longest)
    return {
        "AR draft + AR": with_draft(tau=1.0, draft_tau=1.0),
        "AR": ours(tau=1.0),
        "AR draft + MARS": with_draft(tau=args.tau, draft_tau=1.0),
        "MARS draft + MARS": with_draft(tau=args.tau, draft_tau=args.tau),
        "MARS": ours(tau=args.tau),
        "MARS, verify": ours(verify=True),
    }


class WithDraft:
    """A draft and a target, one answer at a time; each keeps the text in a cache of its own."""

    def __init__(self, target: Qwen2, draft: Qwen2, longest: int, tau: float, draft_tau: float):
        """longest: an upper bound on prompt plus answer. tau: which of the masks' guesses pass."""
        self.target = target
        self.tau = tau
        self.block = 0 if tau == 1 else target.config.block
        self.draft = Decoder(draft, Options(tau=draft_tau), rows=1, longest=longest)
        widest = (NUM_PROPOSED + 1) * (1 + self.block)
        self.cache = KVCache(target.config, 1, longest + widest, target.device, target.dtype)
        self.forward = FastModel(target, self.cache, compile=False)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Answer]:
        return [self.answer(prompt, max_new) for prompt in prompts]

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_new: int) -> Answer:
        text = list(prompt)
        accepted = []
        widths = []
        self.cache.begin(0)
        while not is_complete(text[len(prompt) :], self.target, max_new):
            room = len(prompt) + max_new - len(text)
            draft = self.draft.add(text, max_new=min(NUM_PROPOSED, room))
            for _ in self.draft:  # it computes only what is new in the text
                pass
            tokens, width = self.check(text, draft.tokens)
            text += tokens
            accepted.append(len(tokens))
            widths.append(width)
        # Nobody checked what the masks added, so nothing is said of guesses that held.
        return Answer(through_end(text[len(prompt) :], self.target, max_new), accepted, widths)

    def check(self, text: list[int], proposed: list[int]) -> tuple[list[int], int]:
        """The tokens that one forward of the target accepts, and its width."""
        num_cached = self.cache.lengths[0]
        longer = text + proposed
        feed = [(longer[pos], pos, pos + 1) for pos in range(num_cached, len(longer))]
        last = len(text) - num_cached - 1  # the column of the text's last token
        groups = len(feed)  # where the groups of masks begin
        for prefix in range(len(text), len(longer) + 1):
            for pos in range(prefix, prefix + self.block):
                feed.append((self.target.config.mask_token_id, pos, prefix))
        device = self.target.device
        tokens, pos, prefix = torch.tensor([feed], device=device).unbind(-1)  # (1, T)
        self.cache.reserve(len(feed))
        mask = self.cache.mask(pos, prefix)
        hidden = self.forward(tokens, pos, mask, is_prefill=num_cached == 0)
        columns = torch.arange(last, groups, device=device)[None]
        ar_tokens = self.forward.logits_at(hidden, columns).argmax(-1)[0].tolist()
        held = num_in_common(ar_tokens, proposed)
        self.cache.commit([last + 1 + held])
        accepted = ar_tokens[: held + 1]
        if self.block:
            first = groups + held * self.block  # the group that saw exactly what held
            columns = [last + held, *range(first, first + self.block)]
            logits = self.forward.logits_at(hidden, torch.tensor([columns], device=device))
            confidence, candidates = logits.softmax(-1).max(-1)  # AR's token, then the masks'
            tau = torch.tensor([self.tau], device=device)
            [num_passing] = passing_lengths(confidence, tau, "probability").tolist()
            accepted += candidates[0, 1:num_passing].tolist()
        return accepted, len(feed)


def main() -> None:
    parser = Parser("The paper's Tables 5 and 6.")
    add = parser.add_argument
    add("--table5", action="store_true", help="AR, no cache, block caches and our cursor")
    add("--table6", metavar="DRAFT", help="with a draft model, one row: directory or hub id")
    add_settings(parser)
    args = parser.parse_args()
    if not (args.table5 or args.table6):
        parser.error("choose --table5 or --table6")
    problems = common.read_problems(args.data, args.limit)
    device, dtype = find_device(args.device, args.dtype)
    model, chat = load(args.model, device, dtype)
    if args.table6:
        draft, draft_chat = load(args.table6, device, dtype)
        if chat.tokenizer.get_vocab() != draft_chat.tokenizer.get_vocab():
            raise UserError(f"{args.table6}: its tokenizer is not that of {args.model}")
    print(f"{args.model}, {len(problems)} problems, {args.rounds} rounds\n{common.machine(model)}")
    if args.table5:
        compare(table5, model, chat, problems, args)
    if args.table6:
        args.rows = [1]
        compare(functools.partial(table6, draft), model, chat, problems, args)


if __name__ == "__main__":
    run_main(main)
