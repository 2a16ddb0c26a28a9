"""The laptop-scale world: word problems with worked answers, and their tokenizer.

    python toy/make.py                           # train.jsonl, test.jsonl, base/tokenizer.json
    python toy/make.py --rows 96000 --out toy/train-96k.jsonl   # what toy/mars learnt from

A problem has one or two operations out of +, - and *. Every kind of sentence has several phrasings,
drawn with unequal odds: the words of an answer are partly predictable and partly not, which is what
threshold decoding is about. Everything follows from fixed seeds; no training problem is a test one.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
TEST_ROWS = 500
TRAIN_ROWS = 4000
VOCABULARY = 1024  # at most; the text yields fewer

# Words, and for each kind of sentence three phrasings (odds 6 : 3 : 1). {n} is a name, {they} is
# She or He, {t} are things, {c} boxes, {a} and {b} numbers, {r} is the result of the step.
PHRASES = json.loads((HERE / "phrases.json").read_text(encoding="utf-8"))
GIRLS, BOYS, THINGS, BOXES = (PHRASES[w].split() for w in ("girls", "boys", "things", "boxes"))


class Story:
    """Somebody has some things; sentence by sentence it is asked and answered how many."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        if rng.random() < 0.5:
            self.words = {"n": rng.choice(GIRLS), "they": "She"}
        else:
            self.words = {"n": rng.choice(BOYS), "they": "He"}
        self.words["t"] = rng.choice(THINGS)
        self.words["c"] = rng.choice(BOXES)
        self.asked = []
        self.said = []

    def step(self, question: str, answer: str, **numbers: int) -> None:
        """One more sentence of the question and one of the answer; the kinds of both, "": none."""
        for kind, sentences in ((question, self.asked), (answer, self.said)):
            if kind:
                [phrasing] = self.rng.choices(PHRASES[kind], weights=(6, 3, 1))
                sentences.append(phrasing.format(**self.words, **numbers))

    def product(self, question: str) -> int:
        """Boxes of so many things each; how many things those are."""
        a = self.rng.randint(2, 9)
        b = self.rng.randint(2, 12)
        self.step(question, "packed_said", a=a, b=b, r=a * b)
        return a * b

    def change(self, difference: int, is_asked: bool = True) -> None:
        """So many things more, or less; is_asked: the question does not say so yet."""
        question, answer = ("gain", "gain_said") if difference > 0 else ("lose", "lose_said")
        result = self.total + difference
        self.step(question if is_asked else "", answer, a=self.total, b=abs(difference), r=result)
        self.total = result

    def row(self) -> dict:
        """`prompt` (the question), `response` (the steps), `answer` (the number)."""
        self.step("ask", "end_said", r=self.total)
        prompt = " ".join(self.asked)
        return {"prompt": prompt, "response": " ".join(self.said), "answer": str(self.total)}


def problem(rng: random.Random) -> dict:
    """One or two operations."""
    story = Story(rng)
    if rng.random() < 0.4:  # a product, and perhaps a sum or a difference
        story.total = story.product("packed")
        changes = rng.randint(0, 1)
    else:
        story.total = rng.randint(5, 90)
        changes = rng.randint(1, 2)
        story.step("start", "start_said", a=story.total)
        if changes == 2 and rng.random() < 0.5:  # a product and a sum
            story.change(story.product("gain_packed"), is_asked=False)
            changes = 0
    for _ in range(changes):
        if story.total < 2 or rng.random() < 0.5:
            story.change(rng.randint(2, 60))
        else:
            story.change(-rng.randint(1, story.total - 1))
    return story.row()


def split(train_rows: int) -> tuple[list, list]:
    """Training and test rows; no prompt comes twice."""
    rows = {}  # by their prompts
    for seed, count in ((1, TEST_ROWS), (2, TEST_ROWS + train_rows)):
        rng = random.Random(seed)
        while len(rows) < count:
            row = problem(rng)
            rows.setdefault(row["prompt"], row)
    rows = list(rows.values())
    return rows[TEST_ROWS:], rows[:TEST_ROWS]


def write(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def train_tokenizer(rows: list[dict]) -> Tokenizer:
    """A byte-level BPE like Qwen2.5's, whose pattern keeps every digit a token of its own."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    pattern += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    split_words = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row[key] for row in rows for key in ("prompt", "response")]
    tokenizer.train_from_iterator([*texts, "user assistant system\n"], trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write only a training file, here")
    parser.add_argument("--rows", type=int, default=TRAIN_ROWS, help="how many it has")
    args = parser.parse_args()
    train, test = split(args.rows)
    if args.out:
        write(args.out, train)
        return
    write(HERE / "train.jsonl", train)
    write(HERE / "test.jsonl", test)
    train_tokenizer(train).save(str(HERE / "base/tokenizer.json"))


if __name__ == "__main__":
    main()
