"""The page of apps.trace says what the decoder did."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
from commands import MARS, PROMPT, command, is_refused
from common import ROOT, toy_prompts

from apps.trace import TracedMethod, make_page, trace
from decode import Decoder, Options, generate
from model import load
from plumbing.scheduler import Decision

SETTINGS = [
    {"tau": 0.8},
    {"tau": 0.5, "block": 6},
    {"tau": 0.4, "metric": "margin", "block_cache": 8},
    {"tau": 0.3, "metric": "entropy"},
    {"tau": 0.6, "temperature": 1.0},
    {"verify": True},
    {"verify": True, "temperature": 1.0},
    {"tau": 0.8, "max_new": 23},
    {"tau": 1.0},
]


@pytest.fixture(scope="module")
def toy():
    return load(str(ROOT / "toy/mars"))


def page_of(toy, prompt: list[int], shown: str = PROMPT, **settings) -> str:
    model, chat = toy
    options = Options(**settings)
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    return make_page(shown, options, trace(decoder, chat))


def facts_of(page: str) -> dict:
    [text] = re.findall(r'<script id="facts" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


def assert_follows(forward: dict, following: dict, options: Options) -> None:
    """What passed tau is what was accepted; with verify, what the next forward checked."""
    tokens = [token for token, _ in forward["candidates"]]
    if options.verify:
        assert following["checked"] == tokens[: forward["passed"]] + forward["looked_up"]
        assert forward["tokens"][: forward["held"]] == forward["checked"][: forward["held"]]
        assert len(forward["tokens"]) == forward["held"] + 1
        num_new = 1
    else:
        passes = [True]  # the first always does
        for _, confidence in forward["candidates"][1:]:
            is_entropy = options.metric == "entropy"
            passes.append(confidence <= options.tau if is_entropy else confidence >= options.tau)
        assert forward["tokens"] == tokens[: forward["passed"]]
        assert forward["passed"] == [*passes, False].index(False)
        num_new = len(forward["tokens"])
    if not options.block_cache:
        fed = len(following["checked"]) + following["masks"]
        assert following["positions"] == num_new + fed


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_page_says_what_a_decoder_does_that_nobody_watches(toy, settings):
    """Three prompts for each of the settings."""
    model, chat = toy
    options = Options(**settings)
    first = 3 * SETTINGS.index(settings)
    for prompt in toy_prompts(chat)[first : first + 3]:
        forwards = facts_of(page_of(toy, prompt, **settings))["forwards"]
        [answer] = generate(model, [prompt], rows=1, **settings)
        assert [len(forward["tokens"]) for forward in forwards] == answer.accepted
        assert [forward["positions"] for forward in forwards] == answer.widths
        assert "".join(forward["text"] for forward in forwards) == chat.decode(answer.tokens)
        assert sum(answer.accepted) > answer.forwards or options.tau == 1
        for forward, following in zip(forwards, forwards[1:]):
            assert_follows(forward, following, options)
    if options.verify:
        assert any(forward["held"] for forward in forwards)


def test_guesses_come_from_masks_that_saw_no_failure():
    """Two guesses: the groups saw 0, 1 and 2 of them, B = 2. One holds, so the second group's masks
    count: they predict the tokens after the model's own."""
    chat = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda tokens, **_: str(tokens[0])))
    groups = [[(1, pos, prefix) for pos in (prefix, prefix + 1)] for prefix in (5, 6, 7)]
    fed = [(20, 5, 6), (21, 6, 7), *groups[0], *groups[1], *groups[2]]
    inner = SimpleNamespace(widest=9, metric="probability")
    inner.feed = mock.Mock(side_effect=[fed, [(34, 7, 8), (99, 8, 9)]])
    inner.decide = mock.Mock(return_value=Decision([20, 50], num_held=1))
    method = TracedMethod(inner, verify=True, chat=chat)
    sequence = SimpleNamespace(text=[2, 3, 4, 5, 6])
    method.feed(sequence)
    best = [20, 50, 51, 32, 33, 34, 35, 36, 37]
    method.decide(sequence, best, sure=[number / 100 for number in best])
    [facts] = method.forwards
    assert facts["checked"] == ["20", "21"] and (facts["masks"], facts["groups"]) == (6, 3)
    assert facts["candidates"] == [("34", 0.34), ("35", 0.35)] and facts["first"] == 0
    assert facts["passed"] == 1 and facts["looked_up"] == ["99"]


def test_no_text_becomes_html(toy):
    """A prompt may hold tags, the end of a script, and right-to-left text; nothing is loaded."""
    prompt = "</script><script>alert(1)</script><!-- שלום مرحبا \u2028 & \\"
    page = page_of(toy, toy_prompts(toy[1])[0], prompt, tau=0.8)
    assert facts_of(page)["prompt"] == prompt
    assert page.count("<script") == page_of(toy, toy_prompts(toy[1])[0]).count("<script") == 2
    assert "<!--" not in page and "http" not in page


def test_the_command(tmp_path):
    page = tmp_path / "page.html"
    done = command("apps.trace", *MARS, "--prompt", PROMPT, "--tau", 0.8, page)
    assert done.status == 0 and "page.html: open it" in done.err
    assert facts_of(page.read_text(encoding="utf-8"))["prompt"] == PROMPT
    nowhere = tmp_path / "no" / "page.html"  # said before the answer, not after it
    assert is_refused(command("apps.trace", "--prompt", PROMPT, nowhere), "no such directory")
