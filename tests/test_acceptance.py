"""Acceptance: confidence, and the leading run that passes tau."""

import random

import pytest
import torch
from common import endless_model, random_prompt, tiny_model
from decoding import decode_each

from decode import Decoder, Options, confidences, generate, naive, passing_lengths


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


def test_a_confidence_of_tau_passes():
    """For the loop and for naive. Here each of 7 tokens has the same probability, exactly."""
    model = endless_model()
    model.head.data.zero_()
    tau = torch.zeros(7).double().softmax(0)[0].item()
    [result] = generate(model, [[2]], tau=tau, block=3, max_new=8)
    assert result.accepted == [4, 4]
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    naive(model, [2], tau, block=3, max_new=8)
    assert len(forwards) == 2


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


def test_a_one_token_row_among_others_stays_one():
    """Its confidence may be exactly 1, or its entropy exactly 0: only tau decides."""
    model = tiny_model(random.Random(1))
    model.head.data *= 1e4  # every probability is 0 or 1
    prompts = [random_prompt(random.Random(i), 6) for i in (0, 1)]
    for metric, taus in (("probability", [1.0, 0.9999]), ("entropy", [0.0, 0.001])):
        one, other = decode_each(model, prompts, taus, metric=metric, max_new=20)
        assert one.accepted == [1] * len(one.tokens)
        assert max(other.accepted) == 5
        assert naive(model, prompts[0], tau=1, block=4, max_new=20) == one.tokens


def test_a_tiny_temperature_is_greedy():
    """No overflow into NaN."""
    model = tiny_model(random.Random(1))
    for options in ({"tau": 0.3}, {"verify": True}):
        [cold] = generate(model, [[2, 3]], temperature=1e-40, max_new=20, **options)
        [greedy] = generate(model, [[2, 3]], max_new=20, **options)
        assert cold.tokens == greedy.tokens
