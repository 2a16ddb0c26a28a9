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
from decode import Decoder, Options, Sequence, passing_lengths
from lossless import count_held
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.errors import UserError, run_main

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
        self.target = Target(target, longest, tau)
        self.draft = Decoder(draft, Options(tau=draft_tau), rows=1, longest=longest)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Answer]:
        return [self.answer(prompt, max_new) for prompt in prompts]

    def answer(self, prompt: list[int], max_new: int) -> Answer:
        answer = self.target.add(prompt, max_new=max_new)
        while not answer.done:
            self.target.propose(answer, self.proposal(answer))
            self.target.step()
        answer.checked = []  # `accepted` has unchecked tokens, too, so nobody can tell what held
        return Answer(answer.tokens, [], answer)

    def proposal(self, answer: Sequence) -> list[int]:
        """The draft's next K tokens. It computes only what is new in the text so far."""
        room = answer.max_new - len(answer.tokens)
        proposed = self.draft.add(answer.text, max_new=min(NUM_PROPOSED, room))
        for _ in self.draft:
            pass
        return proposed.tokens


class Target(Decoder):
    """Checks a draft's tokens, one text at a time, and accepts unchecked what masks add to them."""

    def __init__(self, model: Qwen2, longest: int, tau: float):
        longest += 2 * NUM_PROPOSED**2  # its forwards are wider than those of --verify
        super().__init__(model, Options(verify=True), rows=1, longest=longest)
        self.tau = tau

    def propose(self, sequence: Sequence, tokens: list[int]) -> None:
        """What the next forward is to check; without masks if tau is 1."""
        sequence.guesses = tokens
        sequence.groups = [] if self.tau == 1 else list(range(len(tokens) + 1))

    def decide(
        self, hidden: torch.Tensor, last_columns: list[int], batch: list[Sequence]
    ) -> list[tuple[list[int], int]]:
        """See Decoder.decide; of the one sequence."""
        [sequence] = batch
        guesses = sequence.guesses
        columns = torch.arange(len(guesses) + 1, device=hidden.device)[None] + last_columns[0]
        ar_tokens = self.forward.logits_at(hidden, columns).argmax(-1)[0].tolist()
        held = count_held(ar_tokens, guesses)
        accepted = ar_tokens[: held + 1]
        if sequence.groups:
            columns = self.lossless.candidate_columns(last_columns, batch, [held])
            logits = self.forward.logits_at(hidden, torch.tensor(columns, device=hidden.device))
            confidence, candidates = logits.softmax(-1).max(-1)  # (1, 1 + B): AR's, then the masks'
            tau = torch.tensor([self.tau], device=hidden.device)
            [num_passing] = passing_lengths(confidence, tau, "probability").tolist()
            accepted += candidates[0, 1:num_passing].tolist()
        return [(accepted, held)]


def parse_arguments():
    parser = Parser("The paper's Tables 5 and 6.")
    add = parser.add_argument
    add("--table5", action="store_true", help="AR, no cache, block caches and our cursor")
    add("--table6", metavar="DRAFT", help="with a draft model, one row: directory or hub id")
    add_settings(parser)
    args = parser.parse_args()
    if not (args.table5 or args.table6):
        parser.error("choose --table5 or --table6")
    return args


def main() -> None:
    args = parse_arguments()
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
