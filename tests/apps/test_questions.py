"""The questions that a Qwen2.5-Coder is trained on: signatures and docstrings, never the code."""

import importlib.util

from common import ROOT

SOURCE = '''
def area(width: float, height=1.0):
    """Return the area of a rectangle, in the unit of its sides, squared."""
    return width * height

def _hidden(width):
    """A docstring that is long enough, of a function that nobody else should call."""

def bare(width):
    return width
'''


def test_a_question_is_a_signature_and_a_docstring():
    path = ROOT / "qwen2.5/questions.py"
    spec = importlib.util.spec_from_file_location("questions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    [question] = module.functions(SOURCE)
    assert "def area(width: float, height=1.0):" in question and "squared" in question
    assert "return width" not in question
