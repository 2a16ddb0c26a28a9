"""Properties of decoding: the loop is `naive`, a batch is its rows, tau = 1 is plain AR."""

import random

import pytest
import torch
from common import MASK, ROOT, cases, prompt_length, random_prompt, tiny_model, toy_prompts
from decoding import (
    blocks_by_hand,
    greedy,
    mean,
    one_token_tau,
    random_block_cache,
    random_options,
    same,
)

from decode import METRICS, Answer, Decoder, Options, generate, is_plain_ar, naive
from model import load
from plumbing.errors import UserError


@pytest.fixture(scope="module")
def toy():
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    return model, toy_prompts(chat)


def test_cached_is_naive():
    accepted = []
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        options = random_options(rng)
        prompt = random_prompt(rng, prompt_length(rng))
        [result] = generate(model, [prompt], **options)
        expected = naive(model, prompt, **options)
        assert same(result, expected), (seed, options)
        assert result.tokens_per_forward <= options["block"] + 1
        if options["block"] > 1 and options["max_new"] > 2:
            accepted += result.accepted
    assert mean(accepted) >= 2  # a model that accepts nothing would test nothing


@pytest.mark.parametrize("policy", ["cursor", "block"])
def test_ragged_batch_is_its_rows(policy):
    """A tau per prompt, more prompts than rows, rows that end early: each is what it is alone.

    The paper's code got this wrong: finished rows shifted the accepted counts of the live ones.
    """
    accepted = []
    num_ended_early = 0
    num_across_blocks = 0
    for seed in cases(25, 1000):
        rng = random.Random(1000 + seed)
        model = tiny_model(rng)
        options = random_options(rng)
        if policy == "block":
            options["block_cache"] = random_block_cache(rng, options["max_new"])
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(2, 8))]
        low, high = (0.0, 1.8) if options["metric"] == "entropy" else (0.1, 1.0)
        taus = [rng.choice([low, high, rng.uniform(low, high)]) for _ in prompts]
        del options["tau"]
        results = generate(model, prompts, rows=rng.randint(1, 8), tau=taus, **options)
        for i, (prompt, tau, result) in enumerate(zip(prompts, taus, results)):
            alone = naive(model, prompt, i, tau=tau, **options)
            assert same(result, alone), (seed, i)
            if len(result.tokens) < options["max_new"]:
                num_ended_early += 1
            if policy == "block" and len(result.tokens) > options["block_cache"]:
                num_across_blocks += 1
            if not is_plain_ar(tau, options["metric"]) and options["max_new"] > 2:
                accepted += result.accepted
    assert mean(accepted) > 1.5 and num_ended_early > 10
    assert policy == "cursor" or num_across_blocks > 10


def test_tau_acts_at_the_next_step():
    """tau is a function that changes between any two forwards."""
    now = [1.0]
    accepted = {0.2: [], 1.0: []}
    options = Options(tau=lambda waiting: now[0], block=4, max_new=40)
    for seed in cases(10, 100):
        rng = random.Random(8000 + seed)
        model = tiny_model(rng)
        prompt = random_prompt(rng, 9)
        schedule = [rng.choice([0.2, 1.0]) for _ in range(40)]
        answer = Answer(prompt, model, options)
        decoder = Decoder(model, [answer], options)
        for tau in schedule:
            now[0] = tau
            if not answer.done:
                decoder.step()
                accepted[tau].append(answer.accepted[-1])
        expected = blocks_by_hand(model, prompt, schedule.__getitem__, 4, 1000, 40)
        assert (answer.tokens, answer.accepted) == expected
    assert set(accepted[1.0]) == {1} and mean(accepted[0.2]) > 2


def test_tau_follows_the_load(toy):
    """The function gets the number of waiting prompts: here one token at a time while any wait."""
    model, prompts = toy
    loads = []

    def tau(waiting: int) -> float:
        loads.append(waiting)
        return 1.0 if waiting else 0.8

    answers = generate(model, prompts[:5], rows=2, tau=tau, max_new=40)
    del loads[:5]  # each request was asked once when it was made
    assert loads[:2] == [3, 3] and loads == sorted(loads, reverse=True) and loads[-1] == 0
    assert set(answers[0].accepted) == {1} and max(answers[4].accepted) == 5


def test_toy_model_in_a_batch_is_the_naive_decoder(toy):
    model, prompts = toy
    prompts = prompts[: len(cases(8, 100))]
    results = generate(model, prompts, rows=5, tau=0.8)
    for result, prompt in zip(results, prompts):
        assert same(result, naive(model, prompt, tau=0.8))
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) >= 2


@torch.inference_mode()
def test_one_token_mode_is_greedy_ar():
    for seed in cases(25, 200):
        rng = random.Random(2000 + seed)
        model = tiny_model(rng)
        prompt = random_prompt(rng, prompt_length(rng))
        metric = rng.choice(METRICS)
        tau = one_token_tau(metric)
        [result] = generate(model, [prompt], tau=tau, metric=metric, max_new=20)
        assert result.tokens == greedy(model, prompt, 20)
        assert result.accepted == [1] * len(result.tokens)
        assert sum(result.positions) == len(prompt) + len(result.tokens) - 1  # no mask was computed


def test_one_token_mode_is_greedy_ar_in_bfloat16(toy):
    """In the paper's code a probability of 0.9989 rounded to 1.0 in bfloat16 and passed tau = 1."""
    prompts = toy[1][:4]
    model, _ = load(str(ROOT / "toy/mars"), dtype=torch.bfloat16)
    for prompt, result in zip(prompts, generate(model, prompts, tau=1.0)):
        assert result.accepted == [1] * len(result.tokens)
        assert result.tokens == greedy(model, prompt, 256)
    results = generate(model, prompts, tau=0.99)  # just below 1, several tokens do pass
    assert max(count for result in results for count in result.accepted) > 1


def test_tokens_after_the_end_of_turn_are_discarded_and_not_counted():
    """The paper's code counts them, which inflates tokens per forward."""
    num_ended = 0
    for seed in cases(25, 100):
        rng = random.Random(3000 + seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (0, 2)  # several ends, as Qwen2.5 has
        [result] = generate(model, [random_prompt(rng, 5)], tau=0.0, block=8, max_new=30)
        ends = [i for i, token in enumerate(result.tokens) if token in (0, 2)]
        assert ends in ([], [len(result.tokens) - 1])
        assert sum(result.accepted) == len(result.tokens) <= 30
        num_ended += len(ends)
    assert num_ended > 5


def test_mask_token_is_never_generated():
    for seed in cases(10, 50):
        rng = random.Random(4000 + seed)
        model = tiny_model(rng)
        for temperature in (0.0, 2.0):
            options = {"tau": 0.2, "temperature": temperature, "max_new": 30}
            [result] = generate(model, [random_prompt(rng, 4)], **options)
            assert model.config.mask_token_id not in result.tokens


def test_results_hold_together():
    rng = random.Random(11)
    model = tiny_model(rng)
    prompts = [random_prompt(rng, length) for length in (3, 9)]
    results = generate(model, prompts, rows=1, tau=0.2, block=3, max_new=25)
    for prompt, result in zip(prompts, results):
        assert sum(result.accepted) == len(result.tokens)
        assert len(result.accepted) == len(result.positions) == result.forwards
        assert result.tokens_per_forward == len(result.tokens) / result.forwards
        assert result.ids == prompt + result.tokens
        num_fed = sum(result.accepted[:-1])  # every token once, and three masks each time
        assert sum(result.positions) == len(prompt) + num_fed + 3 * result.forwards
    options = Options(tau=0.2, block=3, max_new=25)
    answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
    events = list(Decoder(model, answers, options))
    for answer in answers:
        streamed = []
        for other, tokens in events:
            if other is answer:
                streamed += tokens
        assert streamed == answer.tokens
    assert generate(model, []) == []


def test_the_feed_of_the_drawing():
    """The example of Answer.feed: a b c with a b cached, the guess d, B = 2 masks."""
    model = tiny_model(random.Random(0))
    answer = Answer([2, 3, 4], model, Options(verify=True, block=2, tau=0.5))
    answer.guesses = [5]
    answer.groups = [0, 1]
    tokens, pos, prefix = torch.tensor(answer.feed(2, MASK)).unbind(-1)
    assert tokens.tolist() == [4, 5, MASK, MASK, MASK, MASK]
    assert pos.tolist() == [2, 3, 3, 4, 4, 5]
    assert prefix.tolist() == [3, 4, 3, 3, 4, 4]


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
        ({"temperature": float("nan")}, "temperature nan"),
        ({"rows": 0}, "rows 0: must be at least 1"),
        ({"rows": -1}, "rows -1: must be at least 1"),
        ({"tau": [0.5, 0.6]}, "2 values of tau for 1 prompts"),
        ({"block": 1000}, "block 1000.* exceeds the model's 512 positions"),
        ({"temperature": float("inf")}, "temperature inf: must be at least 0 and below 1e.30"),
        ({"seed": 2**70}, f"seed {2**70}: must be at least 0 and below {2**62}"),
        ({"seed": -1}, "seed -1"),
        ({"block_cache": 0}, "block_cache 0: must be at least 1"),
        ({"tau": lambda waiting: 7}, "tau 7.0: must be between 0 and 1"),
    ],
)
def test_options_that_cannot_run(options, message):
    with pytest.raises(UserError, match=message):
        generate(tiny_model(random.Random(0)), [[2, 3]], **options)
