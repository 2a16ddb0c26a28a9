"""The thoughts of Qwen3's chat template. (For its logits see test_model.py.)"""

import json

import transformers
from common import copy_tokenizer

from plumbing.chat import Chat
from plumbing.data import make_example

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
{%- endif %}
"""
TURNS = [
    {"role": "user", "content": "How many plums?"},
    {"role": "assistant", "content": "<think>\nSeven?\n</think>\n\nThere are 7 plums."},
    {"role": "user", "content": "And now?"},
]


def test_former_thoughts_are_dropped_as_by_transformers(tmp_path):
    """And a row with thoughts in an earlier turn can be trained on."""
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = Chat(tmp_path)
    prompt = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert chat.prompt(TURNS) == prompt and "Seven" not in prompt
    messages = [*TURNS, {"role": "assistant", "content": "Still 7."}]
    example = make_example({"messages": messages}, chat, ends=(2,), max_length=512)
    text = chat.tokenizer.decode(example.tokens, skip_special_tokens=False)
    assert text == prompt + "Still 7.<|im_end|>"
