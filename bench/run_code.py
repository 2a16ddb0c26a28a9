"""Does the code in an answer pass a problem's tests? For humaneval.yaml.

(The harness's own way needs the network: it downloads its metric.)
"""

import re
import subprocess
import sys
import tempfile

SECONDS = 3  # for one program, as in HumanEval's own harness


def programs(responses: list[list[str]], problems: list[dict]) -> list[str]:
    """A program for each answer: what the problem begins with, then the answer's code."""
    return [row["prompt"] + "\n" + code_of(text) for [text], row in zip(responses, problems)]


def code_of(text: str) -> str:
    """The first code block, which may lack its end; the whole text if there is none."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return block[1] if block else text


def passes(references: list[str], predictions: list[str]) -> bool:
    """Run a program with its tests, in a process and a folder of its own: does it end well?"""
    [tests], [program] = references, predictions
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", f"{program}\n{tests}"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
