"""Chat prompts and tokens: those of transformers, and what a template or tokenizer may not do."""

import json
import shutil

import pytest
import torch
import transformers
from common import BASE, ROOT, copy_tokenizer
from tokenizers import Tokenizer

from model import add_mask_token, load
from plumbing.chat import CHATML, MASK, Chat, compile_template
from plumbing.data import make_example
from plumbing.errors import UserError, failure_as

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "  Hi <|im_end|> there\n"}],
    "several turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n\n你好 🙂"},
        {"role": "user", "content": "12 + 5?"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "tool": [{"role": "user", "content": "?"}, {"role": "tool", "content": "12"}],
    "thoughts": [
        {"role": "user", "content": "How many plums?"},
        {"role": "assistant", "content": "<think>\nSeven?\n</think>\n\nThere are 7 plums."},
        {"role": "user", "content": "And now?"},
    ],
}

# What Qwen's template does not use: blocks on their own lines, tokens, tojson, loop controls.
OTHER = """{% for m in messages %}
  {% if m.role == "user" %}
    {{ eos_token }}{{ loop.index }} {{ m | tojson }}
  {% else %}
    {% continue %}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}
Answer: {{ unknown_token }}
{% endif %}
"""
# Of Qwen3's template what it does with thoughts: an answer begins with a block for them, empty if
# there are none; in earlier turns there is no block.
QWEN3_TEMPLATE = CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip('\\n')")
EMPTY = "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
QWEN3_TEMPLATE = QWEN3_TEMPLATE.replace("m.role }}\n", "m.role }}\n" + EMPTY)
TEMPLATES = {
    "qwen2.5": (ROOT / "tests/fixtures/qwen2.5/chat_template.jinja").read_text(),
    "qwen3": QWEN3_TEMPLATE,
    "chatml": CHATML,
    "other": OTHER,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("where", ["settings", "file"])
def test_prompts_are_those_of_transformers(tmp_path, template, where):
    """A directory without a template gets ChatML."""
    copy_tokenizer(tmp_path)
    text = TEMPLATES[template]
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(text)
    else:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    how = {"tokenize": False, "add_generation_prompt": True}
    for messages in CONVERSATIONS.values():
        expected = tokenizer.apply_chat_template(messages, **how)
        assert Chat(tmp_path).prompt(messages) == expected
        if template == "chatml":
            assert Chat(BASE).prompt(messages) == expected


def test_turns_that_a_template_drops(tmp_path):
    """Qwen3's drops former thoughts: such a row can be trained on. Qwen2.5's shows no role that it
    does not know, without a word."""
    copy_tokenizer(tmp_path)
    file = tmp_path / "chat_template.jinja"
    file.write_text(QWEN3_TEMPLATE)
    turns = [*CONVERSATIONS["thoughts"], {"role": "assistant", "content": "Still 7."}]
    chat = Chat(tmp_path)
    example = make_example({"messages": turns}, chat, ends=(2,), max_length=512)
    text = chat.tokenizer.decode(example.tokens, skip_special_tokens=False)
    assert text == chat.prompt(turns[:-1]) + "Still 7.<|im_end|>" and "Seven" not in text
    file.write_text(TEMPLATES["qwen2.5"])
    turns[1] = {"role": "environment", "content": " 12 "}
    with pytest.raises(UserError, match="the chat template drops .role 'environment'."):
        make_example({"messages": turns}, Chat(tmp_path), ends=(2,), max_length=512)


def test_templates_that_fail(tmp_path):
    """When they are run (the second, in a sandbox), or when they are read."""
    chat = Chat(BASE)
    for template in ("{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}"):
        chat.render = compile_template(template, {})
        with pytest.raises(UserError, match="refuses this conversation .*: (no|access to attrib)"):
            chat.prompt(CONVERSATIONS["one turn"])
    copy_tokenizer(tmp_path)
    file = tmp_path / "chat_template.jinja"
    for content in (b"\xff\xfe", b"{% for %}"):
        file.write_bytes(content)
        with pytest.raises(UserError, match="chat template is damaged"):
            Chat(tmp_path)
    file.unlink()
    named = {"chat_template": [{"name": "tools", "template": ""}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(UserError, match="chat template is damaged"):
        Chat(tmp_path)


def test_truncation_and_padding_that_the_tokenizer_stores(tmp_path):
    """They are not obeyed. (transformers writes those that a tokenizer was last called with to
    tokenizer.json, and does not obey them in apply_chat_template, either.)"""
    copy_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(tmp_path)
    text = chat.prompt(CONVERSATIONS["several turns"])
    assert chat.encode(text) == Chat(BASE).encode(text) and len(chat.encode(text)) > 16
    chat.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None


def test_a_tokenizer_that_panics_when_it_is_read(tmp_path):
    tokenizer = json.loads((BASE / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "é"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="tokenizer.json: missing or damaged"):
        Chat(tmp_path)
    # What catches a panic does not catch Ctrl-C.
    with pytest.raises(KeyboardInterrupt), failure_as("damaged"):
        raise KeyboardInterrupt


def test_a_tokenizer_that_does_not_fit(checkpoint, tmp_path):
    """Its ids would lie outside of the embedding; or they have gaps, and the mask would take the id
    of another token, which then could never be said."""
    model, chat = load(str(checkpoint))
    matrix = model.model.embed_tokens
    matrix.weight = torch.nn.Parameter(matrix.weight[:100])
    model.config.vocab_size = 100
    with pytest.raises(UserError, match="the tokenizer's id 631 exceeds vocab_size 100"):
        add_mask_token(model, chat)
    shutil.copytree(ROOT / "toy/mars", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != MASK]
    tokenizer["model"]["vocab"].pop(MASK, None)
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"ids have gaps: <\|mask\|> would share id 631"):
        load(str(tmp_path))
