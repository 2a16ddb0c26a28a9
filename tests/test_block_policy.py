"""The paper's block cache (section 4.5): no candidate goes beyond its block."""

import random

from common import cases, endless_model, prompt_length, random_prompt, tiny_model
from decoding import (
    blocks_by_hand,
    mean,
    one_token_tau,
    random_block_cache,
    random_options,
    same,
)

from decode import Answer, Decoder, Options, generate


def test_block_policy_by_hand():
    accepted = []
    for seed in cases(25, 200):
        rng = random.Random(6000 + seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        max_new = rng.choice([7, 16, 31, 32, 33])
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(3)]
        tau = rng.choice([0.2, 0.4, 1.0])
        block_cache = rng.choice([4, 5, 8, 16])
        options = {"tau": tau, "block": block, "block_cache": block_cache, "max_new": max_new}
        for prompt, result in zip(prompts, generate(model, prompts, **options)):
            expected = blocks_by_hand(model, prompt, tau, block, block_cache, max_new)
            assert (result.tokens, result.accepted) == expected, (seed, options)
            if tau < 1:
                accepted += result.accepted
    assert mean(accepted) > 1.5


def test_block_policy_is_the_cursors_where_no_block_cuts():
    """At tau = 1 every run is one token long, and a block of max_new has no boundary inside."""
    for seed in cases(25, 1000):
        rng = random.Random(7000 + seed)
        model = tiny_model(rng)
        options = random_options(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.5:
            options["tau"] = one_token_tau(options["metric"])
            block_cache = random_block_cache(rng, options["max_new"])
        else:
            block_cache = options["max_new"] + rng.randint(0, 3)
            options["temperature"] = 0.0  # where max_new cuts a block, fewer numbers are drawn
        cursor = generate(model, prompts, rows=3, **options)
        block = generate(model, prompts, rows=3, block_cache=block_cache, **options)
        assert all(map(same, cursor, block)), (seed, options, block_cache)


def test_a_full_block_waits_for_the_others_and_costs_no_forward():
    """The paper's code pays one more forward per filled block; here the next feed commits it."""
    model = endless_model()
    options = Options(block=3, block_cache=4, max_new=12)
    taus = [0, 1, 1]
    answers = []
    for index, tau in enumerate(taus):
        prompt = random_prompt(random.Random(index), 5)
        answers.append(Answer(prompt, model, options, index, tau))
    decoder = Decoder(model, answers, options, rows=3)
    decoder.step()  # prefill gives 4, 1, 1 tokens: one block is full at once
    assert [len(answer.tokens) for answer in answers] == [4, 1, 1]
    assert decoder.cache.lengths == [5, 5, 5]
    for count in (2, 3, 4):  # the others fill theirs; the first does not move
        assert [answer.index for answer, _ in decoder.step()] == [1, 2]
        assert len(answers[1].tokens) == count and decoder.cache.lengths == [5, 5, 5]
    assert len(decoder.step()) == 3  # all blocks are committed by the forward that goes on
    assert decoder.cache.lengths == [9, 9, 9] and len(answers[0].tokens) == 8
    list(decoder)
    assert [answer.forwards for answer in answers] == [3, 12, 12]
