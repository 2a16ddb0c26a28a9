"""A patch: what training changed in a model, at low rank, as a small file."""

import json
import math
import os
import random
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from commands import command, is_refused
from common import BASE, MASK, cases, save_model, tiny_model
from safetensors.torch import load_file, save_file

from apps.patch import apply
from model import Config, add_mask_token, initialize, load
from plumbing.chat import Chat
from plumbing.errors import UserError
from plumbing.patch import (
    apply_patch,
    fingerprint,
    from_code,
    make_patch,
    read_patch,
    to_code,
    write_patch,
)


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


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_best_of_a_rank(rank):
    """As good as the truncated singular value decomposition, which nothing of that rank beats."""
    torch.manual_seed(0)
    difference = torch.randn(60, 40) * torch.logspace(0, -2, 40)
    patch = make_patch({"w": torch.zeros(60, 40)}, {"w": difference}, 0, rank)
    assert patch["w.scale"].shape == (rank,)
    weights = {"w": torch.zeros(60, 40)}
    apply_patch(weights, patch, 0)
    best = torch.linalg.svdvals(difference)[rank:].norm()
    assert (weights["w"] - difference).norm() <= math.hypot(1.01 * best, 0.4 * difference.norm())


def test_numbers_and_their_scale():
    """Finer where a column weighs more; no other scale of the same numbers would be better."""
    torch.manual_seed(0)
    columns = torch.randn(500, 9)
    weights = torch.linspace(9, 1, 9)
    code, scale = to_code(columns, weights)
    numbers = from_code(code, 500, 9)
    assert torch.equal(numbers, numbers.round()) and scale.shape == (9,)
    step = 0.62 * (columns * weights).square().mean().sqrt() / weights
    error = scale * numbers - columns
    assert (error.abs() <= 0.8 * step).all() and (error.abs().mean(dim=0) < 0.3 * step).all()
    for factor in (0.99, 1.01):
        assert (factor * scale * numbers - columns).norm() > error.norm()


def test_less_than_three_bits_for_each_number():
    """Of a matrix such as training makes; four would do without a code."""
    torch.manual_seed(0)
    code, _ = to_code(torch.randn(2000, 9), torch.linspace(2, 0.5, 9))
    assert code.dtype == torch.uint8 and len(code) < 2000 * 9 * 3 / 8


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


def models(tmp_path) -> tuple[str, str]:
    """Directories of a base without a mask token of its own, and of what training made of it."""
    config = Config(640, 48, 80, 2, 6, 2, 256, 5000.0, initializer_range=0.2, eos_token_id=(2,))
    model = initialize(config, 1)
    chat = Chat(BASE)
    save_model(model, chat, tmp_path / "base", torch.float32)
    add_mask_token(model, chat)
    model.load_state_dict(trained(model.state_dict(), random.Random(0)))
    model.config.block = 6
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
    assert ours.config.block == 6
    patch, facts = read_patch(file)
    assert json.loads((out / "config.json").read_text())["patch"] == fingerprint(patch)
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
    broken = load_file(file)
    code = next(name for name in broken if name.endswith(".left"))
    broken[code][-1] += 1  # of the checksum
    metadata = {"mars_patch": json.dumps(read_patch(file)[1])}
    save_file(broken, tmp_path / "code.safetensors", metadata=metadata)
    for name, facts in [("number", "5"), ("empty", "{}"), ("no-config", '{"base": "b"}')]:
        tensors = load_file(file)
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"mars_patch": facts})
    for name, message in [
        ("gone", "no such file"),
        ("other", "not a patch"),
        ("short", "damaged"),
        ("code", "damaged"),
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
    # Such a patch was made, and then could be applied to nothing:
    done = command("apps.patch", "make", tmp_path / "other", tuned, tmp_path / "new.safetensors")
    assert is_refused(
        done, f"{tuned}: is not a training of {tmp_path / 'other'} (rms_norm_eps 1e-06"
    )
    assert not out.exists() and not (tmp_path / "new.safetensors").exists()


MATRIX = "model.layers.0.mlp.up_proj.weight"  # (80, 48)
VECTOR = "model.norm.weight.difference"
ROW = "model.embed_tokens.weight.mask_row"
BOMB = zlib.compress(bytes(10**8))


def code_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        # These were applied: the model was broken, and the status 0.
        (MATRIX + ".scale", torch.full((4,), math.nan), "is not finite"),
        (MATRIX + ".scale", torch.full((4,), 3e38), "is not finite"),
        (VECTOR, torch.full((48,), math.inf).bfloat16(), "is not finite"),
        (VECTOR, torch.ones(1).bfloat16(), "expected (48,) bfloat16, found (1,) bfloat16"),
        (VECTOR, torch.tensor(1.0).bfloat16(), "expected (48,) bfloat16, found () bfloat16"),
        (VECTOR, torch.ones(48, dtype=torch.int64), "expected (48,) bfloat16, found (48,) int64"),
        (
            MATRIX + ".scale",
            torch.ones(4, dtype=torch.complex64),
            "expected (4,) float32, found (4",
        ),
        ("surplus", torch.ones(2), "tensor surplus: expected no such tensor, found (2,) float32"),
        # These were tracebacks:
        (MATRIX + ".scale", torch.ones(3), "expected (4,) float32, found (3,) float32"),
        (MATRIX + ".scale", torch.ones(0), "expected (4,) float32, found (0,) float32"),
        (MATRIX + ".left", None, "expected a code, found none"),
        (MATRIX + ".left", torch.zeros(4, 4).byte(), "expected a code, found (4, 4)"),
        (MATRIX + ".left", torch.zeros(0).byte(), "damaged; make or download it again"),
        (
            MATRIX + ".left",
            code_of(zlib.compress(bytes(319))),
            "damaged; make or download it again",
        ),
        (
            MATRIX + ".left",
            code_of(zlib.compress(bytes(320))[:-1]),
            "damaged; make or download it again",
        ),
        (MATRIX + ".right", torch.ones(9), "expected a code, found (9,) float32"),
        (ROW, None, "expected (48,) bfloat16, found none"),
        (ROW, torch.ones(47).bfloat16(), "expected (48,) bfloat16, found (47,) bfloat16"),
        # It was unpacked whole before its size was looked at:
        (MATRIX + ".left", code_of(BOMB), "damaged; make or download it again"),
    ],
)
def test_tensors_that_no_patch_has(tmp_path, name, tensor, message):
    base, tuned = models(tmp_path)
    command("apps.patch", "make", base, tuned, tmp_path / "p", "--rank", 4)
    patch, facts = read_patch(tmp_path / "p")
    patch.pop(name, None)
    if tensor is not None:
        patch[name] = tensor
    write_patch(tmp_path / "other", patch, facts)
    done = command("apps.patch", "apply", base, tmp_path / "other", tmp_path / "out")
    assert is_refused(done, message)
    assert f"{tmp_path / 'other'}: " in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"config": {"block": -1}}, "block -1: must be a whole number from 1"),
        ({"config": {"block": "4"}}, "block '4': must be a whole number from 1"),
        ({"config": {"auto_map": {"AutoModel": "x.py"}}}, "(auto_map "),
        ({"config": {"vocab_size": 10**9}}, "(vocab_size 1000000000, found 640)"),
        ({"rank": "4"}, "not a patch"),
        ({"rank": 0}, "not a patch"),
        ({"rank": 10**9}, "expected (48,) float32, found (4,) float32"),
        ({"rank": None}, "not a patch"),
        ({"base": ["x"]}, "not a patch"),
    ],
)
def test_facts_that_no_patch_has(tmp_path, changes, message):
    """The config was written as the patch had it: such a model could not be loaded."""
    base, tuned = models(tmp_path)
    command("apps.patch", "make", base, tuned, tmp_path / "p", "--rank", 4)
    patch, facts = read_patch(tmp_path / "p")
    if "config" in changes:
        changes = {"config": facts["config"] | changes["config"]}
    write_patch(tmp_path / "other", patch, facts | changes)
    done = command("apps.patch", "apply", base, tmp_path / "other", tmp_path / "out")
    assert is_refused(done, message)
    assert not (tmp_path / "out").exists()


def test_a_patch_that_lacks_a_setting(tmp_path):
    """What the patch's config lacked, the model that was written lacked, too."""
    base, tuned = models(tmp_path)
    command("apps.patch", "make", base, tuned, tmp_path / "p")
    patch, facts = read_patch(tmp_path / "p")
    del facts["config"]["rms_norm_eps"], facts["config"]["vocab_size"]
    write_patch(tmp_path / "other", patch, facts)
    done = command("apps.patch", "apply", base, tmp_path / "other", tmp_path / "out")
    assert done.status == 0, done.err
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6 and config["vocab_size"] == 640


def test_any_change_of_a_patch_is_noticed(tmp_path):
    """A vector's numbers had no checksum: one that was damaged on the way was applied."""
    base, tuned = models(tmp_path)
    file = tmp_path / "p"
    command("apps.patch", "make", base, tuned, file)
    whole = file.read_bytes()
    rng = random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[rng.randrange(header, len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged; make or download it again"):
            read_patch(file)
    file.write_bytes(whole)
    metadata = {"mars_patch": json.dumps(read_patch(file)[1] | {"license": "none"})}
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(UserError, match="damaged; make or download it again"):
        read_patch(file)


def test_a_pipe_in_place_of_a_patch(tmp_path):
    """Opening one waited for ever for somebody to write into it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not an ordinary file"):
        read_patch(tmp_path / "pipe")


def test_weights_without_a_config_are_not_overwritten(tmp_path):
    """Only config.json was looked for: the weights of another model were lost."""
    base, tuned = models(tmp_path)
    command("apps.patch", "make", base, tuned, tmp_path / "p")
    (Path(tuned) / "config.json").unlink()
    weights = Path(tuned) / "model.safetensors"
    before = weights.read_bytes()
    assert is_refused(command("apps.patch", "apply", base, tmp_path / "p", tuned), "has a model")
    assert weights.read_bytes() == before


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
