"""Acceptance: confidence, the leading run that passes tau, and draws at a temperature."""

import random

import pytest
import torch
from common import MASK, random_prompt, tiny_model

from decode import (
    Answer,
    Options,
    Outputs,
    check_tau,
    choose,
    confidences,
    generate,
    is_plain_ar,
    outputs_at,
    passing_lengths,
    propose,
)
from lossless import dice
from plumbing.errors import UserError


def test_acceptance_by_hand():
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    candidates = probs.argmax(-1)
    by_hand = {  # the confidences, and for each tau how many are accepted
        "probability": ([0.6, 0.9, 0.5, 1.0], {0.95: 1, 0.9: 2, 0.5: 4}),
        "margin": ([0.3, 0.8, 0.0, 1.0], {0.9: 1, 0.7: 2, 0.0: 4}),
        "entropy": ([0.8979, 0.3251, 0.6931, 0.0], {0.3: 1, 0.4: 2, 0.7: 4}),
    }
    for metric, (expected, lengths) in by_hand.items():
        confidence = confidences(probs, candidates, metric)
        assert confidence[0].tolist() == pytest.approx(expected, abs=1e-4)
        for tau, length in lengths.items():
            assert passing_lengths(confidence, torch.tensor([tau]), metric).tolist() == [length]


def test_defaults():
    assert Options().tau == 0.95 and Options(verify=True).tau == 0
    assert Options(verify=True, metric="entropy").tau == float("inf")
    model = tiny_model(random.Random(0))
    assert Answer([2], model, Options()).block == 4
    model.config.block_size = 3
    assert Answer([2], model, Options()).block == 3
    assert Answer([2], model, Options(block=5)).block == 5


def test_the_one_token_tau_by_hand():
    """1, or an entropy of 0; what no tau can be is an error."""
    for metric in ("probability", "margin"):
        assert is_plain_ar(1.0, metric)
        assert not is_plain_ar(0.9999, metric) and not is_plain_ar(0.0, metric)
        for tau in (1.01, -0.01, float("nan"), float("inf")):
            with pytest.raises(UserError, match="must be between 0 and 1"):
                check_tau(tau, metric)
    assert is_plain_ar(0.0, "entropy") and is_plain_ar(-0.0, "entropy")
    assert not is_plain_ar(0.001, "entropy") and not is_plain_ar(5.0, "entropy")
    for tau in (-0.01, float("nan")):
        with pytest.raises(UserError, match="must be at least 0"):
            check_tau(tau, "entropy")


def test_a_one_token_row_among_others_stays_one():
    """Its confidence may be exactly 1, or its entropy exactly 0: only tau decides."""
    model = tiny_model(random.Random(1))
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    head.weight.data *= 1e4  # every probability is 0 or 1
    prompts = [random_prompt(random.Random(i), 6) for i in (0, 1)]
    for metric, taus in (("probability", [1.0, 0.5]), ("entropy", [0.0, 0.5])):
        one, other = generate(model, prompts, tau=taus, metric=metric, max_new=20)
        assert one.accepted == [1] * len(one.tokens)
        assert max(other.accepted) == 5


def test_probabilities_are_not_rounded_to_bfloat16():
    """0.9995 is 1.0 in bfloat16, and would pass tau = 0.9999 there."""
    model = tiny_model(random.Random(0)).bfloat16()
    head = torch.zeros(8, model.config.hidden_size)
    head[3] = 9.5  # a probability of 0.9995
    model.config.tie_word_embeddings = True
    model.model.embed_tokens.weight.data = head.bfloat16()
    hidden = torch.zeros(1, 2, model.config.hidden_size, dtype=torch.bfloat16)
    hidden[..., 0] = 1
    model.config.mask_token_id = None
    outputs = outputs_at(model, hidden, torch.tensor([[0, 1]]))
    logits = outputs.logits
    assert logits[0, 0].tolist() == [0, 0, 0, 9.5, 0, 0, 0, 0]
    assert logits.dtype == torch.float32 and logits.bfloat16().softmax(-1).max() == 1
    model.config.mask_token_id = 1
    options = Options(tau=0.9999, block=1)
    answer = Answer([2, 3], model, options)
    assert propose(model, outputs, [answer], options)[1].tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_near_ties_are_decided_in_float32(temperature):
    """In bfloat16 the logits of two tokens are often equal, and the first of them used to win."""
    torch.manual_seed(0)
    model = tiny_model(random.Random(0), vocab_size=300).bfloat16()
    head = model.head.float()
    model.head.data = (head[:1] + 0.05 * head).bfloat16()  # all tokens are nearly alike
    hidden = 3 * torch.randn(4, 50, model.config.hidden_size).bfloat16()
    logits = model.logits(hidden.flatten(0, 1)).view(4, 50, 300)
    exact = hidden.double() @ model.head.double().T
    exact[..., MASK] = float("-inf")
    options = Options(temperature=temperature)
    batch = [Answer([2, 3], model, options, index) for index in range(4)]
    for answer, row in zip(batch, exact):
        for position, column in enumerate(row, start=2):
            column += temperature * dice(0, answer.index, position, column)
    chosen = choose(model, Outputs(hidden, logits), batch, options)
    assert torch.equal(chosen, exact.argmax(-1))
    if temperature == 0:
        assert (logits.argmax(-1) != exact.argmax(-1)).sum() > 10


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


def test_candidates_at_a_temperature_by_hand():
    """Drawn from p^(1/T), each position for itself; confidence is the drawn token's p at T = 1."""
    p = torch.tensor([0.5, 0.3, 0.2])
    options = Options(temperature=0.5, tau=0.25, block=1)
    draws = 3000
    model = tiny_model(random.Random(0))
    batch = [Answer([2], model, options, i) for i in range(draws)]
    outputs = Outputs(None, p.log().expand(draws, 2, 3))
    tokens, counts, _ = propose(model, outputs, batch, options)
    expected = draws * p**2 / (p**2).sum()
    for position in (0, 1):
        drawn = torch.bincount(tokens[:, position], minlength=3)
        assert chi_square(drawn, expected) < 13.8  # p = 0.001, 2 degrees of freedom
    assert torch.equal(counts == 2, p[tokens[:, 1]] >= 0.25)
    cold = Options(temperature=1e-40, tau=0.25, block=1)  # must not overflow into NaN
    assert (propose(model, outputs, batch, cold)[0] == 0).all()


def test_temperature_one_draws_from_the_softmax():
    """Plain AR at T = 1: the first token over many seeds against its probabilities (chi-square)."""
    model = tiny_model(random.Random(7), vocab_size=6).float()
    prompt = [2, 3, 4]
    draws = 4000
    results = generate(model, [prompt] * draws, rows=500, tau=1, temperature=1.0, max_new=1)
    counts = torch.bincount(torch.tensor([r.tokens[0] for r in results]), minlength=6)
    hidden = model(torch.tensor([prompt]), torch.arange(3)[None], None)
    expected = draws * model.logits(hidden[0, -1:])[0].softmax(-1)
    big = expected >= 5
    # p = 0.001 at 5 degrees of freedom, the most there can be
    assert chi_square(counts[big], expected[big]) < 20.5
    assert counts[1] == 0 and (counts > 0).sum() > 1
