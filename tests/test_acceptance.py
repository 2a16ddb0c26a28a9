"""Acceptance: confidence, the leading run that passes tau, and draws at a temperature."""

import random
from types import SimpleNamespace

import pytest
import torch
from common import MASK, random_prompt, tiny_model
from decoding import decode_each

from decode import (
    Decoder,
    Options,
    Sequence,
    Threshold,
    confidences,
    is_plain_ar,
    naive,
    passing_lengths,
)


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
    drawn = torch.tensor([[1, 1, 0, 0]])  # at a temperature a candidate need not be the best
    found = confidences(probs, drawn, "probability")
    assert found[0].tolist() == pytest.approx([0.3, 0.1, 0.5, 1.0])
    two_rows = torch.tensor([[0.1, 0.5, 0.7], [0.9, 0.6, 0.9]])
    assert passing_lengths(two_rows, torch.tensor([0.5, 0.7]), "margin").tolist() == [3, 1]


def test_defaults():
    """An entropy of .95 nats would be a loose tau: it has a default of its own."""
    assert Options().tau == 0.95 and Options(metric="margin").tau == 0.95
    assert Options(metric="entropy").tau == 0.2
    assert Options(verify=True).tau is None and Options(verify=True, metric="entropy").tau is None
    model = tiny_model(random.Random(0))
    assert Decoder(model, Options(), 1, 10).block == 4
    model.config.block = 3
    assert Decoder(model, Options(), 1, 10).block == 3
    assert Decoder(model, Options(block=5), 1, 10).block == 5


def test_the_one_token_tau_by_hand():
    for metric in ("probability", "margin"):
        assert is_plain_ar(1.0, metric)
        assert not is_plain_ar(0.9999, metric) and not is_plain_ar(0.0, metric)
    assert is_plain_ar(0.0, "entropy") and is_plain_ar(-0.0, "entropy")
    assert not is_plain_ar(0.001, "entropy") and not is_plain_ar(5.0, "entropy")


def test_a_one_token_row_among_others_stays_one():
    """Its confidence may be exactly 1, or its entropy exactly 0: only tau decides."""
    model = tiny_model(random.Random(1))
    model.head.data *= 1e4  # every probability is 0 or 1
    prompts = [random_prompt(random.Random(i), 6) for i in (0, 1)]
    for metric, taus in (("probability", [1.0, 0.5]), ("entropy", [0.0, 0.5])):
        one, other = decode_each(model, prompts, taus, metric=metric, max_new=20)
        assert one.accepted == [1] * len(one.tokens)
        assert max(other.accepted) == 5
        assert naive(model, prompts[0], tau=1, block=4, max_new=20) == one.tokens


def accepted(logits: torch.Tensor, **options) -> list[list[int]]:
    """What `Threshold.decide` accepts of the logits (R, C, V) after a prompt in each row."""
    options = Options(**options)
    method = Threshold(logits.size(1) - 1, options, MASK, longest=300)
    config = tiny_model(random.Random(0)).config
    sequences = [Sequence([2], config, 9, options.tau, index) for index in range(len(logits))]
    for sequence in sequences:
        method.feed(sequence, room=99, num_waiting=0)
    model = SimpleNamespace(logits_at=lambda hidden, columns: logits)
    decisions = method.decide(model, torch.zeros(1), [0] * len(logits), sequences)
    return [tokens for tokens, _ in decisions]


def test_probabilities_are_not_rounded_to_bfloat16():
    """0.9995 is 1.0 in bfloat16, and would pass tau = 0.9999 there."""
    model = tiny_model(random.Random(0)).bfloat16()
    model.config.tie_word_embeddings = True
    head = torch.zeros(8, model.config.hidden_size)
    head[3] = 9.625
    model.model.embed_tokens.weight.data = head.bfloat16()
    hidden = torch.zeros(1, 2, model.config.hidden_size, dtype=torch.bfloat16)
    hidden[..., 0] = 1
    logits = model.logits_at(hidden, torch.tensor([[0, 1]]))
    inf = float("inf")
    assert logits.tolist() == [[[0, -inf, 0, 9.625, 0, 0, 0, 0]] * 2]
    assert logits.dtype == torch.float32 and logits.bfloat16().softmax(-1).max() == 1
    assert accepted(logits, tau=0.9999) == [[3]]
    assert accepted(logits, tau=0.999) == [[3, 3]]


def test_candidates_at_a_temperature_by_hand():
    """Drawn from p^(1/T), each position for itself; confidence is the drawn token's p at T = 1."""
    p = torch.tensor([0.5, 0.3, 0.2])
    draws = 3000
    logits = p.log().expand(draws, 2, 3)
    expected = draws * p**2 / (p**2).sum()
    everything = torch.tensor(accepted(logits, temperature=0.5, tau=0))
    for position in (0, 1):
        drawn = torch.bincount(everything[:, position], minlength=3)
        chi_square = ((drawn - expected) ** 2 / expected).sum()
        assert chi_square < 13.8  # p = 0.001, 2 degrees of freedom
    some = accepted(logits, temperature=0.5, tau=0.25)
    for first_two, tokens in zip(everything.tolist(), some):
        assert tokens == (first_two[:1] if first_two[1] == 2 else first_two)
    cold = accepted(logits, temperature=1e-40, tau=0)  # no overflow into NaN
    assert cold == [[0, 0]] * draws
