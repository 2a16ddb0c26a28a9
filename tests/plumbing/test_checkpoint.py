"""Directories of models: what loading refuses and accepts, and what a failed save leaves."""

import json
import math

import pytest
import torch
from common import save_model
from safetensors.torch import load_file, save_file

from model import GENERATE, load
from plumbing.errors import UserError
from plumbing.files import save


def refuses(directory, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(str(directory))


def edit_config(directory, **changes) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))


def edit_tensors(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


# ----------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias True is not supported"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window attention True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        # beside the rope_parameters that this project writes: it decoded with plain RoPE
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: type 'yarn'"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "missing .*'rope_theta'"),
        ({"vocab_size": "640"}, "vocab_size '640': must be a whole number above 0"),
        ({"num_attention_heads": 3, "head_dim": "absent"}, "head_dim .*: must be even"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0: must be a number above 0"),
        ({"block": -4}, "block -4: must be a whole number above 0"),
        ({"block": 10**9}, "block 1000000000: must be below 1000"),  # it filled the memory
        ({"rope_parameters": "default"}, "config.json: "),
        ({"vocab_size": 600}, "model.embed_tokens.weight: expected"),
        ({"num_hidden_layers": 9}, r"tensor model.layers.\d.* found none"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight: .* found none"),
    ],
)
def test_configs_that_are_refused(checkpoint, changes, message):
    edit_config(checkpoint, **changes)
    refuses(checkpoint, message)


def test_config_forms_that_are_accepted(checkpoint):
    """The paper's model type, theta in either place, other keys that change nothing."""
    theta = json.loads((checkpoint / "config.json").read_text())["rope_theta"]
    for changes in (
        {"model_type": "a2d-qwen2", "torch_dtype": "absent", "dtype": "bfloat16"},
        {"rope_parameters": "absent"},
        {"rope_theta": "absent", "rope_parameters": {"rope_theta": theta}},
        {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False},
    ):
        edit_config(checkpoint, **changes)
        assert load(str(checkpoint))[0].config.rope_theta == theta
        edit_config(checkpoint, rope_theta=theta)


def test_one_end_of_turn_or_several(checkpoint):
    """generation_config.json decides, if there is one; else config.json."""
    generation = checkpoint / "generation_config.json"
    generation.write_text('{"eos_token_id": 5}')
    assert load(str(checkpoint))[0].config.eos_token_id == (5,)
    before = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    generation.write_text("{}")
    assert list(load(str(checkpoint))[0].config.eos_token_id) == before
    generation.unlink()
    edit_config(checkpoint, eos_token_id=[2, 0])
    assert load(str(checkpoint))[0].config.eos_token_id == (2, 0)


@pytest.mark.parametrize("ends", [640, [2, -1], [], "2"])
def test_an_end_that_could_not_end_a_turn(checkpoint, ends):
    """With such a model every answer would run on to its limit, without a word."""
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    refuses(checkpoint, "eos_token_id .*no tokens that could end a turn")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "tensor model.norm.weight: expected"),
        # Zeros take the place of a bias in a Llama only.
        (lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias: expec"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), "surplus: expected no such tens"),
        (lambda tensors: tensors["model.norm.weight"][-1].fill_(math.nan), "norm.weight holds NaN"),
    ],
)
def test_tensors_that_are_refused(checkpoint, change, message):
    edit_tensors(checkpoint, change)
    refuses(checkpoint, message)


def test_a_large_sum_is_no_damage(checkpoint):
    """In float16 the sum of sound numbers may be infinite."""
    edit_tensors(checkpoint, lambda tensors: tensors["model.embed_tokens.weight"].add_(9))
    load(str(checkpoint), dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_quantized(checkpoint, dtype):
    """Their codes are not taken for weights."""
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refuses(checkpoint, f"{name} is {dtype}; get the model unquantized")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_files_that_are_damaged(checkpoint, name):
    whole = (checkpoint / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"nothing of the kind", b"[]", None):
        (checkpoint / name).unlink()
        if damaged is not None:
            (checkpoint / name).write_bytes(damaged)
        refuses(checkpoint, f"{name}: (missing|cannot be read|expected a JSON)")


# ------------------------------------------------------------------------------------------ saving


def test_a_failed_save_leaves_the_old_checkpoint(checkpoint, monkeypatch):
    """Disk full in the middle of the weights: all old files are whole, and nothing else is left."""
    model, chat = load(str(checkpoint))
    model.config.block = 99
    chat.template = "changed"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plumbing.files.save_file", full)
    with pytest.raises(UserError, match="not saved .*No space left"):
        save_model(model, chat, checkpoint)
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_what_a_mars_model_brings(checkpoint):
    """Its generate.py, as it is now, and a README.md, which a person may change; else neither."""
    model, chat = load(str(checkpoint))
    file = checkpoint / "custom_generate/generate.py"
    card = checkpoint / "README.md"
    for block, own in ((None, None), (4, None), (4, "my model")):
        if own:
            card.write_text(own)
            file.write_text("an older one")
        config = model.config.to_json() | {"block": block}
        save(checkpoint, config, chat, model.state_dict(), generate=GENERATE)
        assert file.exists() == card.exists() == (block is not None)
        if block:
            assert file.read_bytes() == GENERATE.read_bytes()
            assert own or card.read_text().startswith("---\nlibrary_name: transformers\n")
    assert card.read_text() == "my model"
