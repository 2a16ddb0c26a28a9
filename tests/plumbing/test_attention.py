"""The faster drop-ins of plumbing/attention.py change nothing but the time."""

import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from commands import MARS, PROMPT, process
from common import ROOT, cases, random_prompt, tiny_model, toy_prompts
from torch import nn

from decode import generate, naive
from model import attend, load
from plumbing import attention


def random_attention(rng: random.Random, group: int, T: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and a mask of random shapes; every query sees something."""
    R = rng.randint(1, 3)
    num_kv_heads = rng.randint(1, 3)
    head_dim = rng.choice([2, 4, 8])
    S = T + rng.randint(0, 40)
    generator = torch.Generator().manual_seed(rng.randrange(10**6))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(R, num_kv_heads * group, T, head_dim)
    k = normal(R, num_kv_heads, S, head_dim)
    v = normal(R, num_kv_heads, S, head_dim)
    mask = torch.rand(R, 1, T, S, generator=generator) < rng.choice([0.1, 0.5, 0.9])
    mask[..., 0] = True
    return q, k, v, mask


def by_the_formula(q, k, v, mask) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, one query at a time."""
    y = torch.empty_like(q)
    group = q.size(1) // k.size(1)
    for row in range(q.size(0)):
        for head in range(q.size(1)):
            keys = k[row, head // group]
            values = v[row, head // group]
            for t in range(q.size(2)):
                seen = mask[row, 0, t]
                scores = keys[seen] @ q[row, head, t] / q.size(-1) ** 0.5
                y[row, head, t] = scores.softmax(0) @ values[seen]
    return y


def fold_and_attend(q, k, v, mask, num_threads: int) -> torch.Tensor:
    config = SimpleNamespace(num_attention_heads=q.size(1), num_key_value_heads=k.size(1))
    folded = attention.fold(mask, config, num_threads, q.dtype)
    return attention.attend_folded(q, k, v, folded)


@pytest.mark.parametrize("threads", [1, 64])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_attend_folded_is_attend_is_the_formula(monkeypatch, threads, group):
    """On both sides of NARROW; one thread folds the heads, of 64 threads some would be idle."""
    kernel = torch.nn.functional.scaled_dot_product_attention
    heads = []

    def counted(q, *others, **options):
        heads.append(q.size(1))
        return kernel(q, *others, **options)

    for seed in cases(6, 60):
        rng = random.Random(seed)
        for T in (1, rng.randint(2, 12), attention.NARROW, attention.NARROW + 1):
            q, k, v, mask = random_attention(rng, group, T)
            expected = attend(q, k, v, mask)
            if T <= 12:
                assert torch.allclose(expected, by_the_formula(q, k, v, mask), rtol=0, atol=1e-12)
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
                found = fold_and_attend(q, k, v, mask, threads)
            assert found.shape == q.shape
            assert torch.allclose(found, expected, rtol=0, atol=1e-12), (seed, T)
            is_folded = threads == 1 and group > 1 and T <= attention.NARROW
            assert heads.pop() == (k.size(1) if is_folded else q.size(1))


@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_bfloat16_on_a_cpu_leaves_no_block_of_fewer_than_four(monkeypatch, group):
    """There torch adds up in another order. AR in rows of 8 had 3 query heads at one position, the
    check of its guesses had 75. That and the span made 25 of SmolLM2's 64 answers differ."""
    kernel = torch.nn.functional.scaled_dot_product_attention
    sizes = []

    def recorded(q, *others, **options):
        sizes.append(q.size(2))
        return kernel(q, *others, **options)

    for seed in cases(4, 40):
        rng = random.Random(seed)
        for T in (1, 2, rng.randint(3, 12), rng.randint(90, 130)):
            *qkv, mask = random_attention(rng, group, T)
            q, k, v = (x.bfloat16() for x in qkv)
            expected = attend(q.double(), k.double(), v.double(), mask)
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
                found = fold_and_attend(q, k, v, mask, num_threads=1)
            assert sizes.pop() % 4 == 0
            assert torch.allclose(found.double(), expected, rtol=0.02, atol=0.02), (seed, T)


@pytest.mark.parametrize("narrow", [0, 3, 96])
def test_folded_heads_decode_the_same_tokens(monkeypatch, narrow):
    """In no forward, in those of few positions, in nearly all; one thread, so that none idles."""
    monkeypatch.setattr(attention, "NARROW", narrow)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    num_with_groups = 0
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = tiny_model(rng)
        if model.config.num_attention_heads > model.config.num_key_value_heads:
            num_with_groups += 1
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(3)]
        options = {"tau": 0.3, "block": rng.randint(1, 4), "max_new": 12}
        for answer, prompt in zip(generate(model, prompts, rows=2, **options), prompts):
            assert answer.tokens == naive(model, prompt, **options).tokens
    assert num_with_groups


def test_compiled_is_eager(monkeypatch):
    """Static shapes change nothing that counts, and are few: two widths, one span."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def traced(model):
        return torch.compile(model.forward, dynamic=False, backend=counter)

    monkeypatch.setattr(attention, "compile_forward", traced)
    for seed in cases(2, 10):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 4)
        prompts = [random_prompt(rng, rng.randint(1, 40)) for _ in range(5)]
        options = {"block": block, "max_new": 30, "tau": [0.2, 1.0, 0.3, 0.2, 1.0]}
        for way in ({}, {"verify": True}, {"block_cache": 6}):
            eager = generate(model, prompts, rows=2, **options, **way)
            static = generate(model, prompts, rows=2, **options, **way, compile=True)
            assert [a.tokens for a in static] == [a.tokens for a in eager]
            assert [a.accepted for a in static] == [a.accepted for a in eager]
        assert max(tokens for a in eager for tokens in a.accepted) > 1
    assert 0 < counter.frame_count <= 6 * len(cases(2, 10))


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")),
    reason="no C++ compiler",
)


@needs_compiler
def test_inductor_decodes_a_problem():
    """The real compiler, once."""
    torch._dynamo.reset()
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompt = toy_prompts(chat)[0]
    [eager] = generate(model, [prompt], tau=0.8)
    [static] = generate(model, [prompt], tau=0.8, compile=True)
    assert static.tokens == eager.tokens and static.accepted == eager.accepted


def test_a_model_in_training_keeps_its_layout():
    """Decoding stores weights by columns where that is faster; AdamW pairs weights and moments by
    their place in memory, so in the middle of training it would mix them up."""
    model = tiny_model(random.Random(3)).float()
    strides = [weight.stride() for weight in model.parameters()]
    [before] = generate(model, [[2, 3]], tau=0.2, max_new=9)
    assert [weight.stride() for weight in model.parameters()] == strides
    values = [weight.clone() for weight in model.requires_grad_(False).parameters()]
    [after] = generate(model, [[2, 3]], tau=0.2, max_new=9)
    assert [weight.stride() for weight in model.parameters()] != strides
    assert all(map(torch.equal, model.parameters(), values)) and before.tokens == after.tokens


needs_bfloat16 = pytest.mark.skipif(
    not (attention.ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN has no bfloat16 on this CPU",
)


@needs_bfloat16
@torch.inference_mode()
def test_packed_matrices_are_the_same_matrices():
    """In bfloat16 on a CPU, for any number of positions, tied embeddings or not."""
    for seed in cases(4, 20):
        rng = random.Random(seed)
        model = tiny_model(rng, vocab_size=rng.choice([8, 64])).bfloat16().requires_grad_(False)
        outputs = {}
        for is_packed in (False, True):
            if is_packed:
                attention.pack_matrices(model)
                linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
                forwards = [model.linear, *(module.forward for module in linears)]
                assert all(isinstance(one, attention.PackedProduct) for one in forwards)
            for T in (1, 2, 9, 25, 70):
                tokens = torch.full((1, T), 3)
                hidden = model(tokens, torch.arange(T)[None], None)
                outputs[is_packed, T] = hidden, model.logits(hidden[0])
        for T in (1, 2, 9, 25, 70):
            torch.testing.assert_close(outputs[True, T], outputs[False, T])


@needs_bfloat16
def test_a_model_in_training_is_not_packed(monkeypatch):
    """Its matrices change at every step, and the copies would not."""
    monkeypatch.setattr(attention.PackedProduct, "__init__", None)
    generate(tiny_model(random.Random(3)).bfloat16(), [[2, 3]], tau=0.2, max_new=3)


@needs_bfloat16
@needs_compiler
def test_a_packed_model_can_still_be_trained_and_compiled():
    """The copies of its matrices have no gradients, and torch.compile stumbled over them."""
    model = tiny_model(random.Random(3)).bfloat16().requires_grad_(False)
    [plain] = generate(model, [[2, 3]], tau=0.2, max_new=8)
    [compiled] = generate(model, [[2, 3]], tau=0.2, max_new=8, compile=True)
    assert len(compiled.tokens) == len(plain.tokens)
    model.requires_grad_()
    model.logits(model(torch.tensor([[2, 3]]), torch.arange(2)[None], None)[0]).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_bfloat16_on_an_older_cpu():
    """oneDNN has no bfloat16 before AVX-512: packing ended in a traceback."""
    words = ("decode.py", *MARS, "--dtype", "bfloat16", "--device", "cpu", "--verify")
    done = process(*words, "--prompt", PROMPT, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.status == 0 and "The answer is 43." in done.out, done.err


@needs_bfloat16
def test_a_model_is_packed_once(monkeypatch):
    """Every conversation and every call of generate makes a decoder."""
    model = tiny_model(random.Random(3)).bfloat16().requires_grad_(False)
    generate(model, [[2, 3]], tau=0.2, max_new=3)
    monkeypatch.setattr(attention.PackedProduct, "__init__", None)
    generate(model, [[2, 3]], tau=0.2, max_new=3)


@pytest.mark.parametrize(
    "dtype, compile, expected",
    [(torch.float32, False, 64), (torch.bfloat16, False, 192), (torch.bfloat16, True, 256)],
)
def test_spans_are_multiples_of(dtype, compile, expected):
    model = tiny_model(random.Random(0)).to(dtype)
    assert attention.span_unit(model, compile) == expected


@torch.inference_mode()
def test_in_bfloat16_more_hidden_slots_change_no_bit():
    """Where the span of a row's neighbour is longer, torch adds up over more blocks of 192 slots;
    in other units of the span the results would differ."""
    unit = 192
    model = tiny_model(random.Random(0)).bfloat16()
    assert attention.span_unit(model, compile=False) == unit
    torch.manual_seed(0)
    q = torch.randn(1, 2, 3, 32).bfloat16()
    k = torch.randn(1, 1, 4 * unit, 32).bfloat16()
    v = torch.randn(1, 1, 4 * unit, 32).bfloat16()
    mask = torch.rand(1, 1, 3, 4 * unit) < 0.5
    mask[..., unit - 5 :] = False
    outputs = []
    for span in (unit, 2 * unit, 3 * unit, 4 * unit):
        outputs.append(fold_and_attend(q, k[:, :, :span], v[:, :, :span], mask[..., :span], 1))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@needs_bfloat16
@torch.inference_mode()
def test_in_bfloat16_a_single_position_is_rounded_like_two():
    """It had another kernel: at one row a third of SmolLM2's lossless answers were not those of
    tau 1."""
    torch.manual_seed(0)
    for shape in [(1536, 576), (576, 1536), (192, 576), (2000, 576)] * 5:
        product = attention.PackedProduct(torch.randn(shape).bfloat16())
        x = torch.randn(1, 2, shape[1]).bfloat16()
        expected = product(x)
        assert torch.equal(product(x[:, :1]), expected[:, :1])
        assert torch.equal(product(x[0, :1]), expected[0, :1])  # the head's hidden states are 2-D
