"""Print 350 questions to train a Qwen2.5-Coder on, as JSONL.

    python qwen2.5/questions.py GSM8K/train.jsonl IFEVAL/input_data.jsonl > questions.jsonl

140 are of GSM8K (with the request to be brief), 80 plain ones, and 30 of IFEval's prompts that are
not in bench/data. 100 are on code: the signature and the docstring of a function in the standard
library of the Python that runs this. (Python 3.11 has 1,221.)
"""

import argparse
import ast
import json
import random
import sysconfig
import warnings
from pathlib import Path

SIZES = range(60, 800)  # characters: less says too little, more is a manual
BRIEF = "Solve the problem in two or three sentences. End with the answer as a number."
BENCH = Path(__file__).parent.parent / "bench/data"


def functions(source: str) -> list[str]:
    """Of every public function with a docstring at the top of a module."""
    result = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[:1]  # the docstring
            text = ast.unparse(node)
            if len(text) in SIZES and not node.name.startswith("_"):
                result.append(f"Write this Python function:\n\n```python\n{text}\n```")
    return result


def standard_library() -> list[str]:
    warnings.simplefilter("ignore")  # old sources have escapes such as "\d"
    found = []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            found += functions(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeError):  # examples of wrong code
            continue
    return list(dict.fromkeys(found))  # each once


def read(file: Path, field: str) -> list[str]:
    return [json.loads(line)[field] for line in file.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="350 questions to train a Qwen2.5-Coder on.")
    parser.add_argument("gsm8k", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("ifeval", type=Path, help="IFEval's input_data.jsonl")
    args = parser.parse_args()
    measured = read(BENCH / "ifeval/test.jsonl", "prompt")
    others = [prompt for prompt in read(args.ifeval, "prompt") if prompt not in measured]
    random.seed(1)
    numbers = random.sample(read(args.gsm8k, "question"), 140)
    plain = random.sample(read(BENCH / "plain/train.jsonl", "prompt"), 80)
    plain += random.sample(standard_library(), 100) + random.sample(others, 30)
    system = {"role": "system", "content": BRIEF}
    asked = [[system, {"role": "user", "content": text}] for text in numbers]
    asked += [[{"role": "user", "content": text}] for text in plain]
    random.shuffle(asked)
    for messages in asked:
        print(json.dumps({"messages": messages}))


if __name__ == "__main__":
    main()
