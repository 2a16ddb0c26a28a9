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
from lossless import Lookup, Lossless, State, likely_groups
from model import load
from plumbing.errors import UserError
from plumbing.sampling import dice, with_dice
from plumbing.scheduler import num_in_common


def lossless_of(block: int, is_batch_on_cpu=False, **options) -> Lossless:
    return Lossless(block, Options(verify=True, **options), MASK, is_batch_on_cpu)


def some(rng: random.Random, num_guesses: int) -> list[int]:
    """Groups for some of the numbers of guesses that may hold, perhaps for none."""
    return [j for j in range(num_guesses + 1) if rng.random() < 0.6]


def random_state(rng: random.Random, block: int) -> State:
    """Up to `block` guesses, and groups for some of them."""
    guesses = random_prompt(rng, rng.randint(0, block))
    return State(guesses, some(rng, len(guesses)))


# -------------------------------------------------------------------------------- feed and decide


def test_the_feed_of_the_drawing():
    """The example of Lossless.feed: after a b c the guess d, groups 0 and 1."""
    sequence = Sequence([2, 3, 4], tiny_model(random.Random(0)).config, max_new=9, tau=None)
    sequence.state = State([5], [0, 1])
    feed = lossless_of(2).feed(sequence, room=math.inf, num_waiting=0)
    tokens, pos, prefix = torch.tensor(feed).unbind(-1)
    assert tokens.tolist() == [5, MASK, MASK, MASK, MASK]
    assert pos.tolist() == [3, 3, 4, 4, 5]
    assert prefix.tolist() == [4, 3, 3, 4, 4]


def test_useful_masks_of_the_drawing():
    """The one in lossless.py, B = 4: x at place 0, g1, g2, and three groups; g1 holds."""
    assert State([5, 6], [0, 1, 2]).useful_masks(1, 4) == range(7, 11)  # the masks that saw g1
    # without that group those of the one that saw less, from its second mask on
    assert State([5, 6], [0, 2]).useful_masks(1, 4) == range(4, 7)
    assert len(State([5, 6], [2]).useful_masks(1, 4)) == 0


def test_useful_masks_are_those_of_the_feed():
    """They predict the open places, and saw no guess that failed."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        block = rng.randint(1, 5)
        text = random_prompt(rng, 9)
        sequence = Sequence(text, tiny_model(rng).config, max_new=20, tau=None)
        state = sequence.state = random_state(rng, block)
        feed = [(text[-1], 8, 9), *lossless_of(block).feed(sequence, math.inf, 0)]
        held = rng.randint(0, len(state.guesses))
        seen = max((j for j in state.groups if j <= held), default=None)
        num_useful = 0 if seen is None else max(0, block - (held - seen))
        masks = [feed[place] for place in state.useful_masks(held, block)]
        assert len(masks) == num_useful
        for i, mask in enumerate(masks):  # at the first open place and on, and what the group saw
            assert mask == (MASK, 9 + held + i, 9 + seen)


def test_num_in_common_by_hand():
    """A guess holds if AR says it and all guesses before it hold."""
    guesses = [[5, 6], [5, 4], [4, 6], [], [5]]
    assert [num_in_common([5, 6, 7], row) for row in guesses] == [2, 1, 0, 0, 1]
    assert num_in_common([3], []) == 0


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
        state = State()
        guesses = list(range(3, 3 + len(chances)))
        state.plan(guesses, chances, lossless_of(4, is_batch, **options).most_groups)
        return state.guesses, state.groups

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
        state = State()
        least = rng.choice([0, 0.5, 0.9])
        chances = [rng.uniform(least, 1) for _ in range(block)]
        state.plan(list(range(block)), chances, lossless_of(block).most_groups)
        assert len(state.guesses) in state.groups


def test_a_decoder_knows_whether_it_is_a_batch_on_a_cpu():
    model = tiny_model(random.Random(0))
    most = {}
    for rows in (1, 2):
        most[rows] = Decoder(model, Options(verify=True, block=3), rows, 20).method.most_groups
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
    def __init__(self, block: int, options, mask_id: int, is_batch_on_cpu: bool):
        super().__init__(block, options, mask_id, False)


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
            assert (*outcome(alone), alone.widths) == expected, (seed, options)
            assert (
                result.state.checked == alone.state.checked
                and len(alone.state.checked) == alone.forwards
            )
            if len(result.tokens) < options["max_new"]:
                num_ended_early += 1
            accepted += result.accepted[1:]
            checked += result.state.checked
    assert mean(accepted) > 1.15 and max(accepted) > 3 and num_ended_early > 10
    assert min(checked) == 0 and max(checked) > 5


def test_any_groups_may_be_missing(monkeypatch):
    """Missing at random, sometimes all; greedy or at a temperature, alone or in ragged batches."""
    rng = random.Random(0)

    def plan(self, candidates, chances, most_groups):
        self.guesses = candidates
        self.groups = some(rng, len(candidates))[:most_groups]

    monkeypatch.setattr(State, "plan", plan)
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
                assert sequence.widths[0] <= 3 + 4 + 4 + 1  # the new tokens and the masks
            prompt = sequence.text + random_prompt(rng, 3)


def test_new_guesses_are_never_the_text(monkeypatch):
    """AR's token was once taken from the call that makes the next guesses: whoever changed the
    choice of guesses alone, as docs/change-it.md allows, got another text."""
    calls = itertools.count()

    def wrong_guesses(logits, *others):
        scores = with_dice(logits, *others)
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
