"""The page of apps.trace says what the decoder did."""

import json
import re
from xml.etree import ElementTree

import pytest
from commands import MARS, PROMPT, command
from common import ROOT, toy_prompts

from apps.trace import make_page, trace
from decode import Options, generate
from model import load

SETTINGS = [
    {"tau": 0.8},
    {"tau": 0.5, "block": 6, "guard": True},
    {"tau": 0.4, "metric": "margin", "block_cache": 8},
    {"tau": 0.3, "metric": "entropy"},
    {"tau": 0.6, "temperature": 1.0},
    {},
    {"temperature": 1.0},
    {"tau": 0.8, "max_new": 23},
    {"tau": 1.0},
]


@pytest.fixture(scope="module")
def toy():
    return load(str(ROOT / "toy/mars"))


def page_of(toy, prompt: list[int], shown: str = PROMPT, **settings) -> str:
    model, chat = toy
    options = Options(**settings)
    return make_page(shown, options, trace(model, chat, prompt, options))


def facts_of(page: str) -> dict:
    [text] = re.findall(r'<script id="facts" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


def assert_follows(forward: dict, following: dict, options: Options) -> None:
    """What passed tau is what was accepted; lossless, what the next forward checked."""
    tokens = [token for token, _ in forward["candidates"]]
    assert following["checked"] == forward["guesses"]
    if options.is_lossless:
        assert forward["guesses"][: forward["passed"]] == tokens[: forward["passed"]]
        assert forward["tokens"][: forward["held"]] == forward["checked"][: forward["held"]]
        assert len(forward["tokens"]) == forward["held"] + 1
        num_new = 1
    else:
        passes = [True]  # the first always does
        least = {"confirmed": options.tau, "silent": 1 - (1 - options.tau) / 20, "contradicted": 2}
        words = forward.get("witness", ["confirmed"] * len(tokens))
        for word, (_, confidence) in zip(words, forward["candidates"][1:]):
            is_entropy = options.metric == "entropy"
            passes.append(confidence <= options.tau if is_entropy else confidence >= least[word])
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
        assert [len(forward["tokens"]) for forward in forwards] == answer.num_accepted
        assert [forward["positions"] for forward in forwards] == answer.widths
        assert "".join(forward["text"] for forward in forwards) == chat.decode(answer.tokens)
        assert sum(answer.num_accepted) > answer.forwards or options.tau == 1
        for forward, following in zip(forwards, forwards[1:]):
            assert_follows(forward, following, options)
    if options.is_lossless:
        assert any(forward["held"] for forward in forwards)
        assert forwards[-1]["candidates"] == []  # the page said that they are checked next


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


def test_the_picture(toy, tmp_path):
    """A beat for each forward, with its tokens. docs/decoding.svg is the one of this version."""
    prompt = "Mia has 5 bags with 12 plums in each. How many plums is that?"
    command("apps.trace", *MARS, "--prompt", prompt, tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert svg == (ROOT / "docs/decoding.svg").read_text(encoding="utf-8") and len(svg) < 40000
    beats = ElementTree.fromstring(svg).findall("{*}g[@style]")
    beats = [beat.findall("{*}text") for beat in beats if beat.get("class").startswith("yes")]
    for tau in (1, None):
        tokens = toy[1].encode_prompt([{"role": "user", "content": prompt}])
        [answer] = generate(toy[0], [tokens], tau=tau)
        mine, beats = beats[: answer.forwards], beats[answer.forwards :]
        assert [len(beat) for beat in mine] == answer.num_accepted
        text = "".join(box.text for beat in mine for box in beat).replace("\xa0", " ")
        assert text == toy[1].tokenizer.decode(answer.tokens, skip_special_tokens=False)
    assert beats == []
