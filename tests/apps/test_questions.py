"""qwen2.5: the questions that it is trained on, and the script that makes its patch."""

import ast
import importlib.util
import json
import random

import pytest
from common import ROOT

SOURCE = '''
def area(width: float, height=1.0):
    """Return the area of a rectangle, in the unit of its sides, squared."""
    return width * height

class Box:
    def bare(self, width):
        return width == 0
'''


@pytest.fixture(scope="module")
def questions():
    spec = importlib.util.spec_from_file_location("questions", ROOT / "qwen2.5/questions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_asked_about_a_function(questions):
    """To complete: the signature and the docstring, never the code. Else: code that parses."""
    area, bare = questions.functions(SOURCE)
    assert ast.parse(bare).body[0].name == "bare", "a method, no longer indented"
    random.seed(0)
    for function in (area, bare):
        asked = {questions.on_code(function) for _ in range(60)}
        begin = [text for text in asked if text.startswith(tuple(questions.TASKS["complete"]))]
        assert all("def area(width: float" in text for text in begin)
        assert not any("return width" in text for text in begin)
        assert bool(begin) == (function == area), "without a docstring there is nothing to go by"
        assert all("return width" in text for text in asked.difference(begin))


def test_a_mistake_changes_one_place(questions):
    random.seed(0)
    assert questions.with_mistake("return a == 1") == "return a != 1"
    text = "x = a < b and b < c"
    wrong = {questions.with_mistake(text) for _ in range(60)}
    assert wrong == {"x = a > b and b < c", "x = a < b and b > c", "x = a < b or b < c"}
    assert questions.with_mistake("pass") == "pass"


def test_half_of_the_questions_are_on_code(questions, monkeypatch, capsys, tmp_path):
    gsm8k, ifeval = tmp_path / "train.jsonl", tmp_path / "input_data.jsonl"
    gsm8k.write_text("".join(json.dumps({"question": f"{i} plums?"}) + "\n" for i in range(99)))
    measured = questions.read(ROOT / "bench/data/ifeval/test.jsonl", "prompt")
    rows = [{"prompt": text} for text in [*measured, *(f"Write {i}." for i in range(9))]]
    ifeval.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.argv", ["questions.py", str(gsm8k), str(ifeval), "--count", "96"])
    questions.main()
    asked = [json.loads(line)["messages"] for line in capsys.readouterr().out.splitlines()]
    texts = [messages[-1]["content"] for messages in asked]
    assert len(set(texts)) == 96 and set(texts).isdisjoint(measured)
    assert sum("plums?" in text for text in texts) == 24
    assert sum(text.startswith("Write ") and text.endswith(".") for text in texts) >= 8
    assert sum("```python\n" in text for text in texts) >= 48
