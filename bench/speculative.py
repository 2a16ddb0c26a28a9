"""A separate draft model, as in the paper's section 4.6 and Table 6, beside `--verify`.

    python bench/speculative.py --model toy/mars --draft toy/draft

The draft proposes K tokens. One forward of the target checks them, and carries a group of masks
behind each number of them; of the group behind those that held, what passes tau is accepted at
once. That last part makes the composition lossy (the draft's part is exact). `--verify` needs no
draft: what the masks say is checked by the next forward, too, so that its text is that of AR. AR
is the same checkpoint at tau 1 here, of the target and of the draft.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from bench.pareto import ROOT, accuracy, encode, read_problems, tokens_per_forward
from bench.speed import machine, spread, wait
from decode import Answer, Decoder, Options
from model import Chat, Qwen2, UserError, load, place, run


class Speculation:
    """A draft and a target, one answer at a time, each with the cache of its own row."""

    def __init__(self, target: Qwen2, draft: Qwen2, taus: tuple[float, float], longest: int, args):
        self.options, self.K = Options(tau=taus[1], verify=True, max_new=args.max_new), args.k
        self.proposal = Options(tau=taus[0], max_new=args.k)
        longest += 2 * args.k**2  # more guesses than masks make a feed wider than the decoder knows
        self.target = Decoder(target, [], self.options, 1, longest)
        self.draft = Decoder(draft, [], self.proposal, 1, longest)

    def __call__(self, prompt: list[int]) -> Answer:
        answer = Answer(prompt, self.target.model, self.options)
        self.target.waiting.append(answer)
        while not answer.done:
            answer.guesses = self.propose(answer.ids, self.options.max_new - len(answer.tokens))
            self.target.step()
            if answer.guesses and not answer.done:  # of the masks: accepted, not only guessed
                answer.take(answer.guesses, [], 0)
                answer.positions.pop()
                answer.accepted[-2:] = [sum(answer.accepted[-2:])]
        return answer

    def propose(self, ids: list[int], room: int) -> list[int]:
        """The draft's next K tokens; of the text so far it computes only what is new."""
        proposal = Answer(ids, self.draft.model, replace(self.proposal, max_new=min(self.K, room)))
        self.draft.waiting.append(proposal)
        for _ in self.draft:
            pass
        return proposal.tokens


class Alone:
    """The target by itself."""

    def __init__(self, target: Qwen2, tau: float, verify: bool, longest: int, args):
        self.options = Options(tau=tau, verify=verify, max_new=args.max_new)
        self.target = Decoder(target, [], self.options, 1, longest)

    def __call__(self, prompt: list[int]) -> Answer:
        self.target.waiting.append(answer := Answer(prompt, self.target.model, self.options))
        for _ in self.target:
            pass
        return answer


def timed(decode, prompts: list, device: torch.device) -> tuple[list[Answer], float]:
    wait(device)
    began = time.perf_counter()
    answers = [decode(prompt) for prompt in prompts]
    wait(device)
    return answers, time.perf_counter() - began


def measure(decoders: dict, prompts: list, rounds: int, device: torch.device) -> tuple[dict, dict]:
    """Answers of every decoder, and its seconds per token in each round; all run in turn."""
    seconds, answers = {name: [] for name in decoders}, {}
    for decode in decoders.values():
        decode(prompts[0])  # start-up, untimed
    for _ in range(rounds):
        for name, decode in decoders.items():
            answers[name], taken = timed(decode, prompts, device)
            seconds[name].append(taken / sum(len(answer.tokens) for answer in answers[name]))
    return answers, seconds


def table(answers: dict, seconds: dict, chat: Chat, problems: list[dict]) -> None:
    figures = "tokens/target forward | x AR (range)        | x AR + AR (range)   | accuracy"
    print(f"|                   | {figures} | text of AR |")
    print("|:--|--:|--:|--:|--:|--:|")
    for name, given in answers.items():
        ratios = []
        for base in ("AR", "AR draft + AR"):
            ratios.append(spread([a / b for a, b in zip(seconds[base], seconds[name])]))
        same = sum(a.tokens == b.tokens for a, b in zip(given, answers["AR"])) / len(given)
        print(
            f"| {name:17} | {tokens_per_forward(given):21.2f} | {ratios[0]:19} "
            f"| {ratios[1]:19} | {accuracy(chat, given, problems):8.1%} | {same:10.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speculative decoding with a draft model, beside --verify.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="the target: directory or hub id")
    add("--draft", default=str(ROOT / "toy/draft"), help="the same, of a smaller model")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--k", type=int, default=4, help="tokens that the draft proposes")
    add("--tau", type=float, default=0.95, help="of the MARS models")
    add("--limit", type=int, default=100, help="only the first so many problems")
    add("--rounds", type=int, default=5, help="of which the median is printed")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    for name in ("k", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    problems, where = read_problems(args.data, args.limit), place(args.device, args.dtype)
    (target, chat), (draft, other) = load(args.model, *where), load(args.draft, *where)
    if chat.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise UserError(f"{args.draft}: its tokenizer is not that of {args.model}")
    prompts, tau = encode(chat, problems), args.tau
    longest = max(map(len, prompts)) + args.max_new
    decoders = {
        "AR": Alone(target, 1.0, False, longest, args),
        "AR draft + AR": Speculation(target, draft, (1.0, 1.0), longest, args),
        "AR draft + MARS": Speculation(target, draft, (1.0, tau), longest, args),
        "MARS draft + MARS": Speculation(target, draft, (tau, tau), longest, args),
        "MARS": Alone(target, tau, False, longest, args),
        "MARS --verify": Alone(target, 0.0, True, longest, args),
    }
    sizes = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (target, draft)]
    print(f"{args.model} ({sizes[0]:.2f} M), draft {args.draft} ({sizes[1]:.2f} M), K = {args.k},")
    print(f"tau {tau:g}, {len(prompts)} problems, medians of {args.rounds}; {machine(target)}\n")
    table(*measure(decoders, prompts, args.rounds, target.device), chat, problems)


if __name__ == "__main__":
    run(main)
