"""Tokens per forward by depth: how far into a long answer, and after how long a prompt.

    python -m bench.depth --model smollm2/model --dtype bfloat16 --verify

The prompt is the beginning of the problems in --data, solved, up to so many tokens, and asks for
more of them. Each cell of the table has tokens per forward in that part of the answers and, in
brackets, the share of its 6-grams of tokens that occurred before in the answer: a model that
repeats itself is easy to guess. Answers that end earlier are in the parts that they reach.
"""

from bench import common
from bench.quality import GRAM, decode
from decode import Sequence
from model import load
from plumbing.arguments import Parser, find_device, number
from plumbing.chat import Chat
from plumbing.errors import run_main

PART = 250  # tokens of an answer
REQUEST = "\n\nGo on: write more such problems, each with its solution."


def make_prompt(chat: Chat, problems: list[dict], num_tokens: int) -> list[int]:
    solved = "\n\n".join(f"{row['prompt']}\n{row.get('answer', '')}" for row in problems)
    text = chat.decode(chat.encode(solved)[:num_tokens]) + REQUEST
    return chat.encode(chat.prompt([{"role": "user", "content": text}]))


def part_of(answers: list[Sequence], first: int) -> str:
    """Of the forwards whose first token is in the part: tokens per forward, repeated 6-grams."""
    num_tokens = num_forwards = num_grams = num_repeated = 0
    for answer in answers:
        place = 0
        for count in answer.accepted:
            if place in range(first, first + PART):
                num_tokens += count
                num_forwards += 1
            place += count
        grams = [tuple(answer.tokens[i : i + GRAM]) for i in range(len(answer.tokens) - GRAM + 1)]
        seen = set(grams[:first])
        for gram in grams[first : first + PART]:
            num_grams += 1
            num_repeated += gram in seen
            seen.add(gram)
    if not num_grams:
        return ""
    return f"{num_tokens / num_forwards:.2f} ({num_repeated / num_grams:.0%})"


def main() -> None:
    parser = Parser("Tokens per forward by depth.")
    common.add_problems(parser, limit=4)
    common.add_taus(parser, [0.95])
    lengths = [100, 1000, 4000]
    help = "how long the prompts are"
    parser.add_argument("--prompt", type=number(int, 1), nargs="+", default=lengths, help=help)
    parser.set_defaults(data=common.ROOT / "bench/data/gsm8k/test.jsonl", max_new=1000)
    args = parser.parse_args()
    ways = common.ways_to_decode(args, [0.95])
    problems = common.read_problems(args.data)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    parts = range(0, args.max_new, PART)
    rows = []
    for length in args.prompt:
        first = range(0, len(problems), len(problems) // args.limit)  # other problems for each
        prompts = [make_prompt(chat, problems[i:], length) for i in first[: args.limit]]
        for label, options in ways.items():
            answers = decode(model, prompts, 1, options, label)
            cells = [part_of(answers, start) for start in parts]
            rows.append([f"{length} tokens, {label}", *cells])
    print(f"{args.model}, {args.limit} answers, {common.machine(model)}\n")
    head = [f"{start + 1} to {start + PART}" for start in parts]
    print(common.table(["prompt", *head], rows))


if __name__ == "__main__":
    run_main(main)
