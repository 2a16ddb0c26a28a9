"""The same on a GPU as on a CPU; skipped where there is none."""

import json
import sys

import pytest
import torch
from common import ROOT

import train
from decode import generate
from model import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def toy(device: str, dtype: torch.dtype):
    model, chat = load(str(ROOT / "toy/mars"), device, dtype)
    rows = [json.loads(line) for line in (ROOT / "toy/test.jsonl").read_text().splitlines()[:32]]
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return model, chat, [chat.encode(chat.prompt(turn)) for turn in turns], rows


@pytest.mark.parametrize(
    "options",
    [{"tau": 1.0}, {"tau": 0.8}, {"tau": 0.8, "block_cache": 8}, {"verify": True}],
    ids=str,
)
def test_decoding_gives_the_tokens_of_the_cpu(options):
    """In float64, where the two kinds of arithmetic are too close to tell a tie apart."""
    results = []
    for device in ("cpu", "cuda"):
        model, _, prompts, _ = toy(device, torch.float64)
        results.append(generate(model, prompts, rows=5, **options))
    assert [(r.tokens, r.accepted) for r in results[0]] == [
        (r.tokens, r.accepted) for r in results[1]
    ]


def test_bfloat16_solves_problems_several_tokens_at_a_time():
    model, chat, prompts, rows = toy("cuda", torch.bfloat16)
    assert model.device.type == "cuda" and model.model.norm.weight.dtype == torch.bfloat16
    results = generate(model, prompts, rows=8, tau=0.95)
    right = sum(
        chat.decode(r.tokens).endswith(f" {row['answer']}.") for r, row in zip(results, rows)
    )
    assert right >= 28
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) > 2


def test_flex_attention_is_the_dense_mask():
    """Packed rows of two streams: the same losses and the same gradient, in float32."""
    model, chat, _, _ = toy("cuda", torch.float32)
    model.requires_grad_()
    rows = [json.loads(line) for line in (ROOT / "toy/train.jsonl").read_text().splitlines()]
    examples = [train.encode(row, chat, 2, 512) for row in rows[:40]]
    args = train.parse_arguments(["--data", "none", "--batch-tokens", "1024"])
    packed = train.batches(examples, model.config, args, longest=train.longest_stream(args))
    found = {"block_mask": [], "dense_mask": []}
    for name, results in found.items():
        model.zero_grad()
        for batch in packed:
            batch = train.Batch(*(field.cuda() for field in batch))
            mask = getattr(train, name)(batch)
            hidden = model(batch.tokens, batch.pos, mask)[batch.noisy > 0]
            loss = torch.nn.functional.cross_entropy(
                model.logits(hidden), batch.target[batch.noisy > 0], reduction="sum"
            )
            loss.backward()
            results.append(loss.detach().reshape(1))
        results += [weight.grad.flatten() for weight in model.parameters()]
    ours, theirs = map(torch.cat, found.values())
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_training_runs_and_saves(tmp_path, monkeypatch):
    """In bfloat16 autocast, the default there, on float32 weights."""
    words = ["--model", ROOT / "toy/sft", "--data", ROOT / "toy/train.jsonl", "--out", tmp_path]
    words += ["--steps", 5, "--batch", 32, "--lr", 1e-3, "--device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    train.main()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == 5 and 0 < log[-1]["noisy"] < log[0]["noisy"] and log[-1]["memory_gib"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # with gradients, without
    assert load(str(tmp_path))[0].config.block_size == 4
