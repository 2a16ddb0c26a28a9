"""Properties of decoding: the loop is the naive decoder, a batch its rows, tau = 1 plain AR."""

import json
import random

import pytest
import torch
from common import ROOT, cases, random_prompt, tiny_model

from decode import (
    METRICS,
    Options,
    accepted_lengths,
    cached_mask,
    confidences,
    generate,
    guess,
    naive,
    plain_ar,
    prepare,
    stream,
)
from kv_cache import KVCache
from model import UserError, load, visible


@pytest.fixture(scope="module")
def toy():
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    rows = [json.loads(line) for line in (ROOT / "toy/test.jsonl").read_text().splitlines()]
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return model, [chat.encode(chat.prompt(turn)) for turn in turns]


def random_options(rng: random.Random) -> dict:
    """Thresholds low enough that a model of 8 words accepts guesses; sometimes plain AR."""
    metric = rng.choice(METRICS)
    taus = {"probability": (0.15, 0.5), "margin": (0.0, 0.2), "entropy": (1.0, 2.0)}
    ar = 0.0 if metric == "entropy" else 1.0
    return {
        "tau": ar if rng.random() < 0.1 else rng.uniform(*taus[metric]),
        "metric": metric,
        "block": rng.randint(1, 8),
        "max_new": rng.choice([1, 2, 7, 20, 40, 63, 64, 65]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": rng.randrange(100),
    }


def prompt_length(rng: random.Random) -> int:
    """Attention spans multiples of 64, so these lengths are at one, beside one, and anywhere."""
    return rng.choice([1, 2, 63, 64, 65, rng.randint(3, 90)])


def same(result, expected) -> bool:
    """Token for token and forward for forward."""
    return (result.tokens, result.accepted) == (expected.tokens, expected.accepted)


def test_cached_is_naive():
    kept = []
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model, options = tiny_model(rng), random_options(rng)
        prompt = random_prompt(rng, prompt_length(rng))
        [result] = generate(model, [prompt], **options)
        expected = naive(model, prompt, **options)
        assert same(result, expected), (seed, options)
        assert result.tokens_per_forward <= options["block"] + 1
        if options["block"] > 1 and options["max_new"] > 2:
            kept += result.accepted
    assert sum(kept) / len(kept) >= 2  # a model that accepts nothing would test nothing


def test_ragged_batch_is_its_rows():
    """A tau per prompt, more prompts than rows, rows that end early: each is what it is alone.

    The paper's code got this wrong: finished rows shifted the accepted counts of the live ones.
    """
    kept, ended_early = [], 0
    for seed in cases(25, 200):
        rng = random.Random(1000 + seed)
        model, options = tiny_model(rng), random_options(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(2, 8))]
        low, high = (0.0, 1.8) if options["metric"] == "entropy" else (0.1, 1.0)
        taus = [rng.choice([low, high, rng.uniform(low, high)]) for _ in prompts]
        del options["tau"]
        results = generate(model, prompts, rows=rng.randint(1, 8), tau=taus, **options)
        first_seed = options.pop("seed")
        for i, (prompt, tau, result) in enumerate(zip(prompts, taus, results)):
            alone = naive(model, prompt, tau=tau, seed=first_seed + i, **options)
            assert same(result, alone), (seed, i)
            ended_early += len(result.tokens) < options["max_new"]
            if not plain_ar(tau, options["metric"]) and options["max_new"] > 2:
                kept += result.accepted
    assert sum(kept) / len(kept) >= 2 and ended_early > 10


def test_admission_order_changes_nothing():
    """Seeds belong to prompts: neither the rows nor the neighbours decide what is drawn."""
    rng = random.Random(5)
    model = tiny_model(rng)
    prompts = [random_prompt(rng, rng.randint(1, 30)) for _ in range(9)]
    options = {"tau": 0.2, "temperature": 1.0, "max_new": 24}
    results = [generate(model, prompts, rows=rows, **options) for rows in (1, 2, 4, 9)]
    assert all(same(a, b) for others in results[1:] for a, b in zip(results[0], others))


def test_the_mask_of_the_loop_is_the_mask_rule():
    """[committed | real | masks | left over]: the loop's plain causality is `visible` there."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        length, real, width = rng.randint(0, 20), rng.randint(1, 5), rng.randint(6, 12)
        slots = torch.arange(length, length + width)[None]
        start = torch.where(slots < length + real, slots + 1, length + real)
        k_pos = torch.arange(length + width)
        k_start = torch.cat([k_pos[:length] + 1, start[0]])
        expected = visible(slots[..., None], start[..., None], 0, k_pos, k_start, 0)
        mask = cached_mask(slots, length + width + 7)
        assert torch.equal(mask[0, 0, :, : length + width], expected[0])
        assert not mask[..., length + width :].any()


def test_toy_model_in_a_batch_is_the_naive_decoder(toy):
    model, prompts = toy
    prompts = prompts[: len(cases(8, 100))]
    results = generate(model, prompts, rows=5, tau=0.8)
    assert all(same(r, naive(model, p, tau=0.8)) for r, p in zip(results, prompts))
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) >= 2


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """Plain autoregression in six lines, without anything of decode.py."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
        tokens.append(model.logits(hidden[0, -1:]).argmax().item())
        if tokens[-1] in model.config.eos_token_id:
            break
    return tokens[len(prompt) :]


@torch.inference_mode()
def test_one_token_mode_is_greedy_ar():
    for seed in cases(25, 200):
        rng = random.Random(2000 + seed)
        model, prompt = tiny_model(rng), random_prompt(rng, prompt_length(rng))
        metric = rng.choice(METRICS)
        tau = 0 if metric == "entropy" else 1
        [result] = generate(model, [prompt], tau=tau, metric=metric, max_new=20)
        assert result.tokens == greedy(model, prompt, 20)
        assert result.accepted == [1] * len(result.tokens)
        assert result.positions == len(prompt) + len(result.tokens) - 1  # no mask was computed


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


@torch.inference_mode()
def test_one_token_mode_is_greedy_ar_in_bfloat16(toy):
    """In the paper's code a probability of 0.9989 rounded to 1.0 in bfloat16 and passed tau = 1."""
    prompts = toy[1][:4]
    model, _ = load(str(ROOT / "toy/mars"), dtype=torch.bfloat16)
    for prompt, result in zip(prompts, generate(model, prompts, tau=1.0)):
        assert result.accepted == [1] * len(result.tokens)
        assert result.tokens == greedy(model, prompt, 256)
    results = generate(model, prompts, tau=0.99)  # just below, guesses do pass
    assert max(n for result in results for n in result.accepted) > 1


def test_probabilities_are_not_rounded_to_bfloat16():
    """0.9995 is 1.0 in bfloat16, and would pass tau = 0.9999 there."""
    logits = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    logits[..., 3] = 9.5  # p(3) = 0.9995
    options = Options(tau=0.9999, block=1)
    assert logits.softmax(-1).max() == 1
    _, counts = guess(logits, prepare(tiny_model(random.Random(0)), [[2, 3]], options), options)
    assert counts.tolist() == [1]


def test_nothing_counts_behind_the_end_of_turn():
    """The paper's code counts what comes behind the end, which inflates tokens per forward."""
    ended = 0
    for seed in cases(25, 100):
        rng = random.Random(3000 + seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (0, 2)  # several ends, as Qwen2.5 has
        [result] = generate(model, [random_prompt(rng, 5)], tau=0.0, block=8, max_new=30)
        ends = [i for i, token in enumerate(result.tokens) if token in (0, 2)]
        assert ends in ([], [len(result.tokens) - 1])
        assert sum(result.accepted) == len(result.tokens) <= 30
        ended += bool(ends)
    assert ended > 5


def test_mask_token_is_never_generated():
    for seed in cases(10, 50):
        rng = random.Random(4000 + seed)
        model = tiny_model(rng)
        for temperature in (0.0, 2.0):
            options = {"tau": 0.2, "temperature": temperature, "max_new": 30}
            [result] = generate(model, [random_prompt(rng, 4)], **options)
            assert model.config.mask_token_id not in result.tokens


def test_acceptance_by_hand():
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    guesses = probs.argmax(-1)
    by_hand = {
        "probability": ([0.6, 0.9, 0.5, 1.0], {0.95: 1, 0.9: 2, 0.5: 4}),
        "margin": ([0.3, 0.8, 0.0, 1.0], {0.9: 1, 0.7: 2, 0.0: 4}),
        "entropy": ([0.8979, 0.3251, 0.6931, 0.0], {0.3: 1, 0.4: 2, 0.7: 4}),
    }
    for metric, (expected, lengths) in by_hand.items():
        confidence = confidences(probs, guesses, metric)
        assert confidence[0].tolist() == pytest.approx(expected, abs=1e-4)
        for tau, length in lengths.items():
            assert accepted_lengths(confidence, torch.tensor([tau]), metric).tolist() == [length]


def test_guesses_at_a_temperature_by_hand():
    """Drawn from p^(1/T), each position for itself; confidence is the drawn token's p at T = 1."""
    p = torch.tensor([0.5, 0.3, 0.2])
    options, draws = Options(temperature=0.5, tau=0.25, block=1), 3000
    model = tiny_model(random.Random(0))
    requests = prepare(model, [[2]] * draws, options)
    tokens, counts = guess(p.log().expand(draws, 2, 3), requests, options)
    expected = draws * p**2 / (p**2).sum()
    for position in (0, 1):
        drawn = torch.bincount(tokens[:, position], minlength=3)
        assert ((drawn - expected) ** 2 / expected).sum() < 13.8  # p = 0.001, 2 degrees of freedom
    assert torch.equal(counts == 2, p[tokens[:, 1]] >= 0.25)
    cold = Options(temperature=1e-30, tau=0.25, block=1)  # must not overflow into NaN
    assert (guess(p.log().expand(draws, 2, 3), requests, cold)[0] == 0).all()


def test_temperature_one_draws_from_the_softmax():
    """Plain AR at T = 1: the first token over many seeds against its probabilities (chi-square)."""
    rng = random.Random(7)
    model, prompt, draws = tiny_model(rng, vocab_size=6).float(), [2, 3, 4], 4000
    results = generate(model, [prompt] * draws, rows=500, tau=1, temperature=1.0, max_new=1)
    counts = torch.bincount(torch.tensor([r.tokens[0] for r in results]), minlength=6)
    hidden = model(torch.tensor([prompt]), torch.arange(3)[None], None)
    expected = draws * model.logits(hidden[0, -1:])[0].softmax(-1)
    big = expected >= 5
    chi_square = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert chi_square < 20.5  # p = 0.001 at 5 degrees of freedom, the most there can be
    assert counts[1] == 0 and (counts > 0).sum() > 1


def test_results_hold_together():
    rng = random.Random(11)
    model = tiny_model(rng)
    prompts = [random_prompt(rng, n) for n in (3, 9)]
    results = generate(model, prompts, tau=0.2, block=3, max_new=25)
    for result, prompt in zip(results, prompts):
        assert sum(k * n for k, n in result.histogram.items()) == len(result.tokens)
        assert sum(result.histogram.values()) == result.forwards
        assert result.positions == len(prompt) + 3 + 7 * (result.forwards - 1)
    events = list(stream(model, prompts, Options(tau=0.2, block=3, max_new=25)))
    for i in (0, 1):
        pieces = [tokens for request, tokens in events if request.index == i]
        assert sum(pieces, []) == results[i].tokens
    assert generate(model, []) == []


def test_cache_refuses_what_does_not_fit():
    """Before anything is written; only real positions count, and rewinding gives them back."""
    model = tiny_model(random.Random(0))
    cache = KVCache(model.config, 2, 10, "cpu", torch.float64)
    cache.reserve(8)
    cache.commit([8, 3])
    with pytest.raises(ValueError, match="8 \\+ 3 positions exceed the capacity of 10"):
        cache.reserve(3)
    assert cache.lengths == [8, 3]
    cache.rewind(0, 2)
    assert cache.reserve(3).tolist() == [[2, 3, 4], [3, 4, 5]]
    with pytest.raises(ValueError):
        cache.rewind(0, 5)


@pytest.mark.parametrize("prompt", [[], [2, 8], [-1]])
def test_prompts_that_cannot_run(prompt):
    with pytest.raises(UserError, match="must be token ids below 8, at least one"):
        generate(tiny_model(random.Random(0)), [[2], prompt])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": 1.5}, "tau 1.5: must be between 0 and 1"),
        ({"tau": -0.1, "metric": "entropy"}, "at least 0"),
        ({"tau": float("nan")}, "tau nan"),
        ({"metric": "luck"}, "metric 'luck'"),
        ({"block": 0}, "block 0: must be at least 1"),
        ({"max_new": 0}, "max_new 0"),
        ({"max_new": 600}, "exceed the model's 512 positions"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"rows": 0}, "rows 0"),
        ({"tau": [0.5, 0.6]}, "2 values of tau for 1 prompts"),
        ({"block": 1000}, "the model has 512 positions in all"),
        ({"temperature": float("inf")}, "out of range"),
        ({"seed": 2**70}, "out of range"),
    ],
)
def test_options_that_cannot_run(options, message):
    with pytest.raises(UserError, match=message):
        generate(tiny_model(random.Random(0)), [[2, 3]], **options)
