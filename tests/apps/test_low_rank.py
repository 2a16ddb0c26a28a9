"""Training at low rank: the losses, the merged model, what a run changes, and --resume."""

import random

import pytest
import torch
from commands import command, is_refused
from common import MASK, ROOT, cases, rows_of, tiny_model, unpacked
from training import clean_logits, contents, gradient, log, mask_predictions, random_example, write

from apps import low_rank
from bench import common
from decode import generate
from model import Qwen2, load
from plumbing.data import make_example
from train import Recipe, hidden_states, lay_out

GRID = Recipe(MASK)


def test_losses_by_hand(monkeypatch):
    """Each mask after the true text before its block, but no first token; and the clean stream's
    divergence from another model. A row without masks counts in the second only.

    However a step is packed and accumulated, and its logits cut into chunks.
    """
    for seed in cases(8, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        original = tiny_model(random.Random(seed)).requires_grad_(False)
        for weight in original.parameters():
            weight += 0.1 * torch.randn_like(weight)
        block = rng.randint(1, 5)
        examples = [random_example(rng, block) for _ in range(5)]
        examples[1].has_masks = False
        batch_tokens = rng.choice([1, 600])
        row_width = rng.choice([None, 200])
        recipe = Recipe(MASK, block, 0.7, batch_tokens=batch_tokens, row_width=row_width)
        monkeypatch.setattr("model.LOGITS_AT_A_TIME", rng.choice([1, 8 * 7, 2**26]))
        found = low_rank.add_held_gradients(model, examples, recipe, original)
        ours = torch.cat([weight.grad.flatten() for weight in model.parameters()])

        noisy = torch.zeros(()).double()
        drift = torch.zeros(()).double()
        kept = [token for token in range(8) if token != MASK]
        for example in examples:
            p = clean_logits(original, example)[:, kept].softmax(-1)
            q = clean_logits(model, example)[:, kept].softmax(-1)
            drift = drift + (p * (p / q).log()).sum(-1).mean() / 5
            each = []
            for _, logits, token in mask_predictions(model, example, block):
                each.append(-logits.log_softmax(-1)[token])
            if example.has_masks and each:
                noisy = noisy + sum(each) / len(each) / 4
        assert found.tolist() == pytest.approx([noisy.item(), drift.item()], rel=1e-6)
        theirs = gradient(noisy + 0.7 * drift, model)
        assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()


def test_the_merged_model_computes_the_same():
    """As an ordinary model; and before training, what it computed when it was not restricted."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = tiny_model(rng)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        ordinary = Qwen2(model.config).double()
        inputs = unpacked([lay_out(random_example(rng, 4), GRID) for _ in range(3)])
        low_rank.restrict(model, rank=rng.choice([1, 3, 99]))
        model.double()
        now = low_rank.merged(model)
        torch.testing.assert_close(now, before, rtol=0, atol=1e-6)  # the row is float32
        for name, weight in model.named_parameters():
            is_free = name.endswith((".left", ".right", ".mask_row"))
            assert weight.requires_grad == is_free
            if is_free:
                weight.data += torch.randn_like(weight)
        ordinary.load_state_dict(low_rank.merged(model))
        expected = hidden_states(model, inputs)
        assert torch.allclose(hidden_states(ordinary, inputs), expected, rtol=1e-9)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Greedy and drawn answers of toy/sft, as a file."""
    model, chat = load(str(ROOT / "toy/sft"))
    problems = common.read_problems(ROOT / "toy/train.jsonl", 24)
    prompts = common.encode(chat, problems)
    rows = []
    for temperature in (0.0, 1.0):
        sequences = generate(model, prompts, tau=1.0, temperature=temperature, max_new=80)
        for problem, sequence in zip(problems, sequences):
            row = {"prompt": problem["prompt"], "response": chat.decode(sequence.tokens)}
            rows.append(row | {"masks": temperature == 0})
    return write(tmp_path_factory.mktemp("answers") / "data.jsonl", rows).path


@pytest.fixture
def words(data):
    files = ("--model", ROOT / "toy/sft", "--data", data)
    return (*files, "--rank", 16, "--batch", 6, "--lr", 3e-3)


def run(*words: object):
    return command("apps.low_rank", *words, "--device", "cpu")


def test_it_learns_to_look_ahead(words, data, tmp_path):
    """The mask's row changes, each matrix at its rank, and nothing else."""
    done = run(*words, "--steps", 12, "--out", tmp_path)
    assert done.status == 0, done.err
    before, chat = load(str(ROOT / "toy/sft"))
    after, _ = load(str(tmp_path))
    for name, weight in after.state_dict().items():
        change = weight - before.state_dict()[name].bfloat16()
        if weight.dim() == 1:
            assert change.abs().max() == 0
        elif name == "model.embed_tokens.weight":
            assert change.any(1).nonzero().flatten().tolist() == [chat.mask_id]
        else:
            energy = torch.linalg.svdvals(change).square()
            assert 0 < energy[16:].sum() < 0.2 * energy.sum(), name  # rounding to bfloat16
    recipe = Recipe(chat.mask_id)
    greedy = rows_of(data)[:24]

    def noisy_loss(model: Qwen2) -> float:
        examples = [make_example(row, chat, before.config.eos_token_id, 512) for row in greedy]
        forwards = low_rank.held_inputs(examples, recipe)
        return sum(low_rank.held_losses(model, inputs, before)[0].item() for inputs in forwards)

    assert noisy_loss(after) < noisy_loss(before) - 3  # of 9.3


def test_the_clean_stream_is_held(tmp_path):
    """As much as --hold says, at a rate that is much too high."""
    rows = [{"prompt": f"{i} plums?", "response": f"So Mia has {i} plums."} for i in range(9)]
    words = ("--model", ROOT / "toy/sft", "--data", write(tmp_path / "data.jsonl", rows).path)
    words += ("--rank", 16, "--batch", 6, "--lr", 3e-2, "--steps", 12, "--block", 3)
    drift = {}
    for weight in (0, 8):
        out = tmp_path / str(weight)
        assert run(*words, "--hold", weight, "--out", out).status == 0
        records = log(out)
        assert records[0]["drift"] == pytest.approx(0, abs=1e-5)
        drift[weight] = records[-1]["drift"]
        assert load(str(out))[0].config.block == 3
    assert 0 < 3 * drift[8] < drift[0]


def test_another_model_is_held_to(words, tmp_path):
    """The drift of several trainings added up, for each held to the model that it began with."""
    words += ("--model", ROOT / "toy/mars", "--original", ROOT / "toy/sft")
    done = run(*words, "--steps", 1, "--out", tmp_path / "out")
    assert done.status == 0 and "drift, mean of the last 1 steps: " in done.out
    assert log(tmp_path / "out")[0]["drift"] > 1e-4


def test_a_run_that_was_stopped_goes_on_bit_for_bit(words, tmp_path):
    """Both factors are in its checkpoint; the model that is saved is the merged one."""
    whole = tmp_path / "whole"
    assert run(*words, "--steps", 8, "--out", whole).status == 0
    part = tmp_path / "part"
    assert run(*words, "--steps", 8, "--save-every", 4, "--out", part).status == 0
    last = sorted(part.glob("checkpoints/step-*"))[-1]
    last.rename(last.with_suffix(".tmp"))  # as if it had been killed while it saved
    assert run(*words, "--steps", 8, "--out", part, "--resume").status == 0
    assert contents(whole)["model.safetensors"] == contents(part)["model.safetensors"]


def test_refused(words, data, tmp_path, monkeypatch):
    """Responses of one token have no masks; and torchrun would run it twice."""
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "Mia", "response": "6", "finish_reason": "length"}')
    out = tmp_path / "out"
    done = run(*words, "--data", short, "--out", out)
    assert done.status == 2 and "short.jsonl: no response has masks" in done.err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert is_refused(run(*words, "--out", out), "torchrun is for train.py")
    assert not out.exists()
