"""Lossless decoding: the text is plain AR's, samples are AR's samples, and forwards are fewer."""

import itertools
import math
import random
from collections import Counter

import torch
from common import EOS, ROOT, cases, prompt_length, random_prompt, tiny_model, toy_prompts
from decoding import alone, logits_after, mean, outcome, use_lossless

from decode import Decoder, Options, generate
from lossless import Lookup, Lossless, Plan, count_worth, likely_groups, useful_masks
from model import load
from plumbing.sampling import dice

# ------------------------------------------------------------------------------ guesses and groups


def test_what_is_planned_by_hand():
    """Guesses that hold with a probability of .2 and more, and the groups that are likely."""

    def planned(*chances: float, most=9) -> tuple[int, list[int]]:
        num_worth = count_worth(list(chances))
        groups = likely_groups(list(chances[:num_worth]), most)
        assert num_worth in groups or most == 1
        return num_worth, groups

    # None holds: .3, one: .21, two: .147, three: .343
    assert planned(0.7, 0.7, 0.7) == (3, [0, 1, 3])
    assert planned(0.7, 0.7, 0.7, most=1) == (3, [3])
    assert planned(0.5, 0.5, 0.1) == (2, [0, 1, 2])
    assert planned(0.19, 1.0) == (0, [0])
    assert planned() == (0, [0])
    rng = random.Random(0)
    for _ in cases(200, 5000):
        least = rng.choice([0, 0.5, 0.9])
        planned(*[rng.uniform(least, 1) for _ in range(rng.randint(1, 16))])


def test_useful_masks_by_hand():
    """B = 2 and two guesses: positions 3 and 4 are group 0, which saw none of them, and so on."""

    def useful(*groups: int, held: int) -> list[int]:
        return list(useful_masks(Plan(guesses=[8, 9], groups=list(groups)), held, block=2))

    assert useful(0, 1, 2, held=1) == [5, 6]  # group 2 saw a guess that failed
    assert useful(0, 1, 2, held=2) == [7, 8]
    assert useful(0, 2, held=1) == [4]  # what the first mask of group 0 predicts is known
    assert useful(0, held=2) == [] and useful(1, 2, held=0) == []


def test_a_batch_on_a_cpu_has_one_group():
    """And no guesses from the text: every row would be as wide as the widest."""
    model = tiny_model(random.Random(0))
    for rows, groups in ((1, 4), (2, 1)):
        method = Decoder(model, Options(block=3), rows, longest=20).method
        assert (method.most_groups, method.looks_up) == (groups, rows == 1)


def test_lookup_by_hand():
    """What followed the last a b c; twice as many as were right the last time, but one at least."""
    lookup = Lookup()
    a, b, c, x, y = 2, 3, 4, 5, 6
    text = [a, b, c, x, x, a, b, c, y, x, y, x]
    assert lookup.next_guesses(text, []) == []  # x y x is new
    text += [a, b, c]
    assert lookup.next_guesses(text, []) == [y, x, y, x]  # the first four, and not x x a ...
    text += [y, x, a]  # two of them were right, so four are offered, if there are
    assert lookup.next_guesses(text, [b, c]) == [y, x, a]
    text += [x]  # not b: what was offered after b c says nothing
    assert lookup.next_guesses(text, [a, b, c]) == [y, x, a, x]
    text += [a, b, c, x]  # not y: one is offered now
    assert lookup.next_guesses(text, [y, b, c, y]) == [x]
    text += [y, b, c, y, x, a, b]  # x came, and a, which was not offered
    assert lookup.next_guesses(text, [c]) == [x, y, b, c]


# --------------------------------------------------------------------------- the text and forwards


def test_guesses_from_the_text_are_ars_text_in_fewer_forwards(monkeypatch):
    """Greedy and at a temperature, alone and (as on a GPU) in ragged batches: the text is that of
    tau 1. Random models repeat themselves often enough."""
    use_lossless(monkeypatch, groups=5, looks_up=True)
    num_forwards = {0: 0, 10: 0}
    for seed in cases(6, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": rng.randint(1, 4), "max_new": 40, "temperature": rng.choice([0, 0.5])}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, 3):
            for most in num_forwards:
                monkeypatch.setattr("lossless.MOST_LOOKED_UP", most)
                found = generate(model, prompts, rows, **options)
                assert [s.tokens for s in found] == [s.tokens for s in plain], (seed, rows)
                num_forwards[most] += sum(sequence.forwards for sequence in found)
    assert num_forwards[10] < 0.98 * num_forwards[0]


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

    Returns the tokens; of each forward how many it gave, and its width.

    A forward goes on for as long as AR says what had been guessed. Then the masks that saw the most
    of these guesses, and no others, guess what comes after the last token: all of them if they saw
    all that held, else without the first few. Guesses that hold too rarely are dropped.
    """

    def with_dice_of(pos: int, logits):
        return logits + temperature * dice(seed, index, pos, *logits.shape, logits.device)

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


def test_text_and_forwards_by_hand(monkeypatch):
    """Ragged batches, more prompts than rows; ends and max_new anywhere.

    The wrong group of masks would cost nothing but forwards, other dice for a guess the same, and a
    token that held but was not kept in the cache nothing but a position. So all these are compared.
    """
    monkeypatch.setattr("lossless.LEAST_PROBABILITY", RARE)
    accepted = []
    num_ended_early = 0
    for seed in cases(25, 1000):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        groups = rng.randint(1, block + 1)
        use_lossless(monkeypatch, groups)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": block, "max_new": rng.choice([1, 2, 7, 20, 40])}
        options |= {"temperature": rng.choice([0.0, 0.5, 1.0]), "seed": seed}
        results = generate(model, prompts, rng.randint(1, 6), **options)
        for index, (prompt, result) in enumerate(zip(prompts, results)):
            one = alone(model, prompt, index, **options)
            by_hand = guessed_by_hand(model, prompt, groups=groups, index=index, **options)
            assert (one.tokens, one.num_accepted, one.widths) == by_hand, (seed, options)
            assert outcome(result) == outcome(one)
            if len(result.tokens) < options["max_new"]:
                num_ended_early += 1
            accepted += result.num_accepted[1:]
    assert mean(accepted) > 1.15 and max(accepted) > 3 and num_ended_early > 10


def test_any_groups_may_be_missing(monkeypatch):
    """And guesses may be anything: they decide the speed, never the text.

    Groups are missing at random, sometimes all; greedy or at a temperature, alone or in ragged
    batches.
    """
    rng = random.Random(0)
    decide = Lossless.decide

    def sometimes_wrong(self, sequence, tokens, confidences):
        decision = decide(self, sequence, tokens, [1.0] * len(confidences))
        plan = sequence.state
        if rng.random() < 0.3:
            plan.guesses = [(token + 1) % 8 for token in plan.guesses]
        some = [j for j in range(len(plan.guesses) + 1) if rng.random() < 0.6]
        plan.groups = some[: self.most_groups]
        return decision

    use_lossless(monkeypatch, groups=5)
    monkeypatch.setattr(Lossless, "decide", sometimes_wrong)
    num_forwards = 0
    num_tokens = 0
    for seed in cases(20, 1000):
        case = random.Random(seed)
        model = tiny_model(case)
        prompts = [random_prompt(case, prompt_length(case)) for _ in range(4)]
        options = {"block": case.randint(1, 6), "max_new": case.choice([2, 7, 30])}
        options |= {"temperature": case.choice([0.0, 1.0]), "seed": case.randrange(9)}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, case.randint(2, 5)):
            results = generate(model, prompts, rows, **options)
            assert [a.tokens for a in results] == [a.tokens for a in plain], (seed, rows)
            num_tokens += sum(len(result.tokens) for result in results)
            num_forwards += sum(result.forwards for result in results)
    assert num_tokens > 1.1 * num_forwards


def test_the_toy_model_says_what_it_says_one_token_at_a_time():
    """In float64, without exception; alone and in rows of 8."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    prompts = toy_prompts(chat)[: len(cases(8, 100))]
    plain = generate(model, prompts, tau=1)
    for block, rows in itertools.product((2, 4, 8), (1, 8)):
        results = generate(model, prompts, rows, block=block)
        assert [a.tokens for a in results] == [a.tokens for a in plain], (block, rows)
        least = 2.3 if block == 2 else 3
        forwards = sum(a.forwards for a in results)
        assert rows > 1 or sum(len(a.tokens) for a in results) > least * forwards


# ------------------------------------------------------------------------------- at a temperature


def test_every_seed_text_and_position_has_its_own_dice():
    """Gumbel noise: a mean of .577 and a variance of pi^2 / 6. Mixed, not added: seed 1 of text 0
    has not the dice of seed 0 of text 1, nor has position 12 of text 1 those of 2 of text 11."""
    cpu = torch.device("cpu")
    seen = {}
    for seed, index, position in itertools.product(range(12), range(12), range(12)):
        drawn = dice(seed, index, position, 200, cpu)
        assert drawn.dtype == torch.float32
        seen[tuple(drawn.tolist()[:3])] = drawn
    assert len(seen) == 12**3
    noise = torch.cat(list(seen.values()))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02


def test_dice_are_kept_for_one_forward_and_no_longer():
    """128 vectors of the vocabulary were kept for the life of the process: 78 MB with a Qwen."""
    model = tiny_model(random.Random(5))
    decoder = Decoder(model, Options(temperature=1.0, max_new=30, block=3), rows=2, longest=40)
    sequences = [decoder.add([2, 3, 4]) for _ in range(2)]
    before = {}
    num_again = 0
    while decoder.step():
        kept = decoder.dice.kept
        assert len(kept) <= 2 * decoder.cache.widest
        for (index, position), noise in kept.items():
            assert torch.equal(noise, dice(0, index, position, 8, noise.device))
        num_again += len(before.keys() & kept.keys())
        before = kept
    assert num_again > 10 and all(sequence.done for sequence in sequences)


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


@torch.inference_mode()
def test_samples_are_those_of_plain_ar():
    """Vocabulary of 6, answers of 3 tokens, temperature 1: against exact enumeration."""
    model = tiny_model(random.Random(36), vocab_size=6)
    prompt = [2, 3, 4]
    draws = len(cases(4_000, 200_000))
    options = {"temperature": 1.0, "block": 2, "max_new": 3}
    results = generate(model, [prompt] * draws, rows=1000, **options)
    counts = Counter(tuple(result.tokens) for result in results)
    num_held = sum(len(result.tokens) - result.forwards for result in results)
    expected = ar_distribution(model, prompt, 3)
    assert counts.keys() <= expected.keys() and math.isclose(sum(expected.values()), 1)
    assert 0.1 * draws < num_held and len(expected) > 50  # guesses do hold, and do fail
    often = [answer for answer in expected if draws * expected[answer] >= 5]
    seen = torch.tensor([counts[answer] for answer in often])
    wanted = torch.tensor([draws * expected[answer] for answer in often])
    chi_square = ((seen - wanted) ** 2 / wanted).sum() / len(often)
    assert chi_square < 1 + 3 * math.sqrt(2 / len(often))  # its mean and standard deviation
