"""Products in 8 bits; without VNNI, with weights in 7 bits."""

import gc
import json
import platform
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from commands import command, process
from common import ROOT, THOROUGH, tiny_model, toy_prompts

from decode import Threshold, generate
from model import load
from plumbing import cpu, int8
from plumbing.errors import UserError

if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("products of integers are for these CPUs", allow_module_level=True)
LARGEST = int8.largest_weight()


@pytest.mark.parametrize("positions", [1, 3, 4, 33])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (16, 40), (300, 70), (4864, 129)])
def test_integer_products_are_exact(positions, inputs, outputs):
    torch.manual_seed(positions)
    weight = torch.randint(-LARGEST, LARGEST + 1, (outputs, inputs))
    weight[:, 0] = LARGEST  # so that the scales are 1
    x = torch.randint(0, 256, (positions, inputs), dtype=torch.uint8)
    packed, scale = int8.pack(weight.float(), LARGEST)
    found = int8.integer_product(x, packed, scale, torch.zeros(outputs, dtype=torch.int))
    assert torch.equal(found.double(), (x.double() - 128) @ weight.double().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [20, 100])
def test_a_product_is_off_by_its_rounding_only(inputs, dtype):
    """For zeros, subnormal numbers and one huge one, too; alone as among others."""
    torch.manual_seed(inputs)
    weight, bias = torch.randn(30, inputs), torch.randn(30)
    weight[3] = 0
    x = torch.randn(7, inputs)
    x[1] = 0
    x[2] *= 1e-40
    x[3, 0] = 1e6
    x[4, inputs - 1] = -1e30
    x[5, inputs - 1] = 1000
    x = x.to(dtype)
    product = int8.Int8Product(weight, bias, torch.arange(inputs))
    found = product(x)
    assert found.dtype == dtype
    expected = x.double() @ weight.double().T + bias
    largest_x = x.double().abs().amax(1, keepdim=True)
    largest_w = weight.double().abs().amax(1)
    largest_sum = largest_x * largest_w * inputs + bias.abs()
    of_float = torch.finfo(dtype).eps * largest_sum
    rounded = x[:, : -int8.NUM_IN_FLOAT].double()  # those with the largest inputs are not
    largest_rounded = rounded.abs().amax(1, keepdim=True) * largest_w * rounded.size(1)
    of_integers = (0.51 / 127 + 0.51 / LARGEST) * largest_rounded
    assert ((found - expected).abs() <= of_integers + of_float).all()
    alone = torch.cat([product(position[None]) for position in x])
    assert torch.equal(alone, found)


def test_a_position_is_the_same_however_many_are_computed(monkeypatch):
    """To the last bit. Where the order of a sum changed that, it made another integer, and in the
    end other numbers: of a Qwen2.5's 60 lossless texts of 40 tokens 25 were not tau 1's."""
    seen = []
    accept = Threshold.accept

    def recorded(self, sequence, tokens, confidences):
        seen.append((sequence.index, tokens, confidences))
        return accept(self, sequence, tokens, confidences)

    monkeypatch.setattr(Threshold, "accept", recorded)
    model, chat = load(dtype=torch.int8)
    alone, together = [], []
    for rows, found in ((1, alone), (5, together)):
        generate(model, toy_prompts(chat)[:5], rows, tau=0.9)
        found += sorted(seen, key=lambda one: one[0])
        seen.clear()
    assert alone == together


def test_lossless_is_the_text_of_tau_1():
    model, chat = load(dtype=torch.int8)
    lines = (ROOT / "toy/test.jsonl").read_text().splitlines()[: 500 if THOROUGH else 30]
    questions = [json.loads(line)["prompt"] for line in lines]
    prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in questions]
    lossless, plain = [generate(model, prompts, 32, tau=tau) for tau in (None, 1.0)]
    assert [one.tokens for one in lossless] == [one.tokens for one in plain]
    assert sum(one.forwards for one in lossless) < 0.7 * sum(one.forwards for one in plain)


@torch.inference_mode()
def test_only_the_copy_is_in_8_bits():
    """It lets go of the matrices, and the model that it was made from stays as it was.

    Its embedding was a view of the model's file, so all of the file stayed in memory.
    """
    model = tiny_model(random.Random(4), vocab_size=64).float()
    expected = model(torch.tensor([[2, 3]]), torch.tensor([[0, 1]]), None)
    copy = cpu.int8_copy(model, SimpleNamespace(encode_prompt=lambda _: [2, 3, 4]))
    assert torch.equal(model(torch.tensor([[2, 3]]), torch.tensor([[0, 1]]), None), expected)
    matrix = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    embedding = model.model.embed_tokens.weight.data_ptr()
    assert copy.model.embed_tokens.weight.data_ptr() != embedding
    del model
    gc.collect()
    assert matrix() is None and cpu.fast_copy(copy, is_compiled=False) is copy
    with pytest.raises(UserError, match="--compile: not with --dtype int8"):
        cpu.fast_copy(copy, is_compiled=True)


def test_where_there_is_no_int8(monkeypatch):
    with pytest.raises(UserError, match="only on a CPU, not on mps; use bfloat16 or float32"):
        int8.check_int8(torch.device("mps"))
    monkeypatch.setattr(int8, "is_exact", lambda largest: False)
    int8.largest_weight.cache_clear()
    with pytest.raises(UserError, match="not on this CPU; use bfloat16 or float32"):
        int8.check_int8(torch.device("cpu"))
    int8.largest_weight.cache_clear()
    done = command("train", "--data", "x", "--out", "y", "--dtype", "int8")
    assert done.status == 2 and "invalid choice: 'int8'" in done.err


def test_without_vnni():
    """The largest sums are wrong for weights in 8 bits, and right for 7, which are used then."""
    program = "from plumbing import int8; print(int8.is_exact(127), int8.largest_weight())"
    done = process("-c", program, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.out == "False 63\n"
