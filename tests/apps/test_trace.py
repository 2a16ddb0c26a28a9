"""The page of apps.trace: it says what the decoder did, and it works in a browser."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from commands import MARS, PROMPT, command
from common import ROOT, toy_prompts

from apps.trace import TracedDecoder
from decode import Options, generate
from model import load

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SETTINGS = [
    {"tau": 0.8},
    {"tau": 0.5, "block": 6},
    {"tau": 0.4, "metric": "margin", "block_cache": 8},
    {"tau": 0.3, "metric": "entropy"},
    {"tau": 0.6, "temperature": 1.0},
    {"verify": True},
    {"verify": True, "groups": 1},
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
    decoder = TracedDecoder(model, chat, options, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    for _ in decoder:
        pass
    return decoder.page(shown)


def facts_of(page: str) -> dict:
    [text] = re.findall(r'<script id="facts" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_page_says_what_was_recorded(toy, settings):
    """Tokens, guesses and positions of each forward, against a decoder that nobody watches.

    Five prompts for each of the ten settings.
    """
    model, chat = toy
    options = Options(**settings)
    first = 5 * SETTINGS.index(settings)
    for prompt in toy_prompts(chat)[first : first + 5]:
        forwards = facts_of(page_of(toy, prompt, **settings))["forwards"]
        [answer] = generate(model, [prompt], rows=1, **settings)
        assert [len(forward["tokens"]) for forward in forwards] == answer.accepted
        assert [len(forward["checked"]) for forward in forwards] == answer.checked
        assert [forward["positions"] for forward in forwards] == answer.positions
        assert "".join(forward["text"] for forward in forwards) == chat.decode(answer.tokens)
        assert sum(answer.accepted) > answer.forwards or options.tau == 1
        if options.verify:
            assert max(answer.checked) > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_forward_fits_the_next(toy, settings):
    """What passed tau is what was accepted; with verify, what the next forward checked."""
    options = Options(**settings)
    tau, is_entropy = options.tau, options.metric == "entropy"
    prompt = toy_prompts(toy[1])[7]
    forwards = facts_of(page_of(toy, prompt, **settings))["forwards"]
    for forward, following in zip(forwards, forwards[1:]):
        tokens = [token for token, _ in forward["candidates"]]
        if options.verify:
            assert following["checked"] == tokens[: forward["passed"]] + forward["looked_up"]
            assert forward["tokens"][: forward["held"]] == forward["checked"][: forward["held"]]
            assert len(forward["tokens"]) == forward["held"] + 1
        else:
            sure = [confidence for _, confidence in forward["candidates"]]
            passes = [value <= tau if is_entropy else value >= tau for value in sure]
            passes[0] = True
            assert forward["tokens"] == tokens[: forward["passed"]]
            assert forward["passed"] == [*passes, False].index(False)
        if not options.block_cache:
            num_new = 1 if options.verify else len(forward["tokens"])
            num_masks = following["masks"] * len(following["groups"])
            assert following["positions"] == num_new + len(following["checked"]) + num_masks


def test_the_candidates_are_those_of_the_model(toy):
    """The first forward against the model over the whole prompt and its masks, without a cache."""
    model, chat = toy
    prompt = toy_prompts(chat)[3]
    forward = facts_of(page_of(toy, prompt, tau=0.8))["forwards"][0]
    feed = torch.tensor([prompt + [model.config.mask_token_id] * 4])
    with torch.inference_mode():
        hidden = model(feed, torch.arange(feed.size(1))[None], None)
        best, tokens = model.logits(hidden[0, len(prompt) - 1 :]).softmax(-1).max(-1)
    assert "".join(token for token, _ in forward["candidates"]) == chat.decode(tokens.tolist())
    assert [sure for _, sure in forward["candidates"]] == pytest.approx(best.tolist(), abs=1e-5)


def test_no_text_becomes_html(toy):
    """A prompt may hold tags, the end of a script, and right-to-left text."""
    prompt = "</script><script>alert(1)</script><!-- שלום مرحبا \u2028 & \\"
    page = page_of(toy, toy_prompts(toy[1])[0], prompt, tau=0.8)
    assert facts_of(page)["prompt"] == prompt
    assert page.count("<script") == page_of(toy, toy_prompts(toy[1])[0]).count("<script") == 2
    assert "<!--" not in page


def test_a_long_answer_is_a_small_page(toy, monkeypatch):
    model, chat = toy
    monkeypatch.setattr(model.config, "eos_token_id", ())  # 200 tokens, whatever it says
    page = page_of(toy, toy_prompts(chat)[0], verify=True, max_new=200)
    assert sum(len(forward["tokens"]) for forward in facts_of(page)["forwards"]) == 200
    assert len(page.encode()) < 200_000
    assert "http" not in page  # no network


def test_the_command(tmp_path):
    page = tmp_path / "page.html"
    done = command("apps.trace", *MARS, "--prompt", PROMPT, "--tau", 0.8, page)
    assert done.status == 0 and done.out.endswith("The answer is 43.\n")
    assert facts_of(page.read_text(encoding="utf-8"))["prompt"] == PROMPT


# Appended to a page: what a reader does, and what the page then shows, as the page's title.
USER = """<script>
const shown = []
const at = () => shown.push(byId("forward").querySelector("h2").textContent.split(" ")[1])
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key }))
at(); press("ArrowRight"); at(); press("ArrowRight"); at()
press("ArrowLeft"); at(); press("x"); at()
byId("slider").value = 4; byId("slider").dispatchEvent(new Event("input")); at()
byId("next").click(); at(); byId("back").click(); byId("back").click(); at()
byId("answer").lastChild.click(); at(); press("ArrowRight"); at()
document.title = shown.join(" ") + " | " + document.querySelectorAll("#answer .later").length
</script>"""


@pytest.mark.parametrize("settings", [{"tau": 0.8}, {"verify": True}], ids=str)
def test_in_a_browser(toy, tmp_path, settings):
    """The keys, the slider, the buttons and a click lead to the right forwards, without errors."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    page = page_of(toy, toy_prompts(toy[1])[0], "<b>מחיר</b>", **settings)
    forwards = facts_of(page)["forwards"]
    last = len(forwards)
    page = page.replace(f'"{forwards[0]["text"]}"', '"\\u003ci>one"')  # as if the model said <i>one
    file = tmp_path / "page.html"
    file.write_text(page + USER, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([browser, *options, file.as_uri()], capture_output=True, text=True)
    assert "CONSOLE" not in done.stderr
    assert f"<title>1 2 3 2 2 4 5 3 {last} {last} | 0</title>" in done.stdout
    assert "&lt;b&gt;מחיר&lt;/b&gt;" in done.stdout
    assert "&lt;i&gt;one" in done.stdout and "<i>one" not in done.stdout
