"""A patch: what training changed in a model, at low rank, as a small file."""

import json
import random
from pathlib import Path

import pytest
import torch
from commands import Done, command, is_refused
from common import BASE, MASK, ROOT, cases, save_model, tiny_model
from safetensors.torch import load_file

from apps.patch import apply_patch, make_patch, read_patch, whole_numbers, write_patch
from model import Config, add_mask_token, initialize, load
from plumbing.chat import Chat


def trained(base: dict, rng: random.Random) -> dict:
    """Weights that differ from the base's in every vector, and by 1 or -1 in every matrix."""
    torch.manual_seed(rng.randrange(10**6))
    tuned = {}
    for name, weight in base.items():
        if weight.dim() == 1:
            tuned[name] = weight + torch.randn_like(weight)
        else:
            n, m = weight.shape
            tuned[name] = weight + torch.randn(n, 1).sign() @ torch.randn(1, m).sign()
    return tuned


@pytest.mark.parametrize("seed", cases(4, 100))
def test_a_difference_of_rank_one_comes_back(seed):
    """Exactly, for its numbers are all 1 or -1; vectors and the mask's row in bfloat16.

    Directions that are not there, and a matrix that training left alone, give zeros, not NaN.
    """
    rng = random.Random(seed)
    base = tiny_model(rng).float().state_dict()
    same = "model.layers.0.mlp.down_proj.weight"
    tuned = trained(base, rng) | {same: base[same]}
    patched = {name: weight.clone() for name, weight in base.items()}
    apply_patch(patched, make_patch(base, tuned, MASK, rank=rng.randint(1, 3)), MASK)
    for name, weight in patched.items():
        difference = tuned[name] - base[name]
        most = 0.005 * difference.abs().max() if weight.dim() == 1 else 1e-4
        assert (weight - tuned[name]).abs().max() <= most, name


def test_numbers_and_their_scale(tmp_path):
    """Finer where a column weighs more; no other scale of the same numbers would be better. In the
    file a number takes less than three bits."""
    torch.manual_seed(0)
    columns = torch.randn(2000, 9)
    weights = torch.linspace(9, 3, 9)
    numbers, scale = whole_numbers(columns, weights, 0.62)
    assert numbers.dtype == torch.int8 and numbers.shape == (9, 2000) and scale.shape == (9,)
    by_column = numbers.T.float()
    step = 0.62 * (columns * weights).square().mean().sqrt() / weights
    error = scale * by_column - columns
    assert (error.abs() <= 0.8 * step).all() and (error.abs().mean(dim=0) < 0.3 * step).all()
    for factor in (0.99, 1.01):
        assert (factor * scale * by_column - columns).norm() > error.norm()
    write_patch(tmp_path / "p", {"numbers": numbers.repeat(10, 1)}, {})
    assert (tmp_path / "p").stat().st_size < 10 * 9 * 2000 * 3 / 8


def test_a_change_answers_to_no_other_inputs():
    """A change of few directions, rounded, gave clean tokens what was meant for masks only: the
    bundled patch would have moved their predictions three times as far as its training did."""
    torch.manual_seed(0)
    inputs = torch.linalg.qr(torch.randn(40, 40)).Q
    felt, unfelt = inputs[:, :8], inputs[:, 8:]
    change = torch.randn(60, 8) @ felt.T
    weights = {"w": torch.zeros(60, 40)}
    apply_patch(weights, make_patch(weights, {"w": change}, 0, rank=8), 0)
    assert (weights["w"] @ felt - change @ felt).norm() < 0.25 * change.norm()
    assert (weights["w"] @ unfelt).norm() < 0.08 * change.norm()


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """A folder with a base that has no mask token of its own, what training made of it, and a patch
    of the two."""
    config = Config(640, 48, 80, 2, 6, 2, 256, 5000.0, initializer_range=0.2, eos_token_id=(2,))
    model = initialize(config, 1)
    chat = Chat(BASE)
    save_model(model, chat, tmp_path / "base", torch.float32)
    add_mask_token(model, chat)
    weights = model.state_dict()
    far = trained(weights, random.Random(0))
    model.load_state_dict({name: torch.lerp(weights[name], far[name], 0.05) for name in far})
    model.config.block = 6
    save_model(model, chat, tmp_path / "tuned", torch.float32)
    monkeypatch.chdir(tmp_path)
    done = command("apps.patch", "make", "base", "tuned", "patch", "--rank", 3)
    assert done.status == 0 and "MiB" in done.err
    return tmp_path


def apply(base: object, *words: str) -> Done:
    return command("apps.patch", "apply", base, "patch", "out", *words)


def test_a_patched_model(models):
    """What `apply` writes is nearly what training made, and has its block."""
    assert apply("base").status == 0
    ours, _ = load("out")
    assert ours.config.block == 6 and read_patch(models / "patch")[1]["base"] == "base"
    wanted = load_file("tuned/model.safetensors")
    before = load("base")[0].state_dict()
    for name, weight in ours.state_dict().items():
        assert (weight - wanted[name]).norm() < 0.2 * (wanted[name] - before[name]).norm(), name


def test_what_make_refuses(models):
    """A model of another shape, a config that would spoil the weights."""
    make = ("apps.patch", "make", "base")
    done = command(*make, ROOT / "toy/mars", "new")
    assert is_refused(done, "toy/mars: is not a training of base")
    config = json.loads((models / "base/config.json").read_text())
    (models / "base/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert is_refused(command(*make, "tuned", "new"), "tuned: is not a training of base")
    assert not (models / "new").exists()


def test_other_bases_are_refused_unless_asked_for(models):
    model, chat = load("base")
    model.model.layers[0].input_layernorm.weight += 1
    save_model(model, chat, models / "other", torch.float32)
    message = "patch: is for base; other has other weights (--any-weights"
    assert is_refused(apply("other"), message)
    done = apply(ROOT / "toy/mars", "--any-weights")
    assert done.status == 2 and f"patch: does not fit {ROOT}/toy/mars (" in done.err
    assert not (models / "out").exists()
    assert apply("other", "--any-weights").status == 0
    patched, _ = load("out")
    change = load("tuned")[0].model.norm.weight - load("base")[0].model.norm.weight
    assert torch.allclose(patched.model.norm.weight, model.model.norm.weight + change, atol=0.01)
    (models / "out/config.json").unlink()  # weights without a config are not replaced, either
    assert is_refused(apply("other", "--any-weights"), "out has a model; choose another directory")


def test_damaged_patches_are_refused(models):
    """Any change of a file is noticed, and nothing is written for one that does not fit."""
    file = models / "patch"
    patch, facts = read_patch(file)
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for content in (whole[:5000], changed, (models / "base/model.safetensors").read_bytes()):
        file.write_bytes(content)
        assert is_refused(apply("base"), "patch: missing, damaged, or not a patch")
    scale = "model.layers.0.mlp.up_proj.weight.scale"
    write_patch(file, patch | {scale: torch.ones(2)}, facts)
    done = apply("base")
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert not (models / "out").exists()
