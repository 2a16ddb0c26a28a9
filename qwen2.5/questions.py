"""Print questions to train a Qwen2.5-Coder on, as JSONL: more than half of them on code.

    python qwen2.5/questions.py GSM8K/train.jsonl IFEVAL/input_data.jsonl --count 6000

A quarter is of GSM8K, with the request to be brief. At most an eighth are plain questions, and at
most a twelfth prompts of IFEval that are not in bench/data. The others ask to complete, change,
explain, test or fix a function of the standard library of the Python that runs this.
"""

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
import warnings
from pathlib import Path

BRIEF = "Solve the problem in two or three sentences. End with the answer as a number."
BENCH = Path(__file__).parent.parent / "bench/data"
TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text(encoding="utf-8"))
SHARES = [6, 2, 1, 1, 2]  # of the tasks; half of the functions have no docstring to complete
MISTAKES = [("==", "!="), ("<", ">"), (" + ", " - "), ("not ", ""), ("0", "1"), (" and ", " or ")]


def functions(source: str) -> list[str]:
    """The source of every function and method of a module."""
    lines = source.split("\n")
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [textwrap.dedent("\n".join(lines[f.lineno - 1 : f.end_lineno])) for f in found]


def standard_library() -> list[str]:
    warnings.simplefilter("ignore")  # old sources have escapes such as "\d"
    found = []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests"}.isdisjoint(path.parts):
            try:
                found += functions(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeError):  # examples of wrong code
                continue
    return [text for text in dict.fromkeys(found) if 150 <= len(text) < 900]  # each once


def without_body(function: str) -> str | None:
    """Its signature and docstring, if it has one."""
    try:
        [node] = ast.parse(function).body
    except SyntaxError:  # text in triple quotes that was indented less
        return None
    if not ast.get_docstring(node):
        return None
    node.body = node.body[:1]
    return ast.unparse(node)


def with_mistake(function: str) -> str:
    """One operator or number is another one, where there is any."""
    possible = [pair for pair in MISTAKES if pair[0] in function]
    if not possible:
        return function
    right, wrong = random.choice(possible)
    place = random.choice(list(re.finditer(re.escape(right), function)))
    return function[: place.start()] + wrong + function[place.end() :]


def on_code(function: str) -> str:
    """A question about a function."""
    beginning = without_body(function)
    shares = SHARES if beginning else [0, *SHARES[1:]]
    [task] = random.choices(list(TASKS), shares)
    if task == "complete":
        function = beginning
    elif task == "fix":
        function = with_mistake(function)
    return f"{random.choice(TASKS[task])}\n\n```python\n{function}\n```"


def some(questions: list[str], count: int) -> list[str]:
    return random.sample(questions, min(count, len(questions)))


def read(file: Path, field: str) -> list[str]:
    return [json.loads(line)[field] for line in file.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Questions to train a Qwen2.5-Coder on.")
    parser.add_argument("gsm8k", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("ifeval", type=Path, help="IFEval's input_data.jsonl")
    parser.add_argument("--count", type=int, default=6000, help="how many questions")
    args = parser.parse_args()
    random.seed(1)
    measured = read(BENCH / "ifeval/test.jsonl", "prompt")
    others = [prompt for prompt in read(args.ifeval, "prompt") if prompt not in measured]
    problems = some(read(args.gsm8k, "question"), args.count // 4)
    plain = some(read(BENCH / "plain/train.jsonl", "prompt"), args.count // 8)
    plain += some(others, args.count // 12)
    rest = args.count - len(problems) - len(plain)
    plain += [on_code(function) for function in some(standard_library(), rest)]
    system = {"role": "system", "content": BRIEF}
    asked = [[system, {"role": "user", "content": text}] for text in problems]
    asked += [[{"role": "user", "content": text}] for text in plain]
    random.shuffle(asked)
    for messages in asked:
        print(json.dumps({"messages": messages}))


if __name__ == "__main__":
    main()
