"""Our code against numbers from other people's: transformers' logits, the paper's loss and decoder.

Runs on every directory in tests/fixtures that has a reference.json, and on those named in
MARS_FIXTURES (colon-separated); tests/fixtures/README.md describes the format.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from common import ROOT, unpacked
from decoding import one_token_tau
from safetensors.torch import load_file
from training import gradient

from decode import generate, naive
from model import load_model
from plumbing.data import Example
from train import Recipe, lay_out, losses, naive_loss

EXTRA = os.environ.get("MARS_FIXTURES", "").split(":")
HOME = [path.parent for path in sorted((ROOT / "tests/fixtures").glob("*/reference.json"))]
DIRECTORIES = HOME + [Path(path) for path in EXTRA if path]


@pytest.fixture(params=DIRECTORIES, ids=lambda path: path.name, scope="module")
def reference(request):
    numbers = json.loads((request.param / "reference.json").read_text())
    model = load_model(request.param)
    model.config.mask_token_id = numbers["mask_id"]
    model.config.eos_token_id = (numbers["eos_id"],)
    return request.param, numbers, model


def test_logits_are_those_of_transformers(reference):
    directory, numbers, model = reference
    ids = torch.tensor(numbers["logits_ids"])
    hidden = model(ids, torch.arange(ids.size(1)).expand_as(ids), None)
    model.config.mask_token_id = None  # transformers has a logit for the mask, too
    logits = model.logits(hidden.flatten(0, 1)).view(*ids.shape, -1)
    model.config.mask_token_id = numbers["mask_id"]
    expected = load_file(directory / "logits.safetensors")["logits"]
    assert (logits - expected).abs().max() < 1e-4


def test_loss_and_gradient_are_the_papers(reference):
    """All cases; also of `naive_loss`. Half of them are the mean over the targets of all examples.

    That the mask's logit is -inf here, and not in the paper's code, is too little to exceed the
    tolerance.
    """
    _, numbers, model = reference
    assert numbers["loss"]
    for case in numbers["loss"]:
        block, ar_weight = case["block_size"], case["ar_weight"]
        sequences = zip(case["input_ids"], case["prompt_lens"])
        examples = [Example(tokens, prompt) for tokens, prompt in sequences]
        num_targets = sum(example.num_targets for example in examples)
        streams = []
        of_naive = 0
        for example in examples:
            share = 1 / len(examples)
            if case["normalization"] == "token":
                share = example.num_targets / num_targets
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
    _, numbers, model = reference
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
