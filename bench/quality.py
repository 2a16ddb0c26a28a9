"""Accuracy and tokens per forward over tau, and how many answers are those of tau 1.

    python -m bench.quality                                  # toy/README.md's table over tau
    python -m bench.quality --verify                         # is --verify lossless?
    python -m bench.quality --verify --temperature 1         # and are its samples those of tau 1?
    python -m bench.quality --data bench/data/gsm8k/test.jsonl --max-new 128

An answer is right if its last number is the problem's. Prompts without answers will do, too.
"tokens/forward" is of all tokens over all forwards, "median" that of the middle answer. An answer
repeats itself if at least 10 % of its 6-grams of tokens occurred before in it; such answers are
easy to guess, so "without" has both figures for the others.

Two columns say how many points more accurate a way is than tau 1 and, with --against, than another
model at tau 1. Intervals are bootstraps over the problems, 95 %: where no answer becomes right or
wrong, they have no width.

Nats are the mean of -log p of an answer's tokens, one token ahead, under the model itself: how
unlikely the model finds what it was made to say. (Greedy text at tau 1 is what it finds likely.) If
all rows have a `response`, as training data do, a line says how well the model predicts these, and,
with --against, how much worse than the other model.

Where an answer parts from that of tau 1 and the two best scores (logits, with the noise of the dice
at a temperature) are at most 1e-4 apart, it parted at a tie: the two tokens are as good as equal,
and a forward of another width rounds differently. With --verify in float32 there is no other
difference. If there is one, it is a bug, and the exit status is 1.
"""

import statistics
import sys
from dataclasses import replace
from os.path import commonprefix  # of any two lists

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench import common
from decode import Decoder, Options, Sequence
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.chat import Chat
from plumbing.data import Example, encode
from plumbing.errors import UserError, naming, run_main
from plumbing.sampling import dice

TIE = 1e-4
TAUS = [1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5]
NATS = [0, 0.05, 0.1, 0.2, 0.5, 1]  # taus of the metric entropy
COUNTS = ["same as tau 1", "parted at a tie", "different"]
COLUMNS = ["nats/token", "tokens/forward", "median", "repeat themselves", "without"]
COLUMNS += ["positions/forward", *COUNTS]


def decode(
    model: Qwen2, prompts: list[list[int]], rows: int, options: Options, label: str
) -> list[Sequence]:
    """`decode.generate` with a progress bar."""
    longest = max(map(len, prompts)) + options.max_new
    decoder = Decoder(model, options, min(rows, len(prompts)), longest)
    answers = [decoder.add(prompt) for prompt in prompts]
    with tqdm(total=len(answers), desc=label, leave=False, disable=None) as bar:  # in a terminal
        for answer, _ in decoder:
            bar.update(answer.done)
    return answers


def repeats_itself(tokens: list[int]) -> bool:
    return common.share_repeated(tokens) >= 0.1


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


def nats_per_token(model: Qwen2, answers: list[Sequence]) -> float:
    """The mean of -log p over all tokens of the answers."""
    nats = [predict(model, answer.text, answer.prompt_length)[0] for answer in answers]
    return torch.cat(nats).mean().item()


def given_responses(model: Qwen2, chat: Chat, problems: list[dict]) -> list[Example]:
    """The problems with their `response`, as training has them; none if a row has no response."""
    if not all(isinstance(problem.get("response"), str) for problem in problems):
        return []
    eos = model.config.eos_token_id[0]
    positions = model.config.max_position_embeddings
    examples = []
    for line, problem in enumerate(problems, 1):
        with naming(f"--data: row {line}"):
            examples.append(encode(problem, chat, eos, positions))
    return examples


def load_other(name: str, model: Qwen2, chat: Chat) -> Qwen2:
    """A model to compare with, which must read token ids as the first one does."""
    other, other_chat = load(name, model.device, model.dtype)
    if other_chat.tokenizer.get_vocab() != chat.tokenizer.get_vocab():
        raise UserError(f"--against {name}: has another tokenizer than --model")
    return other


def mean_and_interval(gains: list[float], weights: list[int]) -> tuple[float, float, float]:
    """All gains over all weights, and its 95 % interval."""
    pairs = torch.tensor([gains, weights], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(gains), (10_000, len(gains)), generator=generator)  # rows
    gain, weight = pairs[:, drawn].sum(-1)
    low, high = (gain / weight).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return sum(gains) / sum(weights), low, high


def accuracies(right: list[bool], rivals: list[list[bool]]) -> list[str]:
    """In percent the answers that are right, and how many points more than those of each rival."""
    cells = [f"{sum(right) / len(right):.1%}"]
    for others in rivals:
        gains = [int(mine) - int(other) for mine, other in zip(right, others)]
        more = [100 * share for share in mean_and_interval(gains, [1] * len(gains))]
        cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(*more))
    return cells


def prediction(model: Qwen2, examples: list[Example], other: Qwen2 | None) -> str:
    """How well the model predicts given responses, and how much worse than another."""
    nats, is_best = zip(*(predict(model, each.tokens, each.prompt_length) for each in examples))
    mean = torch.cat(nats).mean().item()
    share = torch.cat(is_best).double().mean().item()
    text = f"{mean:.3f} nats/token; greedy would have chosen {share:.1%} of their tokens"
    if other is None:
        return text
    others = [predict(other, each.tokens, each.prompt_length)[0] for each in examples]
    gained = [(n.sum() - o.sum()).item() for n, o in zip(nats, others)]
    more, low, high = mean_and_interval(gained, [len(n) for n in nats])
    return f"{text}; {more:+.3f} nats/token (95 %: {low:+.3f} to {high:+.3f})"


@torch.inference_mode()
def gap_between_best(model: Qwen2, answer: Sequence, num_tokens: int, options: Options) -> float:
    """The difference of the two best scores for what follows the first tokens of an answer's text.

    The scores are those of sampling.with_dice: logits, at a temperature T with T times the dice.
    """
    ids = torch.tensor([answer.text[:num_tokens]], device=model.device)
    positions = torch.arange(num_tokens, device=model.device)[None]
    scores = model.logits(model(ids, positions, None)[0, -1:])[0]
    noise = dice(options.seed, answer.index, num_tokens, len(scores), scores.device)
    scores = scores + options.temperature * noise
    best, second = scores.topk(2).values.tolist()
    return best - second


def gaps_at_parting(
    model: Qwen2, expected: list[Sequence], answers: list[Sequence], options: Options
) -> list[float]:
    """For each answer that is not the expected one: `gap_between_best` where the two part."""
    gaps = []
    for plain, answer in zip(expected, answers):
        if answer.tokens == plain.tokens:
            continue
        num_same = len(commonprefix([plain.text, answer.text]))
        gap = float("inf")  # one goes on where the other ends
        if num_same < min(len(plain.text), len(answer.text)):
            gap = gap_between_best(model, answer, num_same, options)
        gaps.append(gap)
    return gaps


def median_per_forward(answers: list[Sequence]) -> float:
    return statistics.median(len(answer.tokens) / answer.forwards for answer in answers)


def figures(model: Qwen2, answers: list[Sequence], gaps: list[float]) -> list[str]:
    """The cells of COLUMNS."""
    others = [answer for answer in answers if not repeats_itself(answer.tokens)]
    without = ""
    if others:
        without = f"{common.tokens_per_forward(others):.2f}, {median_per_forward(others):.2f}"
    num_ties = sum(gap <= TIE for gap in gaps)
    return [
        f"{nats_per_token(model, answers):.3f}",
        f"{common.tokens_per_forward(answers):.2f}",
        f"{median_per_forward(answers):.2f}",
        f"{1 - len(others) / len(answers):.1%}",
        without,
        f"{common.positions_per_forward(answers):.1f}",
        f"{len(answers) - len(gaps)}",
        f"{num_ties}",
        f"{len(gaps) - num_ties}",
    ]


def main() -> None:
    parser = Parser("Accuracy and tokens per forward over tau.")
    common.add_problems(parser)
    common.add_rows(parser, default=32)
    common.add_taus(parser, TAUS)
    parser.add_options(Options, without=("tau", "block", "verify", "max_new"))
    parser.add_argument("--against", metavar="MODEL", help="another model to compare with")
    args = parser.parse_args()
    ways = common.ways_to_decode(args, NATS if args.metric == "entropy" else TAUS)
    one_token = {"tau": 1.0, "verify": False, "metric": "probability", "block_cache": None}
    plain = replace(next(iter(ways.values())), **one_token)
    if args.verify:
        ways = {"tau 1": plain} | ways
    problems = common.read_problems(args.data, args.limit)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = common.encode(chat, problems)
    given = given_responses(model, chat, problems)
    has_answers = "answer" in problems[0]
    other = None
    if args.against:
        if not given and not has_answers:
            raise UserError("--against needs rows with an answer each, or a response each")
        other = load_other(args.against, model, chat)
    expected = decode(model, prompts, args.rows, plain, "tau 1")
    columns, rivals = list(COLUMNS), []
    if has_answers:
        columns = ["accuracy", "points more than tau 1", *COLUMNS]
        rivals = [common.are_right(chat, expected, problems)]
    if has_answers and other:
        columns.insert(2, f"points more than {args.against}")
        others = decode(other, prompts, args.rows, plain, args.against)
        rivals.append(common.are_right(chat, others, problems))
    rows, all_gaps = [], []
    for label, options in ways.items():
        answers = expected
        if options != plain:
            answers = decode(model, prompts, args.rows, options, label)
        gaps = gaps_at_parting(model, expected, answers, options)
        cells = figures(model, answers, gaps)
        if has_answers:
            cells = accuracies(common.are_right(chat, answers, problems), rivals) + cells
        rows.append([label, *cells])
        all_gaps += gaps
    if has_answers and other:
        cells = figures(other, others, [])[: -len(COUNTS)]
        rows.append([args.against, *accuracies(rivals[1], rivals), *cells, *[""] * len(COUNTS)])
    print(f"{args.model}, {args.data}: {len(problems)} problems\n")
    print(common.table(["", *columns], rows))
    if given:
        print(f"\nThe responses in --data: {prediction(model, given, other)}.")
    if args.verify and all_gaps:
        worst = max(all_gaps)
        print(f"\nWhere answers parted, the two best scores were at most {worst:.2g} apart.")
        if worst > TIE and model.dtype != torch.bfloat16:
            sys.exit(1)


if __name__ == "__main__":
    run_main(main)
