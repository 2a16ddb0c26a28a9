"""Lossless decoding: the text is plain AR's, samples are AR's samples, and forwards are fewer."""

import itertools
import math
import random

import pytest
import torch
from common import (
    EOS,
    MASK,
    ROOT,
    cases,
    prompt_length,
    random_prompt,
    tiny_model,
    toy_prompts,
)
from decoding import by_hand, greedy, logits_after, mean, outcome

import lossless
from decode import Decoder, Options, Sequence, generate
from lossless import Lookup, Lossless, count_held, likely_groups
from model import load
from plumbing.errors import UserError
from plumbing.sampling import dice, with_dice


def lossless_of(block: int, is_batch_on_cpu=False, **options) -> Lossless:
    return Lossless(block, Options(verify=True, **options), is_batch_on_cpu)


def some(rng: random.Random, num_guesses: int) -> list[int]:
    """Groups for some of the numbers of guesses that may hold, perhaps for none."""
    return [j for j in range(num_guesses + 1) if rng.random() < 0.6]


def random_sequence(rng: random.Random, block: int) -> Sequence:
    """A text of 9 tokens, up to `block` guesses, and groups for some of them."""
    config = tiny_model(rng).config
    sequence = Sequence(random_prompt(rng, 9), config, max_new=20, tau=None)
    sequence.guesses = random_prompt(rng, rng.randint(0, block))
    sequence.groups = some(rng, len(sequence.guesses))
    return sequence


# ------------------------------------------------------------------------------- feed and columns


def test_the_feed_of_the_drawing():
    """The example of Lossless.feed: a b c of which a b are cached, the guess d, groups 0 and 1."""
    sequence = Sequence([2, 3, 4], tiny_model(random.Random(0)).config, max_new=9, tau=None)
    sequence.guesses = [5]
    sequence.groups = [0, 1]
    tokens, pos, prefix = torch.tensor(lossless_of(2).feed(sequence, 2, MASK)).unbind(-1)
    assert tokens.tolist() == [4, 5, MASK, MASK, MASK, MASK]
    assert pos.tolist() == [2, 3, 3, 4, 4, 5]
    assert prefix.tolist() == [3, 4, 3, 3, 4, 4]


def test_candidate_columns_of_the_drawing():
    """The one in lossless.py, B = 4: x at column 0, g1, g2, and three groups; g1 holds."""
    sequence = Sequence([2], tiny_model(random.Random(0)).config, max_new=20, tau=None)
    sequence.guesses = [5, 6]
    sequence.groups = [0, 1, 2]
    columns = lossless_of(4).candidate_columns([3, 0], [None, sequence], [0, 1])
    assert columns[1] == [1, 7, 8, 9, 10]  # g1, and the masks that saw g1
    assert len(columns[0]) == 5  # of an idle row any
    sequence.groups = [0, 2]  # without that group the one that saw less, from its second mask on
    columns = lossless_of(4).candidate_columns([3, 0], [None, sequence], [0, 1])
    assert columns[1][:4] == [1, 4, 5, 6]


def test_the_columns_are_those_of_the_feed():
    """They lead to the last token that holds, and to the group that saw what holds."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        block = rng.randint(1, 5)
        ours = lossless_of(block)
        sequence = random_sequence(rng, block)
        num_cached = rng.randint(0, 8)
        feed = ours.feed(sequence, num_cached, MASK)
        held = rng.randint(0, len(sequence.guesses))
        [columns] = ours.candidate_columns([8 - num_cached], [sequence], [held])
        text = sequence.text + sequence.guesses[:held]
        assert feed[columns[0]] == (text[-1], len(text) - 1, len(text))
        seen = max((j for j in sequence.groups if j <= held), default=None)
        num_useful = 0 if seen is None else max(0, block - (held - seen))
        assert ours.num_useful(sequence, held) == num_useful
        masks = [feed[column] for column in columns[1 : 1 + num_useful]]
        for i in range(num_useful):  # the place of the first open token, and what the group saw
            assert masks[i] == (MASK, len(text) + i, len(sequence.text) + seen)


def test_count_held_by_hand():
    """A guess holds if AR says it and all guesses before it hold."""
    guesses = [[5, 6], [5, 4], [4, 6], [], [5]]
    assert [count_held([5, 6, 7], row) for row in guesses] == [2, 1, 0, 0, 1]
    assert count_held([3], []) == 0


# ------------------------------------------------------------------------------ guesses and groups


def test_likely_groups_by_hand():
    """Odds of .75, .75 * .5 and so on: none holds .25, one .375, two .262, all three .112."""
    chances = [0.75, 0.5, 0.3]
    assert likely_groups(chances, most=9) == [0, 1, 2]
    assert likely_groups(chances, most=2) == [1, 2]
    assert likely_groups(chances, most=1) == [1]
    assert likely_groups([], most=1) == [0]
    assert likely_groups([0.9, 0.9], most=9) == [2]  # the others: .1 and .09
    assert likely_groups([0.79], most=9) == [0, 1]
    assert likely_groups([0.3, 0.3], most=9) == [0, 1]  # all of them: .09


def test_what_is_kept_by_hand():
    """Guesses that hold with a probability of .2 and more, all before them included; and groups:
    all that are likely at one row, one in a batch on a CPU."""

    def kept(chances: list[float], is_batch=False, **options) -> tuple[list[int], list[int]]:
        sequence = Sequence([2], tiny_model(random.Random(0)).config, max_new=20, tau=None)
        sequence.guesses = list(range(3, 3 + len(chances)))
        lossless_of(4, is_batch, **options).plan(sequence, [*chances, 0.9])  # one without a guess
        return sequence.guesses, sequence.groups

    even = [0.7, 0.7, 0.7]  # none holds: .3, one: .21, two: .147, three: .343
    assert kept(even) == ([3, 4, 5], [0, 1, 3])
    assert kept([0.5, 0.5, 0.1]) == ([3, 4], [0, 1, 2])
    assert kept([0.19, 1.0]) == ([], [0])
    assert kept([0.99, 0.99]) == ([3, 4], [2])
    assert kept([]) == ([], [0])
    assert kept(even, is_batch=True) == ([3, 4, 5], [3])
    assert kept(even, is_batch=True, groups=2) == ([3, 4, 5], [0, 3])
    assert kept(even, groups=1) == ([3, 4, 5], [3])


def test_there_is_always_a_group():
    """The guesses that are kept all hold with .2 at least, and so the group after them is kept."""
    for seed in cases(200, 5000):
        rng = random.Random(seed)
        block = rng.randint(1, 16)
        sequence = Sequence([2], tiny_model(random.Random(0)).config, max_new=20, tau=None)
        sequence.guesses = list(range(3, 3 + block))
        least = rng.choice([0, 0.5, 0.9])
        lossless_of(block).plan(sequence, [rng.uniform(least, 1) for _ in range(block)])
        assert len(sequence.guesses) in sequence.groups


def test_a_decoder_knows_whether_it_is_a_batch_on_a_cpu():
    model = tiny_model(random.Random(0))
    most = {}
    for rows in (1, 2):
        most[rows] = Decoder(model, Options(verify=True, block=3), rows, 20).lossless.most_groups
    assert most == {1: 4, 2: 1}


def test_lookup_by_hand():
    """What followed the last a b c; twice as many as were right the last time, but one at least."""
    lookup = Lookup()
    a, b, c, x, y = 2, 3, 4, 5, 6
    text = [a, b, c, x, x, a, b, c, y, x, y, x]
    assert lookup.guesses(text, []) == []  # x y x is new
    text += [a, b, c]
    assert lookup.guesses(text, []) == [y, x, y, x]  # the first four, and not x x a ...
    text += [y, x, a]  # two of them were right, so four are offered, if there are
    assert lookup.guesses(text, [b, c]) == [y, x, a]
    text += [x]  # not b: what was offered after b c says nothing
    assert lookup.guesses(text, [a, b, c]) == [y, x, a, x]
    text += [a, b, c, x]  # not y: one is offered now
    assert lookup.guesses(text, [y, b, c, y]) == [x]
    text += [y, b, c, y, x, a, b]  # x came, and a, which was not offered
    assert lookup.guesses(text, [c]) == [x, y, b, c]


def test_a_lookup_that_is_not_reached_is_not_judged():
    """The text ends with the masks' guesses: nothing came in the place of what was found."""
    lookup = Lookup()
    text = [2, 3, 4, 5, 5, 2, 3]
    assert lookup.guesses(text, [4]) == [5, 5, 2, 3]
    assert lookup.guesses([*text, 4], []) == [5, 5, 2, 3]


def test_guesses_from_the_text_are_ars_text_in_fewer_forwards(monkeypatch):
    """Greedy and at a temperature, alone and (as on a GPU) in ragged batches: the text is that of
    tau 1. Random models repeat themselves often enough."""
    monkeypatch.setattr("decode.Lossless", AsOnAGpu)
    num_forwards = {0: 0, 10: 0}
    for seed in cases(10, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": rng.randint(1, 4), "max_new": 40, "temperature": rng.choice([0, 0.5])}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, 3):
            for most in num_forwards:
                monkeypatch.setattr("lossless.MOST_LOOKED_UP", most)
                found = generate(model, prompts, rows, verify=True, **options)
                assert [s.tokens for s in found] == [s.tokens for s in plain], (seed, rows)
                num_forwards[most] += sum(sequence.forwards for sequence in found)
    assert num_forwards[10] < 0.98 * num_forwards[0]


class AsOnAGpu(Lossless):
    def __init__(self, block: int, options, is_batch_on_cpu: bool):
        super().__init__(block, options, False)


# ------------------------------------------------------------------------------------- the decoder

RARE = 0.05  # LEAST_PROBABILITY for random models: they are so unsure that .2 would leave out most


def groups_by_hand(chances: list[float], most: int) -> list[int]:
    """The `most` likeliest of those with odds of RARE and more; the odds by the definition."""
    odds = {}
    for j in range(len(chances) + 1):
        odds[j] = math.prod(chances[:j])
        if j < len(chances):
            odds[j] *= 1 - chances[j]
    ranked = sorted(odds, key=odds.get)[::-1]
    return [j for j in ranked[:most] if odds[j] >= RARE]


def guessed_by_hand(
    model,
    prompt: list[int],
    block: int,
    max_new: int,
    groups: int,
    temperature=0.0,
    seed=0,
    index=0,
):
    """AR, token by token, and the forwards that guessing would have taken; no cache.

    A forward goes on for as long as AR says what had been guessed. Then the masks that saw the most
    of these guesses, and no others, guess what comes after the last token: all of them if they saw
    all that held, else without the first few. Guesses that hold too rarely are dropped.
    """

    def with_dice_of(pos: int, logits):
        return logits + temperature * dice(seed, index, pos, logits)

    tokens = []
    accepted = []
    widths = []
    guesses = []
    masked = [0]
    while tokens[-1:] != [EOS] and len(tokens) < max_new:
        num_before = len(tokens)
        num_fed = 1 if tokens else len(prompt)  # the last token; what held before is cached
        widths.append(num_fed + len(guesses) + len(masked) * block)
        while True:
            [logits] = logits_after(model, prompt + tokens, 0)
            tokens.append(with_dice_of(len(prompt + tokens), logits).argmax().item())
            if tokens[-1] == EOS or len(tokens) == max_new or guesses[:1] != tokens[-1:]:
                break
            guesses = guesses[1:]
        accepted.append(len(tokens) - num_before)
        held = accepted[-1] - 1
        seen = max((j for j in masked if j <= held), default=None)
        ahead = []
        if seen is not None:
            text = prompt + tokens[: num_before + seen]
            for pos, logits in enumerate(logits_after(model, text, block), start=len(text)):
                chance, token = with_dice_of(pos, logits).softmax(-1).max(-1)
                ahead.append((chance.item(), token.item()))
            ahead = ahead[1 + held - seen :]
        while math.prod(chance for chance, _ in ahead) < RARE:
            ahead.pop()
        guesses = [token for _, token in ahead]
        masked = groups_by_hand([chance for chance, _ in ahead], groups)
    return tokens, accepted, widths


def alone_in_its_row(model, prompt: list[int], index: int, options: dict) -> Sequence:
    decoder = Decoder(model, Options(verify=True, **options), 1, len(prompt) + options["max_new"])
    sequence = decoder.add(prompt, index=index)
    list(decoder)
    return sequence


@pytest.mark.usefixtures("without_lookup")
def test_text_and_forwards_by_hand(monkeypatch):
    """Ragged batches, more prompts than rows; ends and max_new anywhere.

    The wrong group of masks would cost nothing but forwards, and a token that held but was not kept
    in the cache nothing but a position. That is why forwards and positions are compared, too.
    """
    monkeypatch.setattr("lossless.LEAST_PROBABILITY", RARE)
    accepted = []
    checked = []
    num_ended_early = 0
    for seed in cases(25, 1000):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": block, "max_new": rng.choice([1, 2, 7, 20, 40])}
        options["groups"] = rng.randint(1, block + 1)
        options |= {"temperature": rng.choice([0.0, 0.5, 1.0]), "seed": seed}
        rows = rng.randint(1, 6)
        for index, result in enumerate(generate(model, prompts, rows, verify=True, **options)):
            expected = guessed_by_hand(model, prompts[index], index=index, **options)
            assert outcome(result) == expected[:2], (seed, options)
            alone = alone_in_its_row(model, prompts[index], index, options)
            assert (*outcome(alone), alone.positions) == expected, (seed, options)
            assert result.checked == alone.checked and len(alone.checked) == alone.forwards
            if len(result.tokens) < options["max_new"]:
                num_ended_early += 1
            accepted += result.accepted[1:]
            checked += result.checked
    assert mean(accepted) > 1.15 and max(accepted) > 3 and num_ended_early > 10
    assert min(checked) == 0 and max(checked) > 5


def test_any_groups_may_be_missing(monkeypatch):
    """Missing at random, sometimes all; greedy or at a temperature, alone or in ragged batches."""
    rng = random.Random(0)

    def plan(self, sequence, chances):
        sequence.groups = some(rng, len(sequence.guesses))[: self.most_groups]

    monkeypatch.setattr(Lossless, "plan", plan)
    num_forwards = 0
    num_tokens = 0
    for seed in cases(25, 1000):
        case = random.Random(seed)
        model = tiny_model(case)
        prompts = [random_prompt(case, prompt_length(case)) for _ in range(4)]
        options = {"block": case.randint(1, 6), "max_new": case.choice([2, 7, 30]), "groups": 5}
        options |= {"temperature": case.choice([0.0, 1.0]), "seed": case.randrange(9)}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, case.randint(2, 5)):
            results = generate(model, prompts, rows, verify=True, **options)
            assert [a.tokens for a in results] == [a.tokens for a in plain], (seed, rows)
            num_tokens += sum(len(result.tokens) for result in results)
            num_forwards += sum(result.forwards for result in results)
    assert num_tokens > 1.2 * num_forwards


def test_the_toy_model_says_what_it_says_one_token_at_a_time():
    """In float64, without exception; alone and in rows of 8."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompts = toy_prompts(chat)[: len(cases(8, 100))]
    plain = generate(model, prompts, tau=1)
    for block, rows in itertools.product((2, 4, 8), (1, 8)):
        results = generate(model, prompts, rows, block=block, verify=True)
        assert [a.tokens for a in results] == [a.tokens for a in plain], (block, rows)
        least = 2.3 if block == 2 else 3
        forwards = sum(a.forwards for a in results)
        assert rows > 1 or sum(len(a.tokens) for a in results) > least * forwards


def test_a_conversation_goes_on_from_what_was_checked():
    """Guesses that held are in the cache at their places: the next turn builds on them."""
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        decoder = Decoder(model, Options(verify=True, max_new=20), 1, longest=200)
        prompt = random_prompt(rng, 9)
        for turn in range(3):
            sequence = decoder.add(prompt)
            list(decoder)
            assert sequence.tokens == greedy(model, prompt, 20)
            if turn > 0:
                assert sequence.positions[0] <= 3 + 4 + 4 + 1  # the new tokens and the masks
            prompt = sequence.text + random_prompt(rng, 3)


def test_new_guesses_are_never_the_text(monkeypatch):
    """AR's token was once taken from the call that makes the next guesses: whoever changed the
    choice of guesses alone, as docs/change-it.md allows, got another text."""
    calls = itertools.count()

    def wrong_guesses(logits, batch, *others):
        scores = with_dice(logits, batch, *others)
        if next(calls) % 2 == 0:
            return scores
        return scores[..., :MASK].roll(1, dims=-1)

    for seed in cases(5, 50):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 9)) for _ in range(3)]
        expected = generate(model, prompts, tau=1, max_new=20)
        with monkeypatch.context() as patch:
            patch.setattr(lossless, "with_dice", wrong_guesses)
            found = generate(model, prompts, verify=True, max_new=20)
        assert [a.tokens for a in found] == [a.tokens for a in expected]


def test_a_tau_is_refused():
    """It would do nothing: every guess is checked."""
    decoder = Decoder(tiny_model(random.Random(0)), Options(verify=True), 1, longest=300)
    with pytest.raises(UserError, match="verify takes no tau"):
        decoder.add([2, 3], tau=0.9)
    assert not decoder.scheduler.waiting


# ------------------------------------------------------------------------------- at a temperature


@pytest.mark.usefixtures("without_lookup")
def test_the_sampled_text_is_the_one_that_ar_samples():
    """With the dice of the same seed; however many guesses a row and its neighbours have.

    The dice used to come from a generator, so the order of draws changed the text.
    """
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
        options = {"temperature": 1.0, "max_new": 20, "seed": rng.randrange(5)}
        plain = [
            by_hand(model, prompt, 1, index=i, **options)[0] for i, prompt in enumerate(prompts)
        ]
        one = generate(model, prompts, 1, verify=True, groups=5, **options)
        four = generate(model, prompts, 4, verify=True, groups=5, **options)
        assert [sequence.tokens for sequence in one] == plain
        assert list(map(outcome, one)) == list(map(outcome, four))


def test_every_seed_text_and_position_has_its_own_dice():
    """Gumbel noise: a mean of .577 and a variance of pi^2 / 6. Mixed, not added: seed 1 of text 0
    has not the dice of seed 0 of text 1, nor has position 12 of text 1 those of 2 of text 11."""
    like = torch.zeros(200)
    seen = {}
    for seed, index, position in itertools.product(range(12), range(12), range(12)):
        drawn = dice(seed, index, position, like)
        assert drawn.dtype == torch.float32
        seen[tuple(drawn.tolist()[:3])] = drawn
    assert len(seen) == 12**3
    noise = torch.cat(list(seen.values()))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02
    again = dice(3, 5, 7, like.double())
    assert torch.equal(again, dice(3, 5, 7, like))


def test_a_guess_rolls_the_dice_that_its_check_will_roll():
    """Where all tokens are equally likely, the dice alone choose. Other dice would give the same
    text, in more forwards."""
    sequence = Sequence([2, 3], tiny_model(random.Random(0)).config, 9, tau=None, index=4)
    for ahead in (0, 1, 2):
        [scores] = with_dice(torch.zeros(1, 3, 8), [sequence], 0.7, seed=5, ahead=[ahead])
        for position, token in enumerate(scores.argmax(-1).tolist(), start=2 + ahead):
            assert token == dice(5, 4, position, torch.zeros(8)).argmax()


def test_guesses_are_for_the_positions_after_those_that_hold(monkeypatch):
    """Candidate 0 is AR's own last token once more: the dice are those of its position."""
    chosen = []
    check = Lossless.check
    num_held = 0

    def recorded(*arguments):
        scores = with_dice(*arguments)
        chosen.append(scores.argmax(-1))
        return scores

    def compared(self, model, hidden, last_columns, batch):
        nonlocal num_held
        decisions = check(self, model, hidden, last_columns, batch)
        for sequence, (accepted, held), candidates in zip(batch, decisions, chosen[-1].tolist()):
            if sequence:
                num_held += held
                assert candidates[0] == accepted[-1]
        return decisions

    monkeypatch.setattr(lossless, "with_dice", recorded)
    monkeypatch.setattr(Lossless, "check", compared)
    for seed in cases(10, 100):
        rng = random.Random(seed)
        prompts = [random_prompt(rng, 5) for _ in range(4)]
        options = {"temperature": 1.0, "seed": seed, "block": 3, "max_new": 30}
        generate(tiny_model(rng), prompts, rows=2, verify=True, **options)
    assert num_held > 100


def ar_distribution(model, prompt: list[int], length: int) -> dict[tuple, float]:
    """The probability of every answer of up to `length` tokens, by enumeration."""
    ended = {}
    growing = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, p in growing.items():
            probs = logits_after(model, prompt + list(tokens), 0)[0].softmax(-1).tolist()
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


@torch.inference_mode()
def test_samples_are_those_of_plain_ar():
    """Vocabulary of 6, answers of 3 tokens, temperature 1: against exact enumeration."""
    model = tiny_model(random.Random(36), vocab_size=6)
    prompt = [2, 3, 4]
    draws = len(cases(8_000, 200_000))
    options = {"temperature": 1.0, "verify": True, "block": 2, "max_new": 3}
    results = generate(model, [prompt] * draws, rows=1000, **options)
    counts = {}
    num_held = 0
    for result in results:
        tokens = tuple(result.tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
        num_held += len(result.tokens) - result.forwards
    expected = ar_distribution(model, prompt, 3)
    assert counts.keys() <= expected.keys() and math.isclose(sum(expected.values()), 1)
    assert 0.1 * draws < num_held and len(expected) > 50  # guesses do hold, and do fail
    assert chi_square_p(counts, expected) > 0.01
