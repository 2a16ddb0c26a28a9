"""Learning to look ahead without drifting: free directions, the loss, and what a run changes."""

import json
import random

import pytest
import torch
import torch.nn.functional as F
from commands import command, is_refused
from common import ROOT, cases, rows_of, tiny_model, unpacked
from training import random_example

import train
from apps import look_ahead
from apps.look_ahead import PENALTY, free_directions, losses, second_moments
from bench import common
from decode import generate
from model import load
from plumbing import data


def test_free_directions_are_those_of_ridge_regression():
    """With all directions, the change D becomes D M (M + PENALTY C)⁻¹: it stays at masks."""
    for seed in cases(5, 50):
        generator = torch.Generator().manual_seed(seed)
        m = 7
        clean, masks = (torch.randn(m, m, generator=generator).double() for _ in range(2))
        clean, masks = clean @ clean.T, masks @ masks.T
        right, projection = free_directions(clean, masks, rank=m)
        change = torch.randn(3, m, generator=generator).double()
        ridge = 0.01 * (clean.diagonal() + clean.diagonal().median()).diag()
        expected = change @ masks @ torch.linalg.inv(masks + PENALTY * (clean + ridge))
        assert torch.allclose(change @ projection @ right, expected)
        best, _ = free_directions(clean, masks, rank=2)
        at_masks, at_clean = (best @ moments @ best.T for moments in (masks, clean + ridge))
        assert torch.allclose(at_masks + PENALTY * at_clean, torch.eye(2).double())
        assert torch.allclose(best.T @ best, right[:2].T @ right[:2])
        assert at_masks[0, 0] > at_masks[1, 1]


def test_some_inputs_are_much_larger_than_the_others():
    """In float32 the second run with a real model stopped: clean tokens' moments, which have
    inputs of a million times the others' variance, were not positive definite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=generator)
    x[:, :10] += 1e4 * torch.randn(400, 1, generator=generator)
    x[:, 15] = 0
    clean = x.T @ x / len(x)
    right, projection = free_directions(clean, clean.diagonal().diag(), rank=6)
    assert right.isfinite().all() and projection.isfinite().all()


def two_streams(rng: random.Random, model, count=3) -> train.ForwardInput:
    examples = [random_example(rng, 4) for _ in range(count)]
    return unpacked([train.lay_out(each, 4, model.config.mask_token_id, 0.1) for each in examples])


def test_second_moments_are_of_what_a_matrix_is_given():
    """Padding is neither a clean token nor a mask."""
    rng = random.Random(0)
    model = tiny_model(rng).requires_grad_(False)
    inputs = two_streams(rng, model)
    moments = second_moments(model, [inputs, inputs])
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(inputs.tokens))
    is_mask = inputs.prefix <= inputs.pos
    for found, positions in zip(
        moments["model.layers.0.self_attn.v_proj"], (~is_mask & (inputs.doc >= 0), is_mask)
    ):
        expected = x[positions].T @ x[positions] / positions.sum()
        assert torch.allclose(found.double(), expected, rtol=1e-5)
    assert len(moments) == 7 * model.config.num_hidden_layers


def test_the_losses_by_hand():
    """The divergence is that of two plain forwards; the masks' part is --mask-weight expected's."""
    rng = random.Random(1)
    base = tiny_model(rng)
    model = tiny_model(random.Random(1)).requires_grad_(False)
    for weight in model.parameters():
        weight += 0.1 * torch.randn_like(weight)
    model.config.block = base.config.block = 4
    example = random_example(rng, 4)
    inputs = unpacked([train.lay_out(example, 4, base.config.mask_token_id, 1.0)])
    noisy, divergence = losses(model, base, inputs)
    log_probs = []
    for each in (model, base):
        text = torch.tensor([example.tokens[:-1]])
        hidden = each(text, torch.arange(text.size(1))[None], None)[0, example.prompt_length - 1 :]
        logits = each.logits(hidden)
        logits[:, base.config.mask_token_id] = -1e9  # so that nothing is infinite
        log_probs.append(logits.log_softmax(-1))
    said, expected = log_probs
    assert torch.allclose(divergence, F.kl_div(said, expected, log_target=True, reduction="sum"))
    assert losses(base, base, inputs)[1].abs() < 1e-12
    with_first, _ = train.losses(model, inputs, "expected")
    first = -said[0, example.tokens[example.prompt_length]]
    assert torch.allclose(noisy, with_first - first)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Greedy and drawn answers of toy/sft, as files."""
    folder = tmp_path_factory.mktemp("answers")
    model, chat = load(str(ROOT / "toy/sft"))
    problems = common.read_problems(ROOT / "toy/train.jsonl", 24)
    prompts = common.encode(chat, problems)
    for name, temperature in (("own", 0.0), ("drawn", 1.0)):
        sequences = generate(model, prompts, tau=1.0, temperature=temperature, max_new=80)
        rows = []
        for problem, sequence in zip(problems, sequences):
            row = {"prompt": problem["prompt"], "response": chat.decode(sequence.tokens)}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def test_it_learns_to_look_ahead_and_says_what_it_said(answers, tmp_path):
    """The mask's row and a few directions change, and nothing else; a second run goes on."""
    files = ["--data", answers / "own.jsonl", "--drawn", answers / "drawn.jsonl"]
    words = ["--model", ROOT / "toy/sft", *files]
    words += ["--rank", 16, "--lr", 3e-3, "--steps", 12, "--batch", 6]
    assert command("apps.look_ahead", *words, "--out", tmp_path / "one").status == 0
    two = [*words, "--start", tmp_path / "one", "--out", tmp_path / "two"]
    assert command("apps.look_ahead", *two).status == 0
    before, chat = load(str(ROOT / "toy/sft"))
    after, _ = load(str(tmp_path / "two"))
    for name, weight in after.state_dict().items():
        change = weight - before.state_dict()[name].bfloat16()
        if weight.dim() == 1:
            assert change.abs().max() == 0
        elif name == "model.embed_tokens.weight":
            assert change.any(1).nonzero().flatten().tolist() == [chat.mask_id]
        else:
            energy = torch.linalg.svdvals(change).square()
            assert energy[16:].sum() < 0.2 * energy.sum(), name  # rounding to bfloat16
    example = data.encode(rows_of(answers / "own.jsonl")[0], chat, 2, 512)
    inputs = unpacked([train.lay_out(example, 4, chat.mask_id, 1 / example.num_targets)])
    one, _ = load(str(tmp_path / "one"))
    before.config.block = 4
    noisy, divergence = zip(*(losses(each, before, inputs) for each in (before, one, after)))
    assert noisy[2] < noisy[1] < noisy[0] and max(divergence) < 1e-5
    assert is_refused(command("apps.look_ahead", *two), "two: has a model; choose another")


def test_the_clean_stream_is_held(answers, tmp_path, monkeypatch):
    """At a rate that is much too high, with the weight of the divergence and without.

    (At 0.3 training was chaos, and a CPU that rounds in another way failed here.)
    """
    base, chat = load(str(ROOT / "toy/sft"))
    base.config.block = 4
    example = data.encode(rows_of(answers / "drawn.jsonl")[0], chat, 2, 512)
    inputs = unpacked([train.lay_out(example, 4, chat.mask_id, 1 / example.num_targets)])
    drift = {}
    for weight in (8, 0):
        monkeypatch.setattr(look_ahead, "WEIGHT", weight)
        words = ["--model", ROOT / "toy/sft", "--out", tmp_path / f"{weight}", "--lr", 0.1]
        words += ["--data", answers / "own.jsonl", "--drawn", answers / "drawn.jsonl"]
        assert command("apps.look_ahead", *words, "--steps", 12, "--batch", 4).status == 0
        model, _ = load(str(tmp_path / f"{weight}"))
        drift[weight] = losses(model, base, inputs)[1].item()
    assert 0 < 2 * drift[8] < drift[0], drift


def test_nothing_to_look_ahead_in(answers, tmp_path):
    """Responses of one token have no masks."""
    (tmp_path / "short.jsonl").write_text(
        '{"prompt": "Mia", "response": "6", "finish_reason": "length"}'
    )
    words = ["--model", ROOT / "toy/sft", "--data", tmp_path / "short.jsonl"]
    words += ["--drawn", answers / "drawn.jsonl", "--out", tmp_path / "out"]
    assert is_refused(command("apps.look_ahead", *words), "no response of more than one token")
    too_long = command("apps.look_ahead", *words, "--max-length", 9999)
    assert is_refused(too_long, "--max-length 9999: the model has 2048 positions")
