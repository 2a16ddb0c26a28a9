"""On a GPU: the tokens of a CPU, bfloat16, FlexAttention, training; skipped without one."""

import pytest
import torch
from common import ROOT, rows_of, toy_prompts
from training import log, run_train, whole_step

import train
from decode import generate
from model import load
from plumbing import data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


OPTIONS = [
    {"tau": 1.0},
    {"tau": 0.8},
    {"tau": 0.8, "block_cache": 8},
    {"rows": 1},  # in a batch on a CPU it has fewer guesses
]


def answers_on(device: str, **options) -> list:
    """In float64: two devices differ too little to decide a near tie differently."""
    model, chat = load(str(ROOT / "toy/mars"), device, torch.float64)
    return generate(model, toy_prompts(chat)[:32], **{"rows": 5} | options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoding_gives_the_tokens_of_the_cpu(options):
    results = []
    for device in ("cpu", "cuda"):
        answers = answers_on(device, **options)
        results.append([(answer.tokens, answer.num_accepted) for answer in answers])
    assert results[0] == results[1]


def test_lossless_in_a_batch_gives_the_tokens_of_tau_1_on_the_cpu():
    """In fewer than half as many forwards."""
    plain = answers_on("cpu", tau=1.0)
    checked = answers_on("cuda")
    assert [answer.tokens for answer in checked] == [answer.tokens for answer in plain]
    assert sum(answer.forwards for answer in checked) < sum(len(a.tokens) for a in checked) / 2


def test_bfloat16_solves_problems_several_tokens_at_a_time():
    model, chat = load(str(ROOT / "toy/mars"), "cuda", torch.bfloat16)
    assert model.device.type == "cuda" and model.dtype == torch.bfloat16
    results = generate(model, toy_prompts(chat)[:32], rows=8, tau=0.95)
    num_right = 0
    for result, row in zip(results, rows_of(ROOT / "toy/test.jsonl")):
        if chat.decode(result.tokens).endswith(f" {row['answer']}."):
            num_right += 1
    assert num_right >= 28
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) > 2


def test_flex_attention_is_the_dense_mask(monkeypatch):
    """Packed rows of two streams: the same losses and the same gradient, in float32."""
    model, chat = load(str(ROOT / "toy/mars"), "cuda")
    model.requires_grad_()
    rows = rows_of(ROOT / "toy/train.jsonl")[:40]
    examples = [data.make_example(row, chat, (2,), 512) for row in rows]
    width = train.packed_width(model, 1024)
    recipe = train.Recipe(chat.mask_id, batch_tokens=1024, row_width=width)
    with_flex = whole_step(model, examples, recipe)
    monkeypatch.setattr(train, "can_use_flex", lambda *_: False)
    dense = whole_step(model, examples, recipe)
    assert (with_flex - dense).abs().max() < 1e-5 * dense.abs().max()


def test_training_runs_and_saves(tmp_path):
    """In bfloat16 autocast, the default on a GPU, with float32 weights."""
    torch._dynamo.utils.counters.clear()
    words = ["--model", ROOT / "toy/sft", "--data", ROOT / "toy/train.jsonl", "--out", tmp_path]
    words += ["--steps", 5, "--batch", 32, "--lr", 1e-3, "--device", "cuda"]
    assert run_train(*words).status == 0
    records = log(tmp_path)
    assert len(records) == 5 and 0 < records[-1]["noisy"] < records[0]["noisy"]
    assert records[-1]["memory_gib"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # with gradients, without
    assert load(str(tmp_path))[0].config.block == 4
