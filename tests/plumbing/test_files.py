"""Directories of models: from the hub, what loading refuses and accepts, and a failed save."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch
from commands import Done, is_refused, process
from common import ROOT, save_model
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from model import GENERATE, load
from plumbing.errors import UserError
from plumbing.files import locate, save

# ------------------------------------------------------------------------------------- from the hub

COMMIT = "c0ffee" + "0" * 34


def decode(cache: Path, offline: int) -> Done:
    """With a hub that is not there."""
    hub = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": "http://127.0.0.1:9"}
    words = ("--model", "org/name", "--prompt", "Tom owns 4 boxes.", "--max-new", 3)
    return process("decode.py", *words, "--device", "cpu", HF_HUB_OFFLINE=str(offline), **hub)


def test_only_what_is_needed_is_fetched(monkeypatch):
    """No formats that are not read, and nothing in folders. (HF_TOKEN is left to the client.)"""
    spy = mock.Mock(return_value="fetched")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    assert locate("org/name") == Path("fetched") and spy.call_args.args == ("org/name",)
    needed = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    needed += ["model-00001-of-00001.safetensors", "chat_template.jinja"]
    useless = ["README.md", "onnx/model.safetensors", "original/params.json", "a.bin"]
    assert list(filter_repo_objects(needed + useless, **spy.call_args.kwargs)) == needed


def test_what_was_fetched_is_read_offline(tmp_path):
    """From a cache in the layout that huggingface_hub documents."""
    done = decode(tmp_path, offline=0)
    assert is_refused(done, "org/name: no such directory in ")
    assert "check your internet connection" in done.err
    repository = tmp_path / "models--org--name"
    shutil.copytree(ROOT / "toy/mars", repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(COMMIT)
    done = decode(tmp_path, offline=1)
    assert done.status == 0 and done.out.strip(), done.err


# ----------------------------------------------------------------------------------------- reading


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


def test_ends_of_turn(checkpoint):
    """One or several; generation_config.json decides, if it is there and has any.

    With one that is no token every answer would run on to its limit, without a word.
    """
    edit_config(checkpoint, eos_token_id=[2, 0])
    generation = checkpoint / "generation_config.json"
    for text, expected in (('{"eos_token_id": 5}', (5,)), ("{}", (2, 0))):
        generation.write_text(text)
        assert load(str(checkpoint))[0].config.eos_token_id == expected
    generation.unlink()
    assert load(str(checkpoint))[0].config.eos_token_id == (2, 0)
    for ends in (640, [2, -1], [], "2"):
        generation.write_text(json.dumps({"eos_token_id": ends}))
        refuses(checkpoint, "eos_token_id .*no tokens that could end a turn")


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "tensor model.norm.weight: expected"),
        # Zeros take the place of a bias in a Llama only.
        (lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias: expec"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), "surplus: expected no such tens"),
        (lambda tensors: tensors["model.norm.weight"][-1].fill_(math.nan), "norm.weight holds NaN"),
        # Codes of a quantized model are not taken for weights.
        (lambda tensors: tensors.update({UP: tensors[UP].int()}), f"{UP} is .*get the model unqua"),
        (lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}), f"{UP} is "),
    ],
)
def test_tensors_that_are_refused(checkpoint, change, message):
    edit_tensors(checkpoint, change)
    refuses(checkpoint, message)


def test_a_large_sum_is_no_damage(checkpoint):
    """In float16 the sum of sound numbers may be infinite."""
    edit_tensors(checkpoint, lambda tensors: tensors["model.embed_tokens.weight"].add_(9))
    load(str(checkpoint), dtype=torch.float16)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_files_that_are_damaged(checkpoint, name):
    whole = (checkpoint / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"[]"):
        (checkpoint / name).write_bytes(damaged)
        refuses(checkpoint, f"{name}: (missing|cannot be read|expected a JSON)")
    (checkpoint / name).unlink()
    refuses(checkpoint, f"{name}: (missing|cannot be read)")


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
