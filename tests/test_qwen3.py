"""A Qwen3 is trained, and its chat template has thoughts. (For its logits see test_model.py.)"""

import json

import pytest
import torch
import transformers
from commands import command, is_refused
from common import BASE, ROOT, cases, copy_tokenizer, toy_prompts
from training import log, run_train, write

from decode import generate
from model import load
from plumbing.chat import Chat
from plumbing.data import encode


def test_a_qwen3_is_trained(tmp_path):
    """From random weights: the loss falls, and --verify gives the text of tau 1, in float64."""
    small = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = json.loads((BASE / "config.json").read_text()) | small | heads
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    words = ["--model", tmp_path, "--from-scratch", "--data", ROOT / "toy/train.jsonl", "--out"]
    words += [tmp_path / "out", "--steps", 30, "--batch", 8, "--lr", 5e-3, "--held-out", 0]
    assert run_train(*words).status == 0
    first, *_, last = log(tmp_path / "out")
    assert last["noisy"] < 0.8 * first["noisy"] and last["clean"] < 0.8 * first["clean"]
    model, chat = load(str(tmp_path / "out"), dtype=torch.float64)
    assert model.config.model_type == "qwen3" and model.config.head_dim == 16
    prompts = toy_prompts(chat)[: len(cases(5, 50))]
    plain = generate(model, prompts, tau=1.0, max_new=20)
    checked = generate(model, prompts, verify=True, max_new=20)
    assert [sequence.tokens for sequence in checked] == [sequence.tokens for sequence in plain]


# What Qwen3's template does with thoughts: an answer begins with a block for them, empty if there
# are none; in earlier turns there is no block.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TURNS = [
    {"role": "user", "content": "How many plums?"},
    {"role": "assistant", "content": "<think>\nSeven?\n</think>\n\nThere are 7 plums."},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_thoughts_are_those_of_transformers(tmp_path, options):
    """In prompts, and without thoughts in training: prompt and response are the conversation."""
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = Chat(tmp_path)
    chat.template_options = options
    prompt = theirs.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=True, **options
    )
    assert chat.prompt(TURNS) == prompt
    assert prompt.endswith("</think>\n\n") == (options == {"enable_thinking": False})
    if prompt.endswith("</think>\n\n"):
        messages = [*TURNS, {"role": "assistant", "content": "Still 7."}]
        whole = theirs.apply_chat_template(messages, tokenize=False)
        example = encode({"messages": messages}, chat, eos=2, max_length=512)
        text = chat.tokenizer.decode(example.tokens[:-1], skip_special_tokens=False)
        assert text == whole.removesuffix("<|im_end|>\n") and example.tokens[-1] == 2
        assert chat.tokenizer.decode(example.tokens[example.prompt_length : -1]) == "Still 7."


def test_template_options_reach_decoding_and_training(checkpoint, tmp_path):
    (checkpoint / "chat_template.jinja").write_text("{{ 'x' * (1000 if mood == 'long' else 1) }}")
    decoding = ["decode", "--model", checkpoint, "--prompt", "Hi", "--max-new", 5]
    option = ["--template-option", "mood=long"]
    assert is_refused(command(*decoding, *option), "exceed the model's 512 positions")
    assert command(*decoding).status == 0
    data = write(tmp_path / "data.jsonl", [{"prompt": "Hi", "response": "Ho"}]).path
    words = ("--model", checkpoint, "--data", data, "--max-length", 50, "--out", tmp_path / "out")
    assert is_refused(run_train(*words, *option), "no usable row: 1 ")
    done = command(*decoding, "--template-option", "mood")
    assert is_refused(done, "--template-option: must be NAME=VALUE, not 'mood'")
