"""A patch: what training changed in a model, at low rank, as a small file."""

import json
import math
import random
from pathlib import Path

from plumbing.chat import Chat
from plumbing.patch import (
    apply_patch,
    fingerprint,
    from_4_bits,
    make_patch,
    read_patch,
    to_4_bits,
)

import pytest
import torch
import transformers
from commands import command, is_refused
from common import BASE, MASK, cases, save_model, tiny_model
from safetensors.torch import load_file, save_file

from apps.patch import apply
from model import Config, add_mask_token, initialize, load


def trained(base: dict, rng: random.Random, rank: int) -> dict:
    """Weights that differ from the base's by matrices of this rank, and in every vector."""
    torch.manual_seed(rng.randrange(10**6))
    tuned = {}
    for name, weight in base.items():
        if weight.dim() == 1:
            tuned[name] = weight + torch.randn_like(weight)
        else:
            n, m = weight.shape
            tuned[name] = weight + torch.randn(n, rank) @ torch.randn(rank, m)
    return tuned


@pytest.mark.parametrize("seed", cases(4, 100))
def test_a_difference_of_low_rank_comes_back(seed):
    """To the precision of 4 bits; of vectors and of the mask's embedding, to that of bfloat16."""
    rng = random.Random(seed)
    base = tiny_model(rng).float().state_dict()
    tuned = trained(base, rng, rank=2)
    patched = {name: weight.clone() for name, weight in base.items()}
    patch = make_patch(base, tuned, MASK, rank=2)
    apply_patch(patched, patch, MASK)
    for name, weight in patched.items():
        most = 0.005 * (tuned[name] - base[name]).abs().max()
        if name + ".mask_row" in patch:
            assert (weight - tuned[name])[MASK].abs().max() <= most
        if name + ".scale" in patch:
            # Numbers up to 7, each off by at most a half: (7 + .5)^2 - 7^2 = 7.25.
            most = 7.25 * patch[name + ".scale"].sum() + 1e-5
        assert (weight - tuned[name]).abs().max() <= most, name


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_best_of_a_rank(rank):
    """As good as the truncated singular value decomposition, which nothing of that rank beats."""
    torch.manual_seed(0)
    difference = torch.randn(60, 40) * torch.logspace(0, -2, 40)
    patch = make_patch({"w": torch.zeros(60, 40)}, {"w": difference}, 0, rank)
    assert len(patch["w.left"]) == 30 * rank and len(patch["w.right"]) == 20 * rank
    assert patch["w.left"].dtype == patch["w.right"].dtype == torch.uint8
    weights = {"w": torch.zeros(60, 40)}
    apply_patch(weights, patch, 0)
    best = torch.linalg.svdvals(difference)[rank:].norm()
    assert (weights["w"] - difference).norm() <= math.hypot(1.01 * best, 0.23 * difference.norm())


def test_numbers_of_4_bits():
    """All of them, in odd numbers, too; a column's largest is 7 or -7."""
    for n, rank in ((15, 1), (5, 3), (6, 3), (4, 2)):
        numbers = (torch.arange(n * rank) % 15 - 7.0).view(n, rank)
        numbers[0] = 7
        packed, scale = to_4_bits(0.5 * numbers)
        assert packed.dtype == torch.uint8 and len(packed) == (n * rank + 1) // 2
        assert torch.equal(scale * from_4_bits(packed, n, rank), 0.5 * numbers)


# ---------------------------------------------------------------------------------- the command


def models(tmp_path) -> tuple[str, str]:
    """Directories of a base without a mask token of its own, and of what training made of it."""
    config = Config(640, 48, 80, 2, 6, 2, 256, 5000.0, initializer_range=0.2, eos_token_id=(2,))
    model = initialize(config, 1)
    chat = Chat(BASE)
    save_model(model, chat, tmp_path / "base", torch.float32)
    add_mask_token(model, chat)
    model.load_state_dict(trained(model.state_dict(), random.Random(0), rank=3))
    model.config.block_size = 6
    save_model(model, chat, tmp_path / "tuned", torch.float32)
    return str(tmp_path / "base"), str(tmp_path / "tuned")


@torch.inference_mode()
def test_a_patched_model_in_transformers(tmp_path):
    """What `apply` writes has the block size and the training's rank, and equal logits there."""
    base, tuned = models(tmp_path)
    file, out = tmp_path / "p.safetensors", tmp_path / "out"
    made = command("apps.patch", "make", base, tuned, file, "--rank", 3, "--license", "MIT")
    assert made.status == 0 and "MiB" in made.err
    assert command("apps.patch", "apply", base, file, out).status == 0
    ours, _ = load(str(out))
    assert ours.config.block_size == 6
    _, facts = read_patch(file)
    assert json.loads((out / "config.json").read_text())["patch"] == facts["fingerprint"]
    mask_id = ours.config.mask_token_id
    wanted = load_file(tmp_path / "tuned/model.safetensors")
    for name, weight in ours.state_dict().items():
        assert (weight - wanted[name]).norm() < 0.2 * wanted[name].norm()

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.randint(4, 600, (2, 20))
    hidden = ours(tokens, torch.arange(20).expand(2, 20), None)
    found = ours.logits(hidden.flatten(0, 1)).view(2, 20, -1)
    expected = theirs(tokens).logits
    expected[..., mask_id] = float("-inf")
    assert torch.allclose(found, expected, atol=1e-2)
    assert facts["license"] == "MIT" and facts["base"] == base


def test_bad_patches_and_other_bases_are_refused(tmp_path):
    base, tuned = models(tmp_path)
    file, out = tmp_path / "p.safetensors", tmp_path / "out"
    command("apps.patch", "make", base, tuned, file)

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "short.safetensors").write_bytes(file.read_bytes()[:5000])
    for name, facts in [("number", "5"), ("empty", "{}"), ("no-config", '{"base": "b"}')]:
        tensors = load_file(file)
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"mars_patch": facts})
    for name, message in [
        ("gone", "no such file"),
        ("other", "not a patch"),
        ("short", "damaged"),
        ("number", "not a patch"),
        ("empty", "not a patch"),
        ("no-config", "not a patch"),
    ]:
        done = command("apps.patch", "apply", base, tmp_path / f"{name}.safetensors", out)
        assert is_refused(done, message)
    assert is_refused(command("apps.patch", "apply", base, file, tuned), "has a model")
    weights = Path(tuned) / "model.safetensors"  # it was replaced by the patch
    assert is_refused(command("apps.patch", "make", base, tuned, weights), "is there already")

    model, chat = load(base)
    model.model.layers[0].input_layernorm.weight += 1
    save_model(model, chat, tmp_path / "other", torch.float32)
    done = command("apps.patch", "apply", tmp_path / "other", file, out)
    assert is_refused(done, f"is for {base}; {tmp_path / 'other'} has other weights (--any-weights")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    done = command("apps.patch", "apply", tmp_path / "other", file, out, "--any-weights")
    assert is_refused(done, f"is for {base}, not for {tmp_path / 'other'} (rms_norm_eps 1e-06, ")
    done = command("apps.patch", "make", base, "toy/mars", tmp_path / "new.safetensors")
    assert is_refused(done, "expected")
    assert not out.exists() and not (tmp_path / "new.safetensors").exists()


def test_any_weights_applies_a_patch_to_other_weights(tmp_path):
    base, tuned = models(tmp_path)
    model, chat = load(base)
    model.model.norm.weight += 1
    save_model(model, chat, tmp_path / "other", torch.float32)
    command("apps.patch", "make", base, tuned, tmp_path / "p")
    apply(str(tmp_path / "other"), tmp_path / "p", tmp_path / "out", any_weights=True)
    patched, _ = load(str(tmp_path / "out"))
    change = load(tuned)[0].model.norm.weight - load(base)[0].model.norm.weight
    assert torch.allclose(patched.model.norm.weight, model.model.norm.weight + change, atol=0.05)


def test_fingerprints_differ_by_name_and_by_value():
    weights = {f"layer{i}": torch.full((3,), float(i)) for i in range(25)}
    seen = {fingerprint(weights), fingerprint(weights | {"layer0": torch.zeros(3) + 1e-6})}
    renamed = {("x" + name if name == "layer0" else name): w for name, w in weights.items()}
    seen.add(fingerprint(renamed))
    assert len(seen) == 3
    assert fingerprint(weights | {"model.embed_tokens.weight": torch.ones(3)}) in seen
