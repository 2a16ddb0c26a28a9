"""Print questions to train a model on, as JSONL: what to write for functions of Python's library.

    python qwen2.5/questions.py > code.jsonl

Each is the signature and the docstring of a function in the standard library of the Python that
runs this. Python 3.11 has 1,221.
"""

import ast
import json
import sysconfig
import warnings
from pathlib import Path

SIZES = range(60, 800)  # characters: less says too little, more is a manual


def questions(source: str) -> list[str]:
    """Of every public function with a docstring at the top of a module."""
    result = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[:1]  # the docstring
            text = ast.unparse(node)
            if len(text) in SIZES and not node.name.startswith("_"):
                result.append(f"Write this Python function:\n\n```python\n{text}\n```")
    return result


def main() -> None:
    warnings.simplefilter("ignore")  # old sources have escapes such as "\d"
    found = []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            found += questions(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeError):  # examples of wrong code
            continue
    for question in dict.fromkeys(found):  # each once
        print(json.dumps({"prompt": question}))


if __name__ == "__main__":
    main()
