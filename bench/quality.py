"""Accuracy and tokens per forward over tau, and how many answers are those of AR (tau 1).

    python -m bench.quality --tau .95 .9 .8 .7 .6 .5         # toy/README.md's table over tau
    python -m bench.quality                                  # is lossless decoding lossless?
    python -m bench.quality --temperature 1                  # and are its samples those of AR?
    python -m bench.quality --data bench/data/gsm8k/test.jsonl --max-new 128

An answer is right if its last number is the problem's. (Prompts without answers will do, too.) The
next column says how many points more accurate a way is than AR or, with --against, than AR of
another model, with its interval of 95 %. "tokens/forward" is all tokens over all forwards.

If all rows have a `response`, a line says how well the model predicts these: in nats, the mean of
-log p of a token; with --against, how much worse than the other model (the drift).
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench import common
from decode import generate
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.chat import Chat
from plumbing.data import Example, make_example
from plumbing.errors import UserError, naming, run_main

# ------------------------------------------------------------------------ the columns of the table


def make_table(chat: Chat, problems: list[dict], answers: dict, rival: str) -> str:
    """answers: the sequences of each way, AR's first; rival: the way to compare accuracies with."""
    right = {}
    head = []
    if "answer" in problems[0]:
        right = {label: common.are_right(chat, each, problems) for label, each in answers.items()}
        head = ["accuracy", f"points more than {rival}"]
    rows = []
    for label, each in answers.items():
        cells = [label]
        if right:
            gains = 100 * (np.array(right[label], dtype=float) - right[rival])
            cells.append(f"{np.mean(right[label]):.1%}")
            cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(*common.mean_and_interval(gains)))
        cells.append(f"{common.tokens_per_forward(each):.2f}")
        num_same = sum(mine.tokens == plain.tokens for mine, plain in zip(each, answers["AR"]))
        cells.append(f"{num_same} of {len(each)}")
        rows.append(cells)
    head += ["tokens/forward", "same as AR"]
    return common.table(["", *head], rows)


# ------------------------------------------------------------------- responses that are in the data


@torch.inference_mode()
def predict(model: Qwen2, text: list[int], prompt_length: int) -> tuple[Tensor, Tensor]:
    """-log p of each token after the prompt, one token ahead; and is it greedy's choice? Both (N,).

    prompt_length: at least 1.
    """
    ids = torch.tensor([text], device=model.device)
    positions = torch.arange(len(text) - 1, device=model.device)[None]
    hidden = model(ids[:, :-1], positions, None)
    logits = model.logits(hidden[0, prompt_length - 1 :])
    target = ids[0, prompt_length:]
    return cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target


def given_responses(model: Qwen2, chat: Chat, problems: list[dict]) -> list[Example]:
    """The problems with their `response`, as training has them; none if a row has no response."""
    if not all(isinstance(problem.get("response"), str) for problem in problems):
        return []
    ends = model.config.eos_token_id
    positions = model.config.max_position_embeddings
    examples = []
    for line, problem in enumerate(problems, 1):
        with naming(f"--data: row {line}"):
            examples.append(make_example(problem, chat, ends, positions))
    return examples


def prediction(model: Qwen2, examples: list[Example], other: Qwen2 | None) -> str:
    """How well the model predicts given responses, and how much worse than another."""
    pairs = [predict(model, each.tokens, each.prompt_length) for each in examples]
    nats = [of_tokens for of_tokens, _ in pairs]
    is_best = torch.cat([of_tokens for _, of_tokens in pairs]).double().mean().item()
    text = f"{torch.cat(nats).mean():.3f} nats/token; "
    text += f"greedy would have chosen {is_best:.1%} of their tokens"
    if other is None:
        return text
    others = [predict(other, each.tokens, each.prompt_length)[0] for each in examples]
    gained = np.array([(n.sum() - o.sum()).item() for n, o in zip(nats, others)])
    num_tokens = sum(map(len, nats))
    more, low, high = common.mean_and_interval(gained * len(nats) / num_tokens)
    return f"{text}; {more:+.3f} nats/token (95 %: {low:+.3f} to {high:+.3f})"


# ----------------------------------------------------------------------------------------- the run


def main() -> None:
    parser = Parser("Accuracy and tokens per forward over tau.")
    common.add_problems(parser)
    common.add_decoding(parser, rows=32)
    parser.add_argument("--against", metavar="MODEL", help="another model to compare with")
    args = parser.parse_args()
    ways = common.ways_to_decode(args)
    one_token = {"tau": 1.0, "metric": "probability", "block_cache": None, "guard": False}
    plain = replace(next(iter(ways.values())), **one_token)
    problems = common.read_problems(args.data, args.limit)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = common.encode(chat, problems)
    given = given_responses(model, chat, problems)
    other = None
    if args.against:
        other, other_chat = load(args.against, model.device, model.dtype)
        if other_chat.tokenizer.get_vocab() != chat.tokenizer.get_vocab():
            raise UserError(f"--against {args.against}: has another tokenizer than --model")

    ways = {"AR": plain} | {label: way for label, way in ways.items() if way != plain}
    answers = {}
    for label, options in tqdm(ways.items(), leave=False, disable=None):  # a bar in a terminal
        answers[label] = generate(model, prompts, args.rows, **vars(options))
    if other:
        answers[args.against] = generate(other, prompts, args.rows, **vars(plain))

    print(f"{args.model}, {args.data}: {len(problems)} problems\n")
    print(make_table(chat, problems, answers, rival=args.against or "AR"))
    if given:
        print(f"\nThe responses in --data: {prediction(model, given, other)}.")


if __name__ == "__main__":
    run_main(main)
