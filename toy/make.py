"""The laptop-scale world: word problems with worked answers, their tokenizer and model config.

    python toy/make.py                                          # all that is committed here
    python toy/make.py --rows 96000 --out toy/train-96k.jsonl   # what toy/mars learnt from

A problem has one or two operations out of +, - and *. Every kind of sentence has several phrasings,
drawn with unequal odds: the words of an answer are partly predictable and partly not, which is what
threshold decoding is about. Everything follows from fixed seeds; no training problem is a test one.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
TEST_ROWS, TRAIN_ROWS = 500, 4000
VOCABULARY = 1024  # at most; the text yields fewer

GIRLS = "Ada Mia Zoe Lena Nora Ruth Iris Emma Lily Anna Rosa Vera".split()
BOYS = "Tom Ben Max Leo Paul Omar Hugo Ivan Noah Finn Karl Yuri".split()
THINGS = "apples pens books coins cards shells stamps eggs beads nuts keys cups".split()
THINGS += "plums roses balls bricks candles buttons lemons kites stones".split()
THINGS += "badges melons ribbons".split()
BOXES = "boxes bags baskets packs jars trays".split()

# {n} name, {they} She or He, {t} things, {c} boxes, {a} {b} numbers, {r} the result of the step.
# The odds of the three phrasings are 6 : 3 : 1.
START = [
    "{n} has {a} {t}.",
    "There are {a} {t} on the table of {n}.",
    "{n} owns {a} {t}.",
]
START_SAID = [
    "{n} starts with {a} {t}.",
    "At first there are {a} {t}.",
    "The story begins with {a} {t}.",
]
PACKED = [
    "{n} has {a} {c} with {b} {t} in each.",
    "{n} owns {a} {c}. Each of them holds {b} {t}.",
    "There are {a} {c} at home and {n} counts {b} {t} in each.",
]
PACKED_SAID = [
    "The {a} {c} hold {a} * {b} = {r} {t}.",
    "Since each of the {c} holds {b} {t}, that makes {a} * {b} = {r} {t}.",
    "In all {c} together there are {a} * {b} = {r} {t}.",
]
GAIN = [
    "{they} buys {b} more {t}.",
    "{they} finds {b} {t} in the garden.",
    "A friend brings {b} more {t}.",
]
GAIN_SAID = [
    "After that {n} has {a} + {b} = {r} {t}.",
    "With the {b} new {t} there are {a} + {b} = {r} {t}.",
    "We add them and get {a} + {b} = {r} {t}.",
]
LOSE = [
    "{they} gives away {b} {t}.",
    "{they} loses {b} of the {t} on the way.",
    "A neighbour borrows {b} {t}.",
]
LOSE_SAID = [
    "Then {n} has {a} - {b} = {r} {t} left.",
    "Without these {b} {t} there are {a} - {b} = {r} {t} left.",
    "We take them away and get {a} - {b} = {r} {t}.",
]
GAIN_PACKED = [
    "{they} buys {a} {c} with {b} {t} in each.",
    "A friend brings {a} {c}. Each of them holds {b} {t}.",
    "{they} gets {a} {c} with {b} {t} in each as a present.",
]
ASK = [
    "How many {t} does {n} have now?",
    "How many {t} are there in the end?",
    "What is the number of {t} that {n} has now?",
]
END_SAID = [
    "So {n} has {r} {t} now. The answer is {r}.",
    "In the end there are {r} {t}. The answer is {r}.",
    "That is {r} {t} in total. The answer is {r}.",
]


def problem(rng: random.Random) -> dict:
    """One row: `prompt` (the question), `response` (the steps), `answer` (the number)."""
    girl = rng.random() < 0.5
    words = {
        "n": rng.choice(GIRLS if girl else BOYS),
        "they": "She" if girl else "He",
        "t": rng.choice(THINGS),
        "c": rng.choice(BOXES),
    }
    asked, said = [], []

    def step(question: list[str], answer: list[str], **numbers: int) -> None:
        for phrasings, sentences in ((question, asked), (answer, said)):
            if phrasings:
                [phrasing] = rng.choices(phrasings, weights=(6, 3, 1))
                sentences.append(phrasing.format(**words, **numbers))

    def packed(question: list[str]) -> int:
        a, b = rng.randint(2, 9), rng.randint(2, 12)
        step(question, PACKED_SAID, a=a, b=b, r=a * b)
        return a * b

    def change(total: int) -> int:
        if total < 2 or rng.random() < 0.5:
            b = rng.randint(2, 60)
            step(GAIN, GAIN_SAID, a=total, b=b, r=total + b)
            return total + b
        b = rng.randint(1, total - 1)
        step(LOSE, LOSE_SAID, a=total, b=b, r=total - b)
        return total - b

    if rng.random() < 0.4:  # a product, and perhaps a sum or a difference
        total, changes = packed(PACKED), rng.randint(0, 1)
    else:
        total, changes = rng.randint(5, 90), rng.randint(1, 2)
        step(START, START_SAID, a=total)
        if changes == 2 and rng.random() < 0.5:  # a product and a sum
            before, gained, changes = total, packed(GAIN_PACKED), 0
            total = before + gained
            step([], GAIN_SAID, a=before, b=gained, r=total)
    for _ in range(changes):
        total = change(total)
    step(ASK, END_SAID, r=total)
    return {"prompt": " ".join(asked), "response": " ".join(said), "answer": str(total)}


def problems(seed: int, avoid: set[str]) -> Iterator[dict]:
    """Rows without end; none has a prompt out of `avoid`, and none comes twice."""
    rng, seen = random.Random(seed), set(avoid)
    while True:
        row = problem(rng)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


def write(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def train_tokenizer(rows: list[dict]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, whose pattern keeps every digit a token of its own."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    pattern += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row[key] for row in rows for key in ("prompt", "response")]
    tokenizer.train_from_iterator([*texts, "user assistant system\n"], trainer)
    return tokenizer


def write_base(tokenizer: Tokenizer) -> None:
    """toy/base: all of a checkpoint but its weights; `train.py --from-scratch` adds these."""
    base = HERE / "base"
    base.mkdir(exist_ok=True)
    end = tokenizer.token_to_id("<|im_end|>")
    config = {
        "model_type": "qwen2",
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,  # padded, as most checkpoints are
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 5,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": [end, tokenizer.token_to_id("<|endoftext|>")],
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (base / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (base / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer.save(str(base / "tokenizer.json"))
    print(f"{base}: {tokenizer.get_vocab_size()} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, help="write only a training file, of this many rows")
    parser.add_argument("--out", type=Path, default=HERE / "train.jsonl", help="its name")
    args = parser.parse_args()
    if args.rows is not None and (args.rows < 1 or args.out == parser.get_default("out")):
        parser.error("--rows needs a number above 0 and another --out than the committed file")

    generator = problems(1, set())
    test = [next(generator) for _ in range(TEST_ROWS)]
    generator = problems(2, {row["prompt"] for row in test})
    train = [next(generator) for _ in range(args.rows or TRAIN_ROWS)]
    write(args.out, train)
    if not args.rows:
        write(HERE / "test.jsonl", test)
        write_base(train_tokenizer(train))


if __name__ == "__main__":
    main()
