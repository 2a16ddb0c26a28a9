"""Checkpoints and chat prompts against transformers, both ways, and what loading refuses."""

import json
import random

import pytest
import torch
import transformers
from common import ROOT, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from decode import generate
from model import Chat, Config, UserError, add_mask_token, initialize, load, load_model, save

BASE = ROOT / "toy/base"


def copy_tokenizer(target) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((BASE / name).read_bytes())


def their_model(target, tied: bool, shards: int = 1) -> transformers.Qwen2ForCausalLM:
    """A random Qwen2 that transformers made, saved by transformers."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=640,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=[2, 0],
        # The theta of neither library's default; version 4 takes one name, version 5 the other.
        rope_theta=5000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)  # norms and biases too
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(target, max_shard_size=int(size / shards * 1.3))
    copy_tokenizer(target)
    return model


def logits(model, tokens) -> torch.Tensor:
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    return model.logits(model(tokens, positions, None).flatten(0, 1)).view(*tokens.shape, -1)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_of_transformers_loads_here(tmp_path, tied, shards):
    theirs = their_model(tmp_path, tied, shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    ours, _ = load(str(tmp_path))
    assert ours.config.rope_theta == 5000.0 and ours.config.eos_token_id == (2, 0)
    tokens = torch.randint(4, 640, (3, 40))
    expected = theirs(tokens).logits
    expected[..., ours.config.mask_token_id] = float("-inf")
    assert torch.allclose(logits(ours, tokens), expected, atol=1e-4)
    prompt = tokens[0, :9]
    kept = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, 9, dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=[2, 0],
        pad_token_id=0,
        suppress_tokens=[ours.config.mask_token_id],
    )
    [result] = generate(ours, [prompt.tolist()], tau=1, max_new=24)
    assert result.tokens == kept[0, 9:].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_saved_here_loads_in_transformers(tmp_path, tied):
    config = Config(640, 48, 80, 3, 6, 2, 256, 5000.0, 1e-6, tied, 0.2, (2, 0), None, 4)
    ours, chat = initialize(config, 1), Chat(BASE)
    add_mask_token(ours, chat)
    save(ours, chat, tmp_path / "x", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    assert type(theirs) is transformers.Qwen2ForCausalLM
    tokens = torch.randint(4, 640, (2, 30))
    expected = theirs(tokens).logits
    expected[..., ours.config.mask_token_id] = float("-inf")
    assert torch.allclose(logits(ours, tokens), expected, atol=1e-4)
    prompt = {"input_ids": tokens[:1], "attention_mask": torch.ones_like(tokens[:1])}
    kept = theirs.generate(**prompt, max_new_tokens=20, do_sample=False, suppress_tokens=[3])
    [result] = generate(ours, [tokens[0].tolist()], tau=1, max_new=20)
    assert result.tokens == kept[0, 30:].tolist()
    again, _ = load(str(tmp_path / "x"))
    assert again.config == ours.config and torch.equal(logits(again, tokens), logits(ours, tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    text = "<|im_start|>user\nMia has 12 plums. 🙂<|mask|>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat.encode(text)


@torch.inference_mode()
def test_bundled_model_in_bfloat16_is_transformers_too():
    """Loading keeps the file's bits, and float32 arithmetic on them agrees with transformers'."""
    ours, chat = load(str(ROOT / "toy/mars"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "toy/mars", dtype=torch.float32
    )
    tokens = torch.tensor([chat.encode("Mia has 5 bags with 12 plums in each.")])
    expected = theirs(tokens).logits
    expected[..., ours.config.mask_token_id] = float("-inf")
    assert torch.allclose(logits(ours, tokens), expected, atol=1e-3)
    assert (
        load(str(ROOT / "toy/mars"), dtype=torch.bfloat16)[0].model.norm.weight.dtype
        == torch.bfloat16
    )


CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "  Hi <|im_end|> there\n"}],
    "several turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n\n你好 🙂"},
        {"role": "user", "content": "12 + 5?"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "tool": [{"role": "user", "content": "?"}, {"role": "tool", "content": "12"}],
}


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
"""  # what Qwen's template does not use: blocks on their own lines, tokens, tojson, loop controls


@pytest.mark.parametrize("template", ["qwen2.5", "chatml", "other"])
@pytest.mark.parametrize("where", ["settings", "file", "named"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_prompts_are_those_of_transformers(tmp_path, template, where, messages):
    copy_tokenizer(tmp_path)
    chat = Chat(BASE)
    qwen = (ROOT / "tests/fixtures/qwen2.5/chat_template.jinja").read_text()
    text = {"qwen2.5": qwen, "chatml": chat.template, "other": OTHER}[template]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(text)
    elif where == "settings":
        settings["chat_template"] = text
    else:
        settings["chat_template"] = [{"name": "default", "template": text}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Chat(tmp_path).prompt(messages) == expected


def test_chatml_and_the_roles_a_template_shows(tmp_path):
    """Qwen2.5's template drops every role that it does not know, without a word."""
    copy_tokenizer(tmp_path)
    chat = Chat(tmp_path)
    assert chat.prompt(CONVERSATIONS["system"]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    template = (ROOT / "tests/fixtures/qwen2.5/chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template)
    dropped = Chat(tmp_path).prompt([{"role": "environment", "content": "12"}])
    assert "12" not in dropped
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only users here') }}")
    with pytest.raises(UserError, match="refuses this conversation: only users here"):
        Chat(tmp_path).prompt(CONVERSATIONS["system"])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="chat template is damaged"):
        Chat(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="refuses"):  # the sandbox
        Chat(tmp_path).prompt(CONVERSATIONS["system"])


# ---------------------------------------------------------------------------- reading and refusing


@pytest.fixture
def checkpoint(tmp_path):
    """A tied random model, saved here; returns its directory."""
    model, chat = tiny_model(random.Random(0), vocab_size=640), Chat(BASE)
    model.config.tie_word_embeddings = True
    if hasattr(model, "lm_head"):
        del model.lm_head
    add_mask_token(model, chat)
    save(model, chat, tmp_path / "m")
    return tmp_path / "m"


def edit_config(directory, **changes) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {k: v for k, v in config.items() if v != "absent"}
    (directory / "config.json").write_text(json.dumps(config))


def edit_tensors(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding-window"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "missing .* 'rope_theta'"),
        ({"hidden_size": "absent"}, "missing .* 'hidden_size'"),
        ({"vocab_size": "640"}, "sizes must be whole numbers above 0"),
        ({"num_attention_heads": 0}, "sizes must be whole numbers above 0"),
        ({"block_size": -4}, "sizes must be whole numbers above 0"),
        ({"rope_parameters": "default"}, "config.json: "),
        ({"layer_types": 3}, "config.json: "),
        ({"vocab_size": 600}, "model.embed_tokens.weight: expected"),
        (
            {"intermediate_size": 8},
            r"mlp.down_proj.weight: expected \(\d+, 8\), found \(\d+, \d\d\)",
        ),
        ({"num_hidden_layers": 9}, r"tensor model.layers.\d.* found none"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight: .* found none"),
    ],
)
def test_configs_that_are_refused(checkpoint, changes, message):
    if "rope_scaling" in changes:
        edit_config(checkpoint, rope_parameters="absent")
    edit_config(checkpoint, **changes)
    with pytest.raises(UserError, match=message):
        load(str(checkpoint))


@pytest.mark.parametrize("eos", [[], ["2"], "2", [9999], [-1]])
def test_ends_that_could_not_end_a_turn(checkpoint, eos):
    """Such a model would run on to the limit without a word."""
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match="no tokens that could end a turn"):
        load(str(checkpoint))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_no_object(checkpoint, name):
    (checkpoint / name).write_text("[]")
    with pytest.raises(UserError, match=f"{name}: expected a JSON object"):
        load(str(checkpoint))


def test_a_tokenizer_of_another_model(checkpoint):
    """Its ids would lie outside of the embedding: an IndexError at the first such word."""
    model, chat = load(str(checkpoint))
    for name in ("embed_tokens",):
        matrix = getattr(model.model, name)
        matrix.weight = torch.nn.Parameter(matrix.weight[:100])
    model.config.vocab_size = 100
    with pytest.raises(UserError, match="token id 631 .* exceeds vocab_size 100"):
        add_mask_token(model, chat)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ messages[7].content.x }}"]
)
def test_templates_that_fail_in_any_way(checkpoint, template):
    (checkpoint / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="refuses this conversation"):
        Chat(checkpoint).prompt(CONVERSATIONS["one turn"])


def test_templates_that_cannot_be_read(checkpoint):
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="chat template is damaged"):
        Chat(checkpoint)
    (checkpoint / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "tools", "template": ""}]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(UserError, match="chat template is damaged"):
        Chat(checkpoint)


def test_config_forms_that_are_accepted(checkpoint):
    """The paper's model type, theta in either place, heads left out, one end or several."""
    theta = json.loads((checkpoint / "config.json").read_text())["rope_theta"]
    for changes in (
        {"model_type": "a2d-qwen2", "torch_dtype": "absent", "dtype": "bfloat16"},
        {"rope_parameters": "absent"},
        {"rope_theta": "absent", "rope_parameters": {"rope_theta": theta}},
        {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 3},
    ):
        edit_config(checkpoint, **changes)
        assert load(str(checkpoint))[0].config.rope_theta == theta
        edit_config(checkpoint, rope_theta=theta)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load(str(checkpoint))[0].config.eos_token_id == (5,)
    (checkpoint / "generation_config.json").unlink()
    edit_config(checkpoint, eos_token_id=[2, 0])
    assert load(str(checkpoint))[0].config.eos_token_id == (2, 0)
    edit_config(checkpoint, eos_token_id=None)
    with pytest.raises(UserError, match="no tokens that could end a turn"):
        load(str(checkpoint))


def test_weights_that_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    edit_tensors(checkpoint, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(UserError, match="tensor model.norm.weight: expected .* found none"):
        load(str(checkpoint))
    weights.write_bytes(whole)
    edit_tensors(checkpoint, lambda t: t.update(surplus=torch.zeros(2)))
    with pytest.raises(UserError, match="tensor surplus: expected no such tensor"):
        load(str(checkpoint))
    for damaged in (whole[: len(whole) // 2], b"", b"not weights"):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match="model.safetensors: damaged"):
            load(str(checkpoint))
    weights.unlink()
    with pytest.raises(UserError, match="model.safetensors: no such file"):
        load(str(checkpoint))
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.st"}}')
    with pytest.raises(UserError, match="gone.st: no such file"):
        load(str(checkpoint))


def test_a_head_in_the_file_is_the_head(checkpoint):
    """Some checkpoints carry an lm_head.weight beside tie_word_embeddings: true."""
    head = torch.randn(640, load_model(checkpoint).config.hidden_size)
    edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": head}))
    model = load_model(checkpoint)
    assert not model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, head)


def test_tokens_that_are_listed_beside_the_tokenizer(checkpoint):
    """added_tokens.json or tokenizer_config.json may have the mask, and tokenizer.json may not."""
    tokenizer, settings = checkpoint / "tokenizer.json", checkpoint / "tokenizer_config.json"
    whole, mask_id = json.loads(tokenizer.read_text()), Chat(checkpoint).mask_id
    plain = whole | {"added_tokens": [t for t in whole["added_tokens"] if t["id"] != mask_id]}
    plain["model"] = whole["model"] | {
        "vocab": {k: v for k, v in whole["model"]["vocab"].items() if v < mask_id},
        "merges": [],
    }
    tokenizer.write_text(json.dumps(plain))
    assert Chat(checkpoint).mask_id is None
    extra = {"<|extra|>": mask_id + 1, "<|mask|>": mask_id}
    (checkpoint / "added_tokens.json").write_text(json.dumps(extra))
    chat = Chat(checkpoint)
    assert chat.mask_id == mask_id and chat.encode("<|extra|>") == [mask_id + 1]
    (checkpoint / "added_tokens.json").unlink()
    listed = {str(id): {"content": token, "special": True} for token, id in extra.items()}
    settings.write_text(json.dumps({"added_tokens_decoder": listed}))
    assert Chat(checkpoint).mask_id == mask_id
    for added, damage in (
        ('{"<|mask|>": "four"}', "{}"),
        ('{"<|mask|>": null}', "{}"),
        ("{}", '{"added_tokens_decoder": {"5": {"content": 7}}}'),
        ("{}", '{"added_tokens_decoder": ["<|mask|>"]}'),
    ):
        (checkpoint / "added_tokens.json").write_text(added)
        settings.write_text(damage)
        with pytest.raises(UserError, match="its list of added tokens is damaged"):
            Chat(checkpoint)
    settings.write_text("{}")
    (checkpoint / "added_tokens.json").write_text(f'{{"<|mask|>": {mask_id + 7}}}')
    with pytest.raises(UserError, match=f"<.mask.> is listed as {mask_id + 7}, but is {mask_id}"):
        Chat(checkpoint)


def test_the_mask_takes_a_free_row_or_a_new_one(tmp_path):
    """Qwen2.5 has rows to spare; the vocabulary of a tokenizer may also be exactly full."""
    text = (
        Tokenizer.from_file(str(BASE / "tokenizer.json")).to_str().replace("<|mask|>", "<|gone|>")
    )
    (tmp_path / "tokenizer.json").write_text(text)
    size = Chat(tmp_path).tokenizer.get_vocab_size()
    for tied in (True, False):
        for rows in (size + 3, size):
            model, chat = (
                initialize(Config(rows, 8, 8, 1, 2, 1, 64, 1e4, 1e-6, tied, 0.02, (2,)), 0),
                Chat(tmp_path),
            )
            before = model.model.embed_tokens.weight.clone()
            add_mask_token(model, chat)
            assert model.config.mask_token_id == size == chat.tokenizer.token_to_id("<|mask|>")
            assert model.config.vocab_size == max(rows, size + 1)
            assert torch.equal(model.model.embed_tokens.weight[:rows], before)
            new = model.model.embed_tokens.weight[rows:]
            assert torch.allclose(new, before.mean(0).expand_as(new))
            out = logits(model, torch.tensor([[4, size]]))
            assert out.shape[-1] == model.config.vocab_size
            assert out[..., size].max() == float("-inf") and out[..., :size].isfinite().all()


def test_a_failed_save_leaves_the_old_checkpoint(checkpoint, monkeypatch):
    """Disk full in the middle of the weights: all old files whole, of one save, nothing beside.

    The config once was replaced before the weights were written: a new one beside old weights.
    """
    model, chat = load(str(checkpoint))
    model.config.block_size, chat.template = 99, "changed"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.save_file", full)
    with pytest.raises(UserError, match="not saved .*No space left"):
        save(model, chat, checkpoint)
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    with pytest.raises(UserError, match="not saved"):  # a file where a directory should be
        save(model, chat, checkpoint / "config.json" / "below")


def test_a_checkpoint_is_replaced_in_one_rename(checkpoint, monkeypatch):
    """Killed between writing and renaming: whoever reads the directory still finds the old file."""
    model, chat = load(str(checkpoint))
    before = (checkpoint / "model.safetensors").read_bytes()
    model.model.norm.weight.data += 1

    def killed(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", killed)
        save(model, chat, checkpoint)
    assert (checkpoint / "model.safetensors").read_bytes() == before
    save(model, chat, checkpoint)
    assert (checkpoint / "model.safetensors").read_bytes() != before


def test_a_name_that_is_neither_directory_nor_hub_id():
    with pytest.raises(UserError, match="no such directory, and not a hub id"):
        load("no/such/directory")
