"""Our code against numbers from the paper's: its loss and its decoder.

tests/fixtures/README.md describes the format.
"""

import json

import pytest
from common import ROOT, unpacked
from decoding import one_token_tau
from training import gradient

from decode import generate, naive
from model import load_model
from plumbing.data import Example
from train import Recipe, lay_out, losses, naive_loss

DIRECTORY = ROOT / "tests/fixtures/reference"


@pytest.fixture(scope="module")
def reference():
    numbers = json.loads((DIRECTORY / "reference.json").read_text())
    model = load_model(DIRECTORY)
    model.config.mask_token_id = numbers["mask_id"]
    model.config.eos_token_id = (numbers["eos_id"],)
    return numbers, model


def test_loss_and_gradient_are_the_papers(reference):
    """All cases; also of `naive_loss`. Half of them are the mean over the targets of all examples.

    That the mask's logit is -inf here, and not in the paper's code, is too little to exceed the
    tolerance.
    """
    numbers, model = reference
    assert numbers["loss"]
    for case in numbers["loss"]:
        block, ar_weight = case["block_size"], case["ar_weight"]
        sequences = zip(case["input_ids"], case["prompt_lens"])
        examples = [Example(tokens, prompt) for tokens, prompt in sequences]
        num_targets = sum(len(example.response) for example in examples)
        streams = []
        of_naive = 0
        for example in examples:
            share = 1 / len(examples)
            if case["normalization"] == "token":
                share = len(example.response) / num_targets
            layout = lay_out(example, Recipe(numbers["mask_id"], block))
            layout.noisy_weight.mul_(share)
            layout.clean_weight.mul_(share)
            streams.append(layout)
            prompt = example.tokens[: example.prompt_length]
            loss = naive_loss(model, prompt, example.response, block, ar_weight)
            of_naive = of_naive + share * loss
        noisy, clean = losses(model, unpacked(streams))
        for loss in (noisy + ar_weight * clean, of_naive):
            norm = gradient(loss, model).norm()
            assert loss.item() == pytest.approx(case["loss"], rel=1e-4)
            assert norm.item() == pytest.approx(case["grad_norm"], rel=1e-3)


def test_decoding_is_the_papers(reference):
    """Token for token and forward for forward; their B candidates are our B - 1 masks."""
    numbers, model = reference
    assert numbers["decode"]
    for case in numbers["decode"]:
        tau = case["tau"]
        if tau is None:
            tau = one_token_tau(case["metric"])
        options = {
            "tau": tau,
            "block": max(1, case["block_size"] - 1),
            "max_new": numbers["max_new_tokens"],
        }
        if case["metric"] == "probability":
            assert naive(model, case["prompt"], **options) == case["tokens"]
        options["metric"] = case["metric"]
        [result] = generate(model, [case["prompt"]], **options)
        assert result.tokens == case["tokens"]
        if case["forwards"] is not None:
            assert result.forwards == case["forwards"]
