"""The faster drop-ins of plumbing/attention.py change nothing but the time."""

import random
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from common import cases, random_prompt, tiny_model
from decoding import decode_each, outcome

from decode import generate
from model import attend
from plumbing import attention


def random_attention(rng: random.Random, group: int, T: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and a mask of random shapes; every query sees something."""
    torch.manual_seed(rng.randrange(10**6))
    R, kv_heads, head_dim = rng.randint(1, 3), rng.randint(1, 3), rng.choice([2, 4, 8])
    S = T + rng.randint(0, 40)
    q = torch.randn(R, kv_heads * group, T, head_dim).double()
    k, v = torch.randn(2, R, kv_heads, S, head_dim).double()
    mask = torch.rand(R, 1, T, S) < rng.choice([0.1, 0.5, 0.9])
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize("threads", [1, 64])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_attend_folded_is_attend(threads, group):
    """On both sides of NARROW; one thread folds the heads, of 64 threads some would be idle."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for seed in cases(6, 60):
        rng = random.Random(seed)
        for T in (1, rng.randint(2, 12), attention.NARROW, attention.NARROW + 1):
            q, k, v, mask = random_attention(rng, group, T)
            config = SimpleNamespace(num_attention_heads=q.size(1), num_key_value_heads=k.size(1))
            folded = attention.additive_mask(mask, config, threads, q.dtype)
            with mock.patch("torch.nn.functional.scaled_dot_product_attention", wraps=sdpa) as spy:
                found = attention.attend_folded(q, k, v, folded)
            assert found.shape == q.shape
            assert torch.allclose(found, attend(q, k, v, mask), rtol=0, atol=1e-12), (seed, T)
            is_folded = threads == 1 and group > 1 and T <= attention.NARROW
            num_heads = spy.call_args.args[0].size(1)  # that torch's kernel got
            assert num_heads == (k.size(1) if is_folded else q.size(1))


def test_compiled_is_eager(monkeypatch):
    """The whole prediction is one graph. Its static shapes change nothing that counts, and are few:
    two widths, one span."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def traced(forward, dynamic, options):
        return compile_(forward, dynamic=dynamic, backend=counter, fullgraph=True)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    for seed in cases(2, 10):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 40)) for _ in range(5)]
        options = {"rows": 2, "block": rng.randint(1, 4), "max_new": 30}
        options["temperature"] = rng.choice([0.0, 1.0])
        for way in ({"tau": 1}, {}, {"tau": 1, "block_cache": 6}):
            taus = [None] * 5 if way == {} else [0.2, 1.0, 0.3, 0.2, 1.0]
            eager = decode_each(model, prompts, taus, **options, **way)
            static = decode_each(model, prompts, taus, **options, **way, compile=True)
            assert list(map(outcome, static)) == list(map(outcome, eager))
        assert max(tokens for a in eager for tokens in a.num_accepted) > 1
    assert 0 < counter.frame_count <= 8 * len(cases(2, 10))


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")),
    reason="no C++ compiler",
)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inductor_is_eager(dtype):
    """The real compiler, once. In bfloat16 it stumbled over the packed matrices, and the model
    could not be trained afterwards."""
    torch._dynamo.reset()
    model = tiny_model(random.Random(2)).to(dtype).requires_grad_(False)  # of one layer
    [eager] = generate(model, [[2, 3]], tau=0.2, max_new=8)
    [static] = generate(model, [[2, 3]], tau=0.2, max_new=8, compile=True)
    assert static.forwards > 1  # the first is never compiled
    if dtype == torch.float64:
        assert outcome(static) == outcome(eager)
    model.requires_grad_()
    model.logits(model(torch.tensor([[2, 3]]), torch.arange(2)[None], None)[0]).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_two_compiled_models_do_not_share_a_graph(monkeypatch):
    """They had one: guards on modules are skipped, so the second got the first one's epsilon."""
    torch._dynamo.reset()
    compile_ = torch.compile

    def with_real_guards(forward, dynamic, options):
        options = {"guard_filter_fn": options["guard_filter_fn"]}
        return compile_(forward, dynamic=dynamic, options=options, backend="eager")

    monkeypatch.setattr(torch, "compile", with_real_guards)
    texts = []
    for eps in (1e-6, 30.0):
        model = tiny_model(random.Random(7)).requires_grad_(False)
        model.config.rms_norm_eps = eps
        for module in model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.eps = eps
        how = {"tau": 0.3, "temperature": 1.0, "max_new": 30}
        [eager] = generate(model, [[2, 3] * 9], **how)
        [static] = generate(model, [[2, 3] * 9], **how, compile=True)
        assert outcome(static) == outcome(eager)
        texts.append(eager.tokens)
    assert texts[0] != texts[1]
