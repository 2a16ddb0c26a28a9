"""bench/lm_harness.py: lm-eval gets what decode.py says, up to the first stop string."""

import pytest
from commands import command, is_refused, tables_of
from common import ROOT, rows_of

pytest.importorskip("lm_eval", reason="pip install -r bench/requirements.txt")

from bench import lm_harness
from bench.lm_harness import Mars, stop_at
from decode import Options, generate


@pytest.fixture
def lm():
    return Mars(str(ROOT / "toy/mars"), Options(tau=0.6, max_new=40), rows=3, device="cpu")


class Request:
    def __init__(self, context: str, **settings):
        self.args = (context, settings)


def test_bundled_tasks_end_to_end(monkeypatch):
    """The harness's and our own: batched, and with decode.py's own texts."""
    said = []
    generate_until = Mars.generate_until

    def listen(lm, requests):
        texts = generate_until(lm, requests)
        said.extend((request.args[0], text) for request, text in zip(requests, texts))
        return texts

    monkeypatch.setattr(Mars, "generate_until", listen)
    words = ["--tasks", "gsm8k", "ifeval_bundled", "toy", "--limit", 3, "--max-new", 24]
    words += ["--tau", 0.6, "--rows", 4, "--device", "cpu"]
    [table] = tables_of("bench.lm_harness", *words)
    [_, _, toy] = table["tau 0.6"]
    assert float(toy.split(",")[1]) > 2, "the toy model's own problems: several a forward"
    lm = Mars(str(ROOT / "toy/mars"), Options(), device="cpu")
    assert len(said) == 9
    for prompt, text in said:
        [answer] = generate(lm.model, [lm.chat.encode(prompt)], tau=0.6, max_new=24)
        assert lm.chat.decode(answer.tokens).startswith(text)
    row = rows_of(ROOT / "toy/test.jsonl")[2]
    assert said[-1][0] == lm.chat.prompt([{"role": "user", "content": row["prompt"]}])


def test_bundled_humaneval_runs_the_code(monkeypatch):
    """Of four problems two get their solution, one a wrong value, one a program without an end."""
    problems = rows_of(ROOT / "bench/data/human_eval/test.jsonl")
    right = [row["prompt"] + row["canonical_solution"] for row in problems[:3]]
    answers = [f"Sure:\n\n```python\n{right[0]}\n```\nIt works.", f"```\n{right[1]}"]
    wrong = f"def {problems[2]['entry_point']}(x): return 7"
    answers += [f"```python\n{right[2]}\n{wrong}"]
    answers += ["```python\nwhile True: pass\n```"]
    monkeypatch.setattr(Mars, "generate_until", lambda lm, requests: answers)
    words = ("--tasks", "humaneval_bundled", "--run-code", "--limit", 4, "--device", "cpu")
    [table] = tables_of("bench.lm_harness", *words)
    assert table["lossless"][0].startswith("50.0%")


def test_stop_strings_cut_text_and_tokens_alike(lm):
    question = "Mia has 5 bags with 12 plums in each. How many plums are there in the end?"
    context = lm.apply_chat_template([{"role": "user", "content": question}])
    [whole] = lm.generate_until([Request(context, until=[])])
    everything = lm.counts.copy()
    assert whole.startswith("The 5 bags hold 5 * 12 = 60 plums.")
    for until, expected in ((["= "], "The 5 bags hold 5 * 12 "), ([" hold", "5 b"], "The ")):
        lm.counts.clear()
        assert lm.generate_until([Request(context, until=until)] * 4) == [expected] * 4
        ids = lm.chat.encode(whole)
        through = next(n for n in range(99) if stop_at(lm.chat.decode(ids[:n]), until) is not None)
        assert lm.counts["tokens"] == 4 * through
        assert lm.counts["forwards"] < 4 * everything["forwards"]
    assert lm.generate_until([Request(context, until="60")]) == ["The 5 bags hold 5 * 12 = "]


def test_a_turn_that_the_task_begins(lm):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    text = lm.apply_chat_template(turns, add_generation_prompt=False)
    assert text == lm.chat.prompt(turns[:1]) + "It is"


@pytest.mark.parametrize("task", sorted(lm_harness.RUN_CODE))
def test_humaneval_must_be_allowed_to_run_code(task):
    assert is_refused(command("bench.lm_harness", "--tasks", task), "allow it with --run-code")
