"""Lossless decoding: the text is plain AR's, samples are AR's samples, and forwards are fewer."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from common import (
    EOS,
    MASK,
    ROOT,
    THOROUGH,
    cases,
    prompt_length,
    random_prompt,
    tiny_model,
    toy_prompts,
)
from decoding import greedy, mean, one_token_tau, predictions

import decode
import lossless
from decode import Answer, Decoder, Options, generate
from model import load, visible
from plumbing.errors import UserError

# ----------------------------------------------------------------------------- the four functions


def test_mask_groups_by_hand():
    """A text of 9 tokens: a group of masks after the text, and after some numbers of guesses."""
    assert lossless.mask_groups(9, [0], 3) == [(9, 9), (10, 9), (11, 9)]
    assert lossless.mask_groups(9, [0, 1], 2) == [(9, 9), (10, 9), (10, 10), (11, 10)]
    assert lossless.mask_groups(2, [0, 2], 1) == [(2, 2), (4, 4)]
    assert lossless.mask_groups(9, [0, 3], 0) == []
    assert lossless.mask_groups(9, [], 3) == []


def some(rng: random.Random, num_guesses: int) -> list[int]:
    """Groups for some of the numbers of guesses that may hold, perhaps for none."""
    return [j for j in range(num_guesses + 1) if rng.random() < 0.6]


def test_groups_of_masks_see_what_they_are_for():
    """By the mask rule, group j sees the text, the first j guesses, and its masks so far."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        end = rng.randint(1, 9)
        num_guesses = rng.randint(0, 4)
        num_masks = rng.randint(1, 4)
        clean = [(pos, pos + 1) for pos in range(end + num_guesses)]
        groups = some(rng, num_guesses)
        masks = lossless.mask_groups(end, groups, num_masks)
        assert len(masks) == len(groups) * num_masks
        k_pos, k_prefix = torch.tensor(clean + masks).unbind(-1)
        for place, j in enumerate(groups):
            for i in range(num_masks):
                q_pos, q_prefix = masks[place * num_masks + i]
                assert q_pos == end + j + i
                expected = [pos < end + j for pos, _ in clean]
                for other in range(len(masks)):
                    other_place, other_i = divmod(other, num_masks)
                    expected.append(other_place == place and other_i <= i)
                seen = visible(q_pos, q_prefix, torch.tensor(0), k_pos, k_prefix, 0)
                assert seen.tolist() == expected


def test_likely_groups_by_hand():
    """Odds of .9, .9 * .5 and so on: none holds .1, one .45, two .36, all three .09."""
    chances = [0.9, 0.5, 0.2]
    assert lossless.likely_groups(chances, most=9) == [0, 1, 2, 3]
    assert lossless.likely_groups(chances, most=3) == [0, 1, 2]
    assert lossless.likely_groups(chances, most=2) == [1, 2]
    assert lossless.likely_groups(chances, most=1) == [1]
    assert lossless.likely_groups([], most=1) == [0]
    assert lossless.likely_groups([0.99, 0.99], most=9) == [2]  # the others: .01 and .0099
    assert lossless.likely_groups([0.949], most=9) == [0, 1]
    assert lossless.likely_groups([0.1, 0.1], most=9) == [0, 1]  # all of them: .01


def test_count_held_by_hand():
    """A guess holds if AR says it and all guesses before it hold."""
    said = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    guesses = [[5, 6], [5, 4], [4, 6], [], [5]]
    assert lossless.count_held(said, guesses).tolist() == [[2], [1], [0], [0], [1]]
    assert lossless.count_held(torch.tensor([[3], [2]]), [[], []]).tolist() == [[0], [0]]


def test_candidate_columns_by_hand():
    """The drawing of lossless.py, B = 4: x at column 0, two guesses, three groups; one holds."""
    one = torch.tensor([[1]])
    columns, found = lossless.candidate_columns(torch.tensor([[0]]), [2], [[0, 1, 2]], [4], one)
    assert columns.tolist() == [[1, 7, 8, 9, 10]]  # g1, then the masks that saw g1
    assert found.tolist() == [[True]]
    # Without the group for no guess that one is the first; without its own there is none.
    columns, found = lossless.candidate_columns(torch.tensor([[0]]), [2], [[1, 2]], [4], one)
    assert columns.tolist() == [[1, 3, 4, 5, 6]] and found.tolist() == [[True]]
    columns, found = lossless.candidate_columns(torch.tensor([[0]]), [2], [[0, 2]], [4], one)
    assert columns[0, 0] == 1 and found.tolist() == [[False]]
    # Rows with other numbers of guesses, masks and real tokens; shorter ones are filled up.
    columns, found = lossless.candidate_columns(
        last_column=torch.tensor([[0], [3], [5], [0], [7]]),
        num_guesses=[2, 1, 0, 3, 1],
        groups=[[0, 1, 2], [0], [0], [0], []],
        num_masks=[2, 2, 3, 0, 2],
        held=torch.tensor([[2], [0], [0], [3], [1]]),
    )
    assert columns[0].tolist() == [2, 7, 8, 9]
    assert columns[1].tolist() == [3, 5, 6, 7]
    assert columns[2].tolist() == [5, 6, 7, 8]
    assert columns[3:, 0].tolist() == [3, 8]
    assert found.tolist() == [[True], [True], [True], [False], [False]]


def test_the_columns_are_those_of_the_feed():
    """In a feed of `Answer` the columns lead to the last token that holds, and to its group."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 5)
        answer = Answer(random_prompt(rng, 9), model, Options(verify=True, block=block, tau=0.3))
        answer.guesses = random_prompt(rng, rng.randint(0, block))
        answer.groups = some(rng, len(answer.guesses))
        num_cached = rng.randint(0, 8)
        feed = answer.feed(num_cached, MASK)
        held = rng.randint(0, len(answer.guesses))
        last = torch.tensor([[len(answer.ids) - num_cached - 1]])
        columns, found = lossless.candidate_columns(
            last, [len(answer.guesses)], [answer.groups], [block], torch.tensor([[held]])
        )
        text = answer.ids + answer.guesses[:held]
        assert feed[columns[0, 0]] == (text[-1], len(text) - 1, len(text))
        assert found.item() == (held in answer.groups)
        if found:
            masks = [feed[column] for column in columns[0, 1:].tolist()]
            assert masks == [(MASK, len(text) + i, len(text)) for i in range(block)]


# ------------------------------------------------------------------------------------- the decoder


def groups_by_hand(chances: list[float], most: int) -> list[int]:
    """The `most` likeliest of those with odds of .05 and more; the odds by the definition."""
    odds = {}
    for j in range(len(chances) + 1):
        odds[j] = math.prod(chances[:j])
        if j < len(chances):
            odds[j] *= 1 - chances[j]
    ranked = sorted(odds, key=odds.get)[::-1]
    return [j for j in ranked[:most] if odds[j] >= 0.05]


def by_hand(model, prompt: list[int], tau: float, block: int, max_new: int, groups: int):
    """Greedy AR, token by token, and the forwards that guessing would have taken; no cache.

    A forward goes on for as long as AR says what had been guessed. Then the masks that follow the
    text so far (without the last token) guess what comes after it, as far as they are sure of it;
    if the forward had masks for this number of guesses.
    """
    tokens = []
    accepted = []
    widths = []
    guesses = []
    masked = [0]
    while tokens[-1:] != [EOS] and len(tokens) < max_new:
        num_before = len(tokens)
        num_masks = 0 if tau >= 1 else block
        num_fed = 1 if tokens else len(prompt)  # the last token; what held before is cached
        widths.append(num_fed + len(guesses) + len(masked) * num_masks)
        while True:
            said, *ahead = predictions(model, prompt + tokens, block)
            tokens.append(said[1])
            if tokens[-1] == EOS or len(tokens) == max_new or guesses[:1] != tokens[-1:]:
                break
            guesses = guesses[1:]
        accepted.append(len(tokens) - num_before)
        sure = []
        if tau < 1 and accepted[-1] - 1 in masked:
            sure = list(itertools.takewhile(lambda guess: guess[0] >= tau, ahead))
        guesses = [token for _, token in sure]
        masked = groups_by_hand([chance for chance, _ in sure], groups)
    return tokens, accepted, widths


def test_text_and_forwards_by_hand():
    """Ragged batches, more prompts than rows, a tau per prompt; ends and max_new anywhere.

    The wrong group of masks would cost nothing but forwards, and a token that held but was not kept
    in the cache nothing but a position. That is why forwards and positions are compared, too.
    """
    accepted = []
    num_ended_early = 0
    for seed in cases(25, 1000):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(5)]
        taus = [rng.choice([0.0, 0.2, 0.4, 1.0]) for _ in prompts]
        options = {"block": block, "max_new": rng.choice([1, 2, 7, 20, 40])}
        options["groups"] = rng.randint(1, block + 1)
        rows = rng.randint(1, 6)
        answers = generate(model, prompts, rows=rows, tau=taus, verify=True, **options)
        for prompt, tau, answer in zip(prompts, taus, answers):
            expected = by_hand(model, prompt, tau, **options)
            assert (answer.tokens, answer.accepted) == expected[:2], (seed, options, tau)
            [alone] = generate(model, [prompt], tau=tau, verify=True, **options)
            assert (alone.tokens, alone.accepted, alone.positions) == expected, (seed, options, tau)
            if len(answer.tokens) < options["max_new"]:
                num_ended_early += 1
            if tau < 0.4:
                accepted += answer.accepted[1:]
    assert mean(accepted) > 1.15 and max(accepted) > 3 and num_ended_early > 10


def test_any_groups_may_be_missing(monkeypatch):
    """Missing at random, sometimes all; greedy or at a temperature, alone or in ragged batches."""
    rng = random.Random(0)
    monkeypatch.setattr(Decoder, "groups_for", lambda self, chances: some(rng, len(chances)))
    num_forwards = 0
    num_tokens = 0
    for seed in cases(25, 1000):
        case = random.Random(seed)
        model = tiny_model(case)
        prompts = [random_prompt(case, prompt_length(case)) for _ in range(4)]
        options = {"block": case.randint(1, 6), "max_new": case.choice([2, 7, 30])}
        options |= {"temperature": case.choice([0.0, 1.0]), "seed": case.randrange(9)}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, case.randint(2, 5)):
            answers = generate(model, prompts, rows, verify=True, **options)
            assert [a.tokens for a in answers] == [a.tokens for a in plain], (seed, rows)
            num_tokens += sum(len(answer.tokens) for answer in answers)
            num_forwards += sum(answer.forwards for answer in answers)
    assert num_tokens > 1.2 * num_forwards


def test_how_many_groups_there_are_by_default():
    """All that are likely at one row; one in a batch on a CPU; all of them at a temperature."""
    model = tiny_model(random.Random(0))
    even = [0.5, 0.5, 0.5]
    for rows, options, expected in [
        (1, {}, [0, 1, 2, 3]),
        (2, {}, [0]),
        (2, {"groups": 2}, [0, 1]),
        (1, {"groups": 1}, [0]),
        (2, {"temperature": 1.0}, [0, 1, 2, 3]),
        (2, {"temperature": 1.0, "groups": 1}, [0]),
    ]:
        decoder = Decoder(model, [], Options(verify=True, **options), rows, longest=20)
        assert decoder.groups_for(even) == expected, (rows, options)
    assert Decoder(model, [], Options(verify=True), 1, 20).groups_for([0.99, 0.99]) == [2]


def test_the_toy_model_says_what_it_says_one_token_at_a_time():
    """In float64, without exception; alone and in rows of 8."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompts = toy_prompts(chat)[: len(cases(8, 100))]
    plain = generate(model, prompts, tau=1)
    taus = (0.0, 0.3, 0.6, 0.9) if THOROUGH else (0.0, 0.6)
    for block, tau in itertools.product((2, 4, 8), taus):
        for rows in (1, 8):
            answers = generate(model, prompts, rows, tau=tau, block=block, verify=True)
            assert [a.tokens for a in answers] == [a.tokens for a in plain], (block, tau, rows)
        forwards = sum(a.forwards for a in answers)
        least = 2.3 if block == 2 else 3
        assert sum(len(a.tokens) for a in answers) > least * forwards


@pytest.mark.parametrize("metric, strict, loose", [("margin", 0.9, 0), ("entropy", 0.1, 9)])
def test_a_stricter_tau_makes_fewer_guesses_and_a_narrower_feed(metric, strict, loose):
    model = tiny_model(random.Random(4))
    prompts = [random_prompt(random.Random(i), 5) for i in range(8)]
    options = {"metric": metric, "max_new": 30}
    few = generate(model, prompts, tau=strict, verify=True, **options)
    many = generate(model, prompts, tau=loose, verify=True, **options)
    plain = generate(model, prompts, tau=one_token_tau(metric), **options)
    assert [a.tokens for a in few] == [a.tokens for a in many] == [a.tokens for a in plain]
    assert sum(sum(a.positions) for a in few) < sum(sum(a.positions) for a in many)


def test_tau_may_change_while_guesses_are_on_their_way():
    """From guessing all to guessing none and back: pending guesses are checked all the same."""
    now = [0.0]
    num_held = 0
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 9)) for _ in range(3)]
        options = Options(tau=lambda waiting: now[0], verify=True, max_new=30)
        answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
        decoder = Decoder(model, answers, options, rows=2)
        while news := decoder.step():
            if now[0] == 1:
                num_held += sum(len(tokens) > 1 for _, tokens in news)
            now[0] = rng.choice([0.0, 0.3, 1.0])
        for prompt, answer in zip(prompts, answers):
            assert answer.tokens == greedy(model, prompt, 30)
    assert num_held > 5  # a forward that guesses nothing still checked what had been guessed


def test_a_conversation_goes_on_from_what_was_checked():
    """Guesses that held are in the cache at their places: the next turn builds on them."""
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        options = Options(tau=0.0, verify=True, max_new=20)
        decoder = Decoder(model, [], options, 1, longest=200)
        prompt = random_prompt(rng, 9)
        for turn in range(3):
            answer = Answer(prompt, model, options, turn)
            decoder.waiting.append(answer)
            list(decoder)
            assert answer.tokens == greedy(model, prompt, 20)
            if turn > 0:
                assert answer.positions[0] <= 3 + 4 + 4 + 1  # the new tokens and the masks
            prompt = answer.ids + random_prompt(rng, 3)


def test_new_guesses_are_never_the_text(monkeypatch):
    """AR's token was once taken from the call that makes the next guesses: whoever changed the
    choice of guesses alone, as docs/change-it.md allows, got another text."""
    choose = decode.choose

    def wrong_guesses(model, outputs, batch, options, held=None):
        tokens = choose(model, outputs, batch, options, held)
        return tokens if held is None else (tokens + 1) % model.config.mask_token_id

    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 9)) for _ in range(3)]
        expected = generate(model, prompts, tau=1, max_new=20)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "choose", wrong_guesses)
            found = generate(model, prompts, verify=True, max_new=20)
        assert [a.tokens for a in found] == [a.tokens for a in expected]


# ------------------------------------------------------------------------------- at a temperature


def test_the_sampled_text_is_the_one_that_ar_samples():
    """With the dice of the same seed; however many guesses a row and its neighbours have.

    The dice used to come from a generator, so the order of draws changed the text.
    """
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        options = {"temperature": 1.0, "verify": True, "max_new": 20}
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
        taus = [rng.choice([0.0, 0.3, 1.0]) for _ in prompts]
        options["seed"] = rng.randrange(5)
        plain = generate(model, prompts, tau=1, **(options | {"verify": False}))
        one = generate(model, prompts, 1, taus, **options)
        four = generate(model, prompts, 4, taus, **options)
        assert [a.tokens for a in one] == [a.tokens for a in plain]
        assert [(a.tokens, a.accepted) for a in one] == [(a.tokens, a.accepted) for a in four]


def test_every_seed_text_and_position_has_its_own_dice():
    """Gumbel noise: a mean of .577 and a variance of pi^2 / 6. Mixed, not added: seed 1 of text 0
    has not the dice of seed 0 of text 1, nor has position 12 of text 1 those of 2 of text 11."""
    like = torch.zeros(200)
    seen = {}
    for seed, index, position in itertools.product(range(12), range(12), range(12)):
        drawn = lossless.dice(seed, index, position, like)
        assert drawn.dtype == torch.float32
        seen[tuple(drawn.tolist()[:3])] = drawn
    assert len(seen) == 12**3
    noise = torch.cat(list(seen.values()))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02
    again = lossless.dice(3, 5, 7, like.double())
    assert torch.equal(again, lossless.dice(3, 5, 7, like))


def test_a_guess_rolls_the_dice_that_its_check_will_roll():
    """Where all tokens are equally likely, the dice alone choose. Other dice would give the same
    text, in more forwards."""
    options = Options(verify=True, temperature=0.7, seed=5)
    model = tiny_model(random.Random(0))
    answer = Answer([2, 3], model, options, index=4)
    outputs = decode.Outputs(torch.empty(0), torch.zeros(1, 3, 8))
    for held in (0, 1, 2):
        chosen = decode.choose(model, outputs, [answer], options, torch.tensor([[held]]))
        for column, token in enumerate(chosen[0].tolist()):
            position = len(answer.ids) + held + column
            assert token == lossless.dice(5, 4, position, torch.zeros(8)).argmax()


def test_guesses_are_for_the_positions_after_those_that_hold():
    """Candidate 0 is AR's own last token once more: the dice are those of its position."""
    num_held = 0

    def watch(batch, outputs, candidates, decisions):
        nonlocal num_held
        for answer, row, decision in zip(batch, candidates.tolist(), decisions):
            if answer:
                num_held += decision.num_held
                assert row[0] == decision.tokens[-1]

    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        options = Options(verify=True, temperature=1.0, seed=seed, block=3, max_new=30)
        prompts = [random_prompt(rng, 5) for _ in range(4)]
        answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
        decoder = Decoder(model, answers, options, rows=2)
        decoder.watch = watch
        list(decoder)
    assert num_held > 100


def ar_distribution(model, prompt: list[int], length: int) -> dict[tuple, float]:
    """The probability of every answer of up to `length` tokens, by enumeration."""
    ended = {}
    growing = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, p in growing.items():
            ids = torch.tensor([prompt + list(tokens)])
            hidden = model(ids, torch.arange(ids.size(1))[None], None)
            probs = model.logits(hidden[0, -1:])[0].softmax(-1).tolist()
            for token, q in enumerate(probs):
                answers = ended if token == EOS else longer
                answers[(*tokens, token)] = p * q
        growing = longer
    return {tokens: p for tokens, p in (ended | growing).items() if p > 0}


def chi_square_p(counts: dict[tuple, int], expected: dict[tuple, float]) -> float:
    """p-value of the observed counts; cells that expect fewer than five are pooled."""
    draws = sum(counts.values())
    big = []  # (observed, expected)
    pooled_seen = 0
    pooled_wanted = 0.0
    for tokens, p in expected.items():
        if draws * p >= 5:
            big.append((counts.get(tokens, 0), draws * p))
        else:
            pooled_seen += counts.get(tokens, 0)
            pooled_wanted += draws * p
    if pooled_wanted:
        big.append((pooled_seen, pooled_wanted))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in big)
    half = torch.tensor([(len(big) - 1) / 2, statistic / 2]).double()
    return torch.special.gammaincc(*half).item()


def redraw_what_failed(said, given, again):
    """Wrong: where a guess fails, a second draw takes its place, and that may be the guess."""
    return torch.where(said == given, said, again)


def accept_every_guess(said, given, again):
    return torch.where(given >= 0, given, said)


@pytest.mark.parametrize("broken", [None, redraw_what_failed, accept_every_guess])
@torch.inference_mode()
def test_samples_are_those_of_plain_ar(broken, monkeypatch):
    """Vocabulary of 6, answers of 3 tokens, temperature 1: against exact enumeration.

    The test also has to see the difference where a decoder is broken on purpose.
    """
    if broken:
        choose = decode.choose

        def wrong(model, outputs, batch, options, held=None):
            said = choose(model, outputs, batch, options, held)
            if held is not None:  # new guesses
                return said
            again = choose(model, outputs, batch, replace(options, seed=99))
            given = torch.full_like(said, -1)
            for row, answer in zip(given, batch):
                guesses = answer.guesses if answer else []
                row[: len(guesses)] = torch.tensor(guesses)
            return broken(said, given, again)

        monkeypatch.setattr(decode, "choose", wrong)
    model = tiny_model(random.Random(36), vocab_size=6)
    prompt = [2, 3, 4]
    draws = len(cases(8_000, 200_000))
    options = {"temperature": 1.0, "verify": True, "tau": 0.0, "block": 2, "max_new": 3}
    answers = generate(model, [prompt] * draws, rows=1000, **options)
    counts = {}
    num_held = 0
    for answer in answers:
        tokens = tuple(answer.tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
        num_held += len(answer.tokens) - answer.forwards
    expected = ar_distribution(model, prompt, 3)
    assert counts.keys() <= expected.keys() and math.isclose(sum(expected.values()), 1)
    assert 0.1 * draws < num_held and len(expected) > 50  # guesses do hold, and do fail
    p = chi_square_p(counts, expected)
    if broken:
        assert p < 1e-6
    else:
        assert p > 0.01


# ---------------------------------------------------------------------------------------- refusals


def test_naive_does_not_pretend_to_verify():
    with pytest.raises(UserError, match="naive does not verify"):
        decode.naive(tiny_model(random.Random(0)), [2], verify=True)


def test_verify_and_blocks_exclude_each_other():
    with pytest.raises(UserError, match="verify cannot be combined with block_cache"):
        Options(verify=True, block_cache=8)
