"""The paper's Tables 5 and 6: the columns that do not depend on the machine, and bad input."""

import json
import random
import shutil

from commands import command, is_refused, number, tables
from common import ROOT, cases, random_prompt, tiny_model

from decode import generate
from experiments.paper.tables import WithDraft

TOY = ("--model", ROOT / "toy/mars", "--data", ROOT / "toy/test.jsonl")


def test_the_table_of_caches():
    options = ("--limit", 6, "--rows", 1, 4, "--rounds", 1, "--max-new", 24)
    status, out, _ = command("experiments.paper.tables", *TOY, "--table5", *options)
    found = tables(out)
    assert status == 0 and [len(table) for table in found] == [10, 10]
    for table in found:
        per_forward = {name: number(cells[2]) for name, cells in table.items()}
        assert number(table["AR"][1]) == per_forward["AR"] == 1
        cursor = per_forward["MARS, cursor"]
        assert cursor == per_forward["MARS, B_cache 256"] == per_forward["MARS, no cache"] > 2
        assert per_forward["MARS, B_cache 4"] < cursor
        assert number(table["MARS, no cache"][3]) > 40  # positions: the whole text


def test_the_table_of_drafts():
    options = ("--table6", ROOT / "toy/draft", "--limit", 3, "--rounds", 1)
    status, out, _ = command("experiments.paper.tables", *TOY, *options)
    [table] = tables(out)
    per_forward = {name: number(cells[3]) for name, cells in table.items()}
    assert status == 0 and per_forward["AR"] == 1
    assert per_forward["MARS draft + MARS"] > per_forward["AR draft + AR"] > 3
    assert per_forward["MARS, verify"] > per_forward["MARS"] > 2
    assert table["AR draft + AR"][-2:] == ["100.0%", "100.0%"] == table["MARS, verify"][-2:]


def draft_by_hand(target, draft, prompt, tau, max_new) -> list[int]:
    """A checked draft, and the masks after it that pass tau: no cache, one group of masks."""
    new = []
    while len(new) < max_new:
        text = prompt + new
        [proposed] = generate(draft, [text], tau=1.0, max_new=min(4, max_new - len(new)))
        held = []
        [after] = generate(target, [text], tau=1.0, max_new=len(proposed.tokens) + 1)
        for mine, other in zip(proposed.tokens, after.tokens):
            if mine != other:
                break
            held.append(mine)
        [more] = generate(target, [text + held], tau=tau, max_new=max_new)
        new += held + more.tokens[: more.accepted[0]]
    return new[:max_new]


def test_a_draft_is_checked_and_what_masks_add_passes_tau():
    """At tau 1 the text is the target's own."""
    for seed in cases(8, 100):
        rng = random.Random(seed)
        target, draft = tiny_model(rng), tiny_model(rng)
        for model in (target, draft):
            model.config.block = rng.randint(1, 4)
            model.config.eos_token_id = (model.config.mask_token_id,)  # never predicted
        prompt = random_prompt(rng, rng.randint(2, 30))
        [expected] = generate(target, [prompt], tau=1.0, max_new=20)
        for tau in (1.0, 0.3):
            [answer] = WithDraft(target, draft, 60, tau, draft_tau=1.0)([prompt], max_new=20)
            assert answer.tokens == draft_by_hand(target, draft, prompt, tau, max_new=20)
            if tau == 1:
                assert answer.tokens == expected.tokens


def test_a_draft_of_another_vocabulary(tmp_path):
    shutil.copytree(ROOT / "toy/draft", tmp_path / "draft")
    path = tmp_path / "draft/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 640, "content": "<x>"})
    path.write_text(json.dumps(tokenizer))
    done = command("experiments.paper.tables", *TOY, "--table6", tmp_path / "draft", "--limit", 3)
    assert is_refused(done, "its tokenizer is not that of ")
    assert is_refused(command("experiments.paper.tables"), "choose --table5 or --table6")
