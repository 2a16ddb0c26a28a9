"""Products in 8 bits; without VNNI, with weights in 7 bits."""

import gc
import json
import platform
import random
import weakref

import pytest
import torch
from commands import PROMPT, command, is_refused, process
from common import ROOT, THOROUGH, cases, tiny_model

from decode import generate
from model import load
from plumbing import arguments, cpu, int8
from plumbing.errors import UserError

if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("products of integers are for these CPUs", allow_module_level=True)
LARGEST = int8.largest_weight()


@pytest.mark.parametrize("seed", cases(6, 200))
def test_products_are_those_of_integers(seed):
    """For inputs of any size next to each other; to the last bit the same alone as among others.

    Where a last bit differed, lossless texts parted."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_inputs, num_outputs = rng.choice([1, 2, 31, 300, 4864]), rng.choice([1, 40, 129, 1000])
    weight = torch.randint(-LARGEST, LARGEST + 1, (num_outputs, num_inputs))
    weight[:, 0] = LARGEST  # so that the scales are 1
    bias = torch.randn(num_outputs)
    high = torch.randint(-126, 127, (51, num_inputs))
    low = torch.randint(-128, 128, (51, num_inputs))
    low[1:3] = torch.tensor([[127], [-128]])
    integers = 256 * high + low
    integers[3] = 0  # all but one
    integers[:, 0] = rng.choice([-32639, 32639])  # the largest of each position
    integers[4:6] = 0
    size = 10.0 ** torch.randint(-25, 25, (51, 1)).double()
    x = (integers * size).float()
    x[5] = 1e-40  # subnormal: as good as zero
    product = int8.Int8Product(weight.float(), bias)
    found = product(x)
    allowed = 1e-6 * ((integers.abs() @ weight.abs().T) * size + bias.abs())
    assert ((found - (integers @ weight.T) * size - bias).abs() <= allowed).all()
    for T in range(1, 51):
        first = rng.randrange(52 - T)
        assert torch.equal(product(x[None, first : first + T])[0], found[first : first + T])


def test_numbers_between_integers_are_rounded():
    """Weights to 8 bits (or 7), inputs to 16, even where one input is a thousand times the rest."""
    torch.manual_seed(0)
    weight = torch.randn(300, 70).bfloat16()  # more outputs than are rounded at a time
    x = torch.randn(9, 70)
    x[3, 5] = 1000
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
    rounded = (weight / scale).round() * scale
    off = int8.Int8Product(weight, None)(x) - x @ rounded.T
    step = x.abs().amax(1, keepdim=True) / 32639
    assert (off.abs() <= 0.51 * step * rounded.abs().sum(1) + 1e-4).all()


def test_lossless_is_the_text_of_tau_1():
    model, chat = load(dtype=torch.int8)
    lines = (ROOT / "toy/test.jsonl").read_text().splitlines()[: 500 if THOROUGH else 30]
    questions = [json.loads(line)["prompt"] for line in lines]
    prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in questions]
    lossless, plain = [generate(model, prompts, 32, tau=tau) for tau in (None, 1.0)]
    assert [one.tokens for one in lossless] == [one.tokens for one in plain]
    assert sum(one.forwards for one in lossless) < 0.7 * sum(one.forwards for one in plain)


@torch.inference_mode()
@pytest.mark.parametrize("seed", [3, 4], ids=["a head of its own", "tied"])
def test_only_the_copy_is_in_8_bits(seed):
    """It lets go of the matrices, and the model that it was made from stays as it was.

    Its embedding was a view of the model's file, so all of the file stayed in memory.
    """
    model = tiny_model(random.Random(seed), vocab_size=64).bfloat16()
    positions = torch.arange(9)[None]
    before = model.logits(model(positions, positions, None)[0])
    copy = cpu.int8_copy(model)
    assert torch.equal(model.logits(model(positions, positions, None)[0]), before)
    after = copy.logits(copy(positions, positions, None)[0])
    assert after.dtype == torch.float32
    seen = before.isfinite()
    assert (after - before)[seen].abs().max() < 0.1 * before[seen].abs().max()
    weights = [weakref.ref(weight) for weight in model.parameters()]
    del model
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert cpu.fast_copy(copy, is_compiled=False) is copy
    with pytest.raises(UserError, match="--compile: not in 8 bits"):
        cpu.fast_copy(copy, is_compiled=True)


def test_where_there_is_no_int8(monkeypatch):
    with pytest.raises(UserError, match="only on a CPU, not on mps; use bfloat16 or float32"):
        int8.float_dtype(torch.int8, torch.device("mps"))
    monkeypatch.setattr(int8, "is_exact", lambda largest: False)
    int8.largest_weight.cache_clear()
    with pytest.raises(UserError, match="not on this CPU; use bfloat16 or float32"):
        int8.float_dtype(torch.int8, torch.device("cpu"))
    int8.largest_weight.cache_clear()
    done = command("train", "--data", "x", "--out", "y", "--dtype", "int8")
    assert done.status == 2 and "invalid choice: 'int8'" in done.err


def test_without_vnni():
    """The largest sums are wrong for weights in 8 bits, and right for 7, which are used then."""
    program = "from plumbing import int8; print(int8.is_exact(127), int8.largest_weight())"
    done = process("-c", program, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.out == "False 63\n"


@pytest.mark.parametrize(
    "device, largest, has_bfloat16, num_weights, expected",
    [
        ("cpu", 127, True, 10**8, torch.int8),
        ("cpu", 127, True, 10**8 - 1, torch.float32),
        ("cpu", 63, True, 10**9, torch.bfloat16),
        ("cpu", 63, False, 10**9, torch.float32),
        ("cuda:1", 127, True, 10, torch.bfloat16),
        ("mps", 127, True, 10**9, torch.float32),
    ],
)
def test_auto(monkeypatch, capsys, device, largest, has_bfloat16, num_weights, expected):
    monkeypatch.setattr(arguments, "largest_weight", lambda: largest)
    monkeypatch.setattr(arguments, "can_pack", lambda dtype: has_bfloat16)
    assert arguments.fastest_dtype(torch.device(device), num_weights) == expected
    is_noted = device == "cpu" and expected != torch.float32
    assert ("--dtype float32" in capsys.readouterr().err) == is_noted


def test_auto_looks_at_the_model(monkeypatch):
    monkeypatch.setattr(arguments, "largest_weight", lambda: 127)
    assert "8 bits" not in command("decode", "--prompt", PROMPT).err, "the toy stays in float32"
    num_weights = sum(weight.numel() for weight in load()[0].parameters())
    monkeypatch.setattr(arguments, "LARGE", num_weights)
    assert command("decode", "--prompt", PROMPT).err.count("in 8 bits") == 1
    assert "8 bits" not in command("decode", "--prompt", PROMPT, "--dtype", "float32").err


def test_speed_names_the_dtype():
    """It said bfloat16 for int8."""
    words = "--limit 1 --rounds 1 --max-new 2 --dtype int8".split()
    assert "\ncpu, torch.int8, " in command("bench.speed", *words).out
    assert is_refused(command("bench.speed", *words, "--shape", "0.5B"), "not in 8 bits")
