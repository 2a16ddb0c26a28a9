"""The thoughts of Qwen3's chat template. (For its logits see test_model.py.)"""

import json

import pytest
import transformers
from commands import command, is_refused
from common import copy_tokenizer
from training import run_train, write

from plumbing.chat import Chat
from plumbing.data import encode

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
