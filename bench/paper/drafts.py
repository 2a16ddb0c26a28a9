"""A separate draft model, as in the paper's section 4.6 and Table 6, next to `--verify`.

    python -m bench.paper.drafts --model toy/mars --draft toy/draft

The draft proposes K tokens. One forward of the target checks them, and carries a group of masks
after each number of them. From the group after the proposals that held, what passes tau is
accepted at once. That last part makes the composition lossy; checking the draft is exact.
`--verify` needs no draft, and the next forward checks what the masks say too, so its text is that
of AR. AR is the same checkpoint at tau 1, for the target and for the draft.
"""

from dataclasses import replace

from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main

from bench import common
from decode import Answer, Decoder, Options
from model import Qwen2, load


class Alone:
    """The target by itself, one answer at a time."""

    def __init__(self, target: Qwen2, options: Options, longest: int):
        self.options = options
        self.target = Decoder(target, [], options, rows=1, longest=longest)

    def __call__(self, prompt: list[int]) -> Answer:
        answer = Answer(prompt, self.target.model, self.options)
        self.target.waiting.append(answer)
        for _ in self.target:
            pass
        return answer


class WithDraft:
    """A draft and a target, one answer at a time; each keeps the text in a cache of its own."""

    def __init__(self, target: Qwen2, draft: Qwen2, options: Options, draft_tau: float, args):
        """options: of the target. Its tau says which of the masks' guesses are accepted."""
        self.options = replace(options, verify=True)
        self.draft_options = Options(tau=draft_tau, max_new=args.k)
        longest = args.longest + 2 * args.k**2  # K > B guesses make wider forwards than B do
        self.target = Decoder(target, [], self.options, rows=1, longest=longest)
        self.draft = Decoder(draft, [], self.draft_options, rows=1, longest=longest)

    def __call__(self, prompt: list[int]) -> Answer:
        answer = Answer(prompt, self.target.model, self.options)
        self.target.waiting.append(answer)
        while not answer.done:
            answer.guesses = self.propose(answer)
            answer.groups = list(range(len(answer.guesses) + 1))
            self.target.step()
            if answer.guesses and not answer.done:
                accept_guesses(answer)
        return answer

    def propose(self, answer: Answer) -> list[int]:
        """The draft's next K tokens. It computes only what is new in the text so far."""
        room = self.options.max_new - len(answer.tokens)
        options = replace(self.draft_options, max_new=min(self.draft_options.max_new, room))
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


def make_table(answers: dict, seconds: dict, chat: Chat, problems: list[dict]) -> str:
    """answers and seconds: by decoder; the seconds of every round."""
    per_token = {}
    for name, taken in seconds.items():
        num_tokens = sum(len(answer.tokens) for answer in answers[name])
        per_token[name] = [t / num_tokens for t in taken]
    rows = []
    for name, given in answers.items():
        row = [name, f"{common.tokens_per_forward(given):.2f}"]
        for base in ("AR", "AR draft + AR"):
            row.append(common.spread([a / b for a, b in zip(per_token[base], per_token[name])]))
        num_same = sum(a.tokens == b.tokens for a, b in zip(given, answers["AR"]))
        row += [common.accuracy(chat, given, problems), f"{num_same / len(given):.0%}"]
        rows.append(row)
    head = ["", "tokens/target forward", "x AR (range)", "x AR + AR (range)", "accuracy"]
    return common.table([*head, "text of AR"], rows)


def main() -> None:
    parser = Parser("Speculative decoding with a draft model, next to --verify.")
    common.add_problems(parser, limit=100)
    common.add_rounds(parser, 5)
    add = parser.add_argument
    add("--draft", default=str(common.TOY / "draft"), help="directory or hub id of a smaller model")
    add("--k", type=number(least=1), default=4, help="tokens that the draft proposes")
    add("--tau", type=float, default=0.95, help="of the MARS models")
    args = parser.parse_args()

    problems = common.read_problems(args.data, args.limit)
    device, dtype = find_device(args.device, args.dtype)
    target, chat = load(args.model, device, dtype)
    draft, draft_chat = load(args.draft, device, dtype)
    if chat.tokenizer.get_vocab() != draft_chat.tokenizer.get_vocab():
        raise UserError(f"{args.draft}: its tokenizer is not that of {args.model}")
    prompts = common.encode(chat, problems)
    args.longest = max(len(prompt) for prompt in prompts) + args.max_new

    ar = Options(tau=1.0, max_new=args.max_new)
    mars = Options(tau=args.tau, max_new=args.max_new)
    verify = Options(tau=0.0, verify=True, max_new=args.max_new)
    decoders = {
        "AR": Alone(target, ar, args.longest),
        "AR draft + AR": WithDraft(target, draft, ar, 1.0, args),
        "AR draft + MARS": WithDraft(target, draft, mars, 1.0, args),
        "MARS draft + MARS": WithDraft(target, draft, mars, args.tau, args),
        "MARS": Alone(target, mars, args.longest),
        "MARS --verify": Alone(target, verify, args.longest),
    }
    print(f"{args.model}, draft {args.draft}, K = {args.k}, tau {args.tau:g},")
    print(f"{len(prompts)} problems, medians of {args.rounds} rounds; {common.machine(target)}\n")
    for decode in decoders.values():
        decode(prompts[0])  # start-up, untimed
    ways = {}
    for name, decode in decoders.items():
        ways[name] = lambda decode=decode: [decode(prompt) for prompt in prompts]
    answers, seconds = common.in_turn(ways, args.rounds, device)
    print(make_table(answers, seconds, chat, problems))


if __name__ == "__main__":
    run_main(main)
