"""A patch: what training changed in a model, at low rank, as a small file."""

import json
import random

import pytest
import torch
from commands import command, is_refused
from common import BASE, MASK, cases, save_model, tiny_model
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
    """Exactly, for its numbers are all 1 or -1; vectors and the mask's row in bfloat16."""
    rng = random.Random(seed)
    base = tiny_model(rng).float().state_dict()
    tuned = trained(base, rng)
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


def test_matrices_that_training_left_alone():
    """All of it, or all but one direction: the other numbers are zeros, not NaN."""
    torch.manual_seed(0)
    base = {"same": torch.randn(30, 20), "one": torch.randn(30, 20)}
    tuned = base | {"one": base["one"] + torch.ones(30, 20)}
    patched = {name: weight.clone() for name, weight in base.items()}
    apply_patch(patched, make_patch(base, tuned, 0, rank=4), 0)
    for name, weight in patched.items():
        assert torch.allclose(weight, tuned[name], atol=1e-4), name


# ---------------------------------------------------------------------------------- the command


@pytest.fixture
def models(tmp_path) -> tuple[str, str]:
    """Directories of a base without a mask token of its own, and of what training made of it."""
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
    return str(tmp_path / "base"), str(tmp_path / "tuned")


@pytest.fixture
def file(models, tmp_path):
    """A patch of these models."""
    done = command("apps.patch", "make", *models, tmp_path / "patch", "--rank", 3)
    assert done.status == 0 and "MiB" in done.err
    return tmp_path / "patch"


def test_a_patched_model(models, file, tmp_path):
    """What `apply` writes is nearly what training made, and has its block."""
    base, tuned = models
    assert command("apps.patch", "apply", base, file, tmp_path / "out").status == 0
    ours, _ = load(str(tmp_path / "out"))
    assert ours.config.block == 6 and read_patch(file)[1]["base"] == base
    wanted = load_file(f"{tuned}/model.safetensors")
    before = load(base)[0].state_dict()
    for name, weight in ours.state_dict().items():
        assert (weight - wanted[name]).norm() < 0.2 * (wanted[name] - before[name]).norm(), name


def test_what_make_refuses(models, tmp_path):
    """A file that is there, a model of another shape, a config that would spoil the weights."""
    base, tuned = models
    new = tmp_path / "new"
    taken = f"{tuned}/model.safetensors"
    assert is_refused(command("apps.patch", "make", base, tuned, taken), "is there already")
    done = command("apps.patch", "make", base, "toy/mars", new)
    assert is_refused(done, f"toy/mars: is not a training of {base}")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    done = command("apps.patch", "make", base, tuned, new)
    assert is_refused(done, f"{tuned}: is not a training of {base}")
    assert not new.exists()


def test_other_bases_are_refused_unless_asked_for(models, file, tmp_path):
    base, tuned = models
    out, other = tmp_path / "out", tmp_path / "other"
    model, chat = load(base)
    model.model.layers[0].input_layernorm.weight += 1
    save_model(model, chat, other, torch.float32)
    done = command("apps.patch", "apply", other, file, out)
    assert is_refused(done, f"is for {base}; {other} has other weights (--any-weights")
    done = command("apps.patch", "apply", "toy/mars", file, out, "--any-weights")
    assert done.status == 2 and f"{file}: does not fit toy/mars (" in done.err
    assert not out.exists()
    assert command("apps.patch", "apply", other, file, out, "--any-weights").status == 0
    patched, _ = load(str(out))
    change = load(tuned)[0].model.norm.weight - load(base)[0].model.norm.weight
    assert torch.allclose(patched.model.norm.weight, model.model.norm.weight + change, atol=0.01)
    (out / "config.json").unlink()  # weights without a config are not replaced, either
    done = command("apps.patch", "apply", other, file, out, "--any-weights")
    assert is_refused(done, f"{out}: has a model")


def test_damaged_patches_are_refused(models, file, tmp_path):
    """Any change of a file is noticed, and nothing is written for one that does not fit."""
    apply = ("apps.patch", "apply", models[0])
    out = tmp_path / "out"
    patch, facts = read_patch(file)
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for content in (b"", whole[:5000], changed, (tmp_path / "base/model.safetensors").read_bytes()):
        file.write_bytes(content)
        done = command(*apply, file, out)
        assert is_refused(done, f"{file}: missing, damaged, or not a patch")
    scale = "model.layers.0.mlp.up_proj.weight.scale"
    without_scale = {name: tensor for name, tensor in patch.items() if name != scale}
    for tensors in (without_scale, patch | {scale: torch.ones(2)}):
        write_patch(file, tensors, facts)
        done = command(*apply, file, out)
        assert done.status == 2 and done.err.count("\n") == 1, done.err
        assert not list(tmp_path.glob("out/*"))
