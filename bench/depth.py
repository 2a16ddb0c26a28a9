"""Tokens per forward by depth: how far into a long answer, and after how long a prompt.

    python -m bench.depth --model smollm2/model --dtype bfloat16 --verify

A prompt has solved problems of --data, up to so many tokens, and asks for more of them. Each cell
of the table has tokens per forward in that part of the answers and, in brackets, the share of its
6-grams of tokens that occurred before in the answer: a model that repeats itself is easy to guess.
Answers that end earlier are in the parts that they reach.
"""

from bench import common
from bench.quality import decode
from decode import Sequence
from model import load
from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.data import six_grams
from plumbing.errors import UserError, run_main

PART = 250  # tokens of an answer
REQUEST = "\n\nGo on: write more such problems, each with its solution."


def make_prompt(chat: Chat, problems: list[dict], num_tokens: int) -> list[int]:
    asked = [row["messages"][-1]["content"] for row in problems]
    solved = "\n\n".join(f"{text}\n{row.get('answer', '')}" for text, row in zip(asked, problems))
    tokens = chat.encode(solved)
    if len(tokens) < num_tokens:
        raise UserError(f"--prompt {num_tokens}: all problems together have {len(tokens)} tokens")
    text = chat.decode(tokens[:num_tokens]) + REQUEST
    return chat.encode(chat.prompt([{"role": "user", "content": text}]))


def part_of(answers: list[Sequence], start: int) -> str:
    """Of a part that begins with the token `start`: tokens per forward, and repeated 6-grams.

    A forward belongs to the part of its first token.
    """
    accepted = []
    num_grams = num_repeated = 0
    for answer in answers:
        place = 0
        for count in answer.accepted:
            if place in range(start, start + PART):
                accepted.append(count)
            place += count
        grams = six_grams(answer.tokens)
        before = set(grams[:start])
        part = grams[start : start + PART]
        num_grams += len(part)
        num_repeated += len(part) - len(set(part) - before)
    if not accepted:
        return ""
    return f"{sum(accepted) / len(accepted):.2f} ({num_repeated / max(1, num_grams):.0%})"


def main() -> None:
    parser = Parser("Tokens per forward by depth.")
    common.add_problems(parser)
    common.add_taus(parser, [0.95])
    add = parser.add_argument
    add("--prompt", type=number(int, 1), nargs="+", default=[100, 1000, 4000], help="its tokens")
    add("--answers", type=number(int, 1), default=4, help="how many after each length of prompt")
    parser.set_defaults(data=common.ROOT / "bench/data/gsm8k/test.jsonl", max_new=1000)
    args = parser.parse_args()
    ways = common.ways_to_decode(args, [0.95])
    problems = common.read_problems(args.data, args.limit)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = {}
    for length in args.prompt:
        starts = [len(problems) * i // args.answers for i in range(args.answers)]
        turned = [problems[i:] + problems[:i] for i in starts]  # other problems for each answer
        prompts[length] = [make_prompt(chat, some, length) for some in turned]
        longest = max(map(len, prompts[length])) + args.max_new
        if longest > model.config.max_position_embeddings:
            raise UserError(f"--prompt {length}: with its answer too long for {args.model}")
    parts = range(0, args.max_new, PART)
    rows = []
    for length in args.prompt:
        for label, options in ways.items():
            answers = decode(model, prompts[length], 1, options, label)
            rows.append([f"{length} tokens, {label}", *(part_of(answers, i) for i in parts)])
    print(f"{args.model}, {args.answers} answers, {common.machine(model)}\n")
    head = [f"{start + 1} to {min(start + PART, args.max_new)}" for start in parts]
    print(common.table(["prompt", *head], rows))


if __name__ == "__main__":
    run_main(main)
