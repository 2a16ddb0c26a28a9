"""What makes a CPU fast: other layouts of the weights, next to the caller's."""

import random

import pytest
import torch
from commands import MARS, PROMPT, process
from common import tiny_model

from decode import generate
from plumbing import cpu

DTYPES = [torch.float32, torch.bfloat16]


def tiny(seed: int, dtype: torch.dtype, shape=3):
    """Random weights of one shape, with matrices that are tall."""
    model = tiny_model(random.Random(shape), vocab_size=64)
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_(0.3, 0.7)
    return model.to(dtype).requires_grad_(False)


def answers(model) -> list[list[int]]:
    return [result.tokens for result in generate(model, [[2, 3], [4] * 9], tau=0.2, max_new=12)]


@torch.inference_mode()
def outputs(model, T: int = 5) -> torch.Tensor:
    tokens = 3 + torch.arange(T)[None]
    hidden = model(tokens, torch.arange(T)[None], None)
    return model.logits_at(hidden, torch.arange(T)[None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [3, 4], ids=["a head of its own", "tied"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("small", [cpu.SMALL, 0])
def test_a_fast_copy_is_the_same_model(dtype, shape, is_compiled, small, monkeypatch):
    """For any number of positions; it shares with the model what is not a matrix of a product."""
    monkeypatch.setattr(cpu, "SMALL", small)
    model = tiny(0, dtype, shape)
    fast = cpu.fast_copy(model, is_compiled)
    assert cpu.fast_copy(fast, is_compiled) is fast, "so decoders can share one"
    for T in (1, 2, 9, 25, 60):
        found, expected = outputs(fast, T), outputs(model, T)
        seen = expected > float("-inf")
        assert torch.equal(seen, found > float("-inf"))
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert (found - expected)[seen].abs().max() < tolerance * expected[seen].abs().max()
    for name, weight in fast.named_parameters():
        assert weight.data_ptr() == model.get_parameter(name).data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_leaves_the_callers_model_alone(dtype):
    """With no new attributes and its weights as they were, it can be saved, copied and trained."""
    model = tiny(0, dtype)
    plain = outputs(model)
    attributes = [set(vars(module)) for module in model.modules()]
    answers(model)
    assert all(weight.is_contiguous() for weight in model.parameters())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(outputs(model), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_decoder_uses_the_weights_as_they_are_then(dtype):
    model, other = tiny(0, dtype), tiny(99, dtype)
    before = answers(model)
    model.load_state_dict(other.state_dict())
    assert answers(model) == answers(other) != before


def test_bfloat16_on_an_older_cpu():
    """Without bfloat16 in oneDNN (before AVX-512) a model decodes in its plain layout, slowly."""
    words = ("decode.py", *MARS, "--dtype", "bfloat16", "--device", "cpu")
    done = process(*words, "--prompt", PROMPT, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.status == 0 and "The answer is 43." in done.out, done.err
    assert "this CPU is slow in bfloat16: --dtype float32" in done.err
