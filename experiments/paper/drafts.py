"""A separate draft model, as in the paper's section 4.6.

    python -m bench.speed --table6 toy/draft

The draft proposes K tokens. One forward of the target checks them, and carries a group of masks
after each number of them. From the group after the proposals that held, what passes tau is
accepted at once. That last part makes the composition lossy; checking the draft is exact.
`--verify` needs no draft, and the next forward checks what the masks say too, so its text is that
of AR. "AR" in the table is the MARS checkpoint at tau 1, as target or as draft. Tokens per
forward are those of the target's forwards.
"""

from dataclasses import replace

from decode import Answer, Decoder, Options
from model import Qwen2

NUM_PROPOSED = 4  # K


class WithDraft:
    """A draft and a target, one answer at a time; each keeps the text in a cache of its own."""

    def __init__(self, target: Qwen2, draft: Qwen2, longest: int, tau: float, draft_tau: float):
        """longest: an upper bound on prompt plus answer. tau: which of the masks' guesses pass."""
        self.options = Options(tau=tau, verify=True)
        self.draft_options = Options(tau=draft_tau)
        longest += 2 * NUM_PROPOSED**2  # K > B guesses make wider forwards than B do
        self.target = Decoder(target, [], self.options, rows=1, longest=longest)
        self.draft = Decoder(draft, [], self.draft_options, rows=1, longest=longest)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Answer]:
        options = replace(self.options, max_new=max_new)
        return [self.answer(prompt, options) for prompt in prompts]

    def answer(self, prompt: list[int], options: Options) -> Answer:
        answer = Answer(prompt, self.target.model, options)
        answer.moments = []
        self.target.waiting.append(answer)
        while not answer.done:
            answer.guesses = self.propose(answer)
            answer.groups = list(range(len(answer.guesses) + 1))
            self.target.step()
            if answer.guesses and not answer.done:
                accept_guesses(answer)
        answer.checked = []  # `accepted` has unchecked tokens, too, so nobody can tell what held
        return answer

    def propose(self, answer: Answer) -> list[int]:
        """The draft's next K tokens. It computes only what is new in the text so far."""
        room = answer.max_new - len(answer.tokens)
        options = replace(self.draft_options, max_new=min(NUM_PROPOSED, room))
        proposal = Answer(answer.ids, self.draft.model, options)
        self.draft.waiting.append(proposal)
        for _ in self.draft:
            pass
        return proposal.tokens


def accept_guesses(answer: Answer) -> None:
    """Accept what the masks guessed as part of the last forward, instead of checking it."""
    answer.take(answer.guesses, num_positions=0)
    answer.positions.pop()
    from_masks = answer.accepted.pop()
    answer.accepted[-1] += from_masks
