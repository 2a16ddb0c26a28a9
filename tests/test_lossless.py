"""Lossless decoding: the text is plain AR's, samples are AR's samples, and forwards are fewer."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from common import (
    EOS,
    MASK,
    ROOT,
    cases,
    endless_model,
    prompt_length,
    random_prompt,
    tiny_model,
    toy_prompts,
)
from decoding import alone, logits_after, mean, outcome, use_lossless, what_followed

from decode import Decoder, Options, Sequence, generate
from lossless import (
    FIRST_RUN_CHANCES,
    MORE_THAN_B,
    RATE,
    Guess,
    Lossless,
    Plan,
    PromptLookup,
    likely_groups,
    useful_masks,
)
from model import load
from plumbing.sampling import gumbel_noise

# ------------------------------------------------------------------------------ guesses and groups


def planned(*chances: float, most=9, text=(), of_text=None) -> tuple[list[int], list[int]]:
    """The tokens to check and the groups, after a text, if masks predict 11, 12, ...

    of_text: the chances of guesses from the text.
    """
    method = Lossless(block=9, mask_id=MASK, on_cpu=True)
    method.run_chances |= of_text or {}
    from_masks = [Guess(token, chance) for token, chance in enumerate(chances, start=11)]
    guesses = method.chain(PromptLookup(), text or [2], from_masks)
    groups = likely_groups([guess.chance for guess in guesses], most)
    assert len(guesses) in groups or most == 1
    return [guess.token for guess in guesses], groups


def test_what_is_planned_by_hand():
    """Guesses that hold with a probability of .2 and more, and the groups that are likely."""
    # None holds: .3, one: .21, two: .147, three: .343
    assert planned(0.7, 0.7, 0.7) == ([11, 12, 13], [0, 1, 3])
    assert planned(0.7, 0.7, 0.7, most=2) == ([11, 12, 13], [0, 3])
    assert planned(0.7, 0.7, 0.7, most=1) == ([11, 12, 13], [3])
    assert planned(0.5, 0.5, 0.1) == ([11, 12], [0, 1, 2])
    assert planned(0.95, 0.9, 0.1) == ([11, 12], [2])
    assert planned(0.19, 1.0) == ([], [0])
    assert planned() == ([], [0])
    rng = random.Random(0)
    for _ in cases(200, 5000):
        least = rng.choice([0, 0.5, 0.9])
        planned(*[rng.uniform(least, 1) for _ in range(rng.randint(1, 9))])


def test_the_likelier_of_text_and_mask_is_guessed():
    """Place by place: what followed the longest run then, or what the mask says."""
    text = [5, 6, 12, 30, 5, 6, 7, 12, 30, 31, 5, 6]
    of_text = {2: 0.9, 4: 0.97, 8: 0.98}
    sure = [7, 12, 30, 31, 5, 6, 7, 12, 30, 31, 5, 6, 7, 12, 30, 31, 5, 6, 7, 12]
    long, _ = planned(0.8, 0.8, text=text, of_text=of_text)
    assert long[:20] == sure and len(long) == 9 + MORE_THAN_B  # `widest` has room for no more
    assert planned(0.92, text=text, of_text=of_text)[0] == [11]  # 6 11 is new
    assert planned(0.8, 0.92, 0.6, text=text, of_text=of_text)[0][:4] == [7, 12, 30, 31]
    assert planned(0.8, 0.8, 0.98, text=text, of_text=of_text)[0] == [7, 12, 13]
    few = {2: 0.5, 4: 0.5, 8: 0.5}
    assert planned(0.1, 0.1, text=text, of_text=few)[0] == [7, 12]
    assert planned(text=text, of_text=few)[0] == [7, 12]
    assert planned(0.6, 0.6, text=[5, 6, 8, 5, 7])[0] == [11, 12]  # new


def test_guesses_are_judged():
    """By those that were checked, the first that failed among them."""
    of_two, of_four = Guess(3, 0.9, run=2), Guess(3, 0.9, run=4)
    fed = [of_two, Guess(3, 0.9), of_four, of_two]
    method = Lossless(block=9, mask_id=MASK, on_cpu=True)
    down, up = 0.5 * (1 - RATE), 0.5 * (1 - RATE) + RATE
    for num_held, two, mask, four in (
        (0, down, 0.5, 0.5),
        (1, up, down, 0.5),
        (2, up, up, down),
        (3, up * (1 - RATE), up, up),
        (4, up * (1 - RATE) + RATE, up, up),
    ):
        method.mask_chance = 0.5
        method.run_chances = {2: 0.5, 4: 0.5, 8: 0.5}
        method.update_chances(fed, num_held)
        assert method.mask_chance == pytest.approx(mask), num_held
        assert method.run_chances == pytest.approx({2: two, 4: four, 8: 0.5}), num_held
    # A guess of a run of four holds: the next one's chance has learnt from it already.
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    sequence = Sequence(text, tiny_model(random.Random(0)).config, max_new=9, tau=None)
    sequence.state = Plan(guesses=[Guess(5, 0.5, run=4)])
    method.run_chances = dict.fromkeys(method.run_chances, 0.5)
    assert method.accept(sequence, [5, 6], [0.5, 0.5]) == [5, 6]
    sequence.take([5, 6], width=2)
    method.additions(sequence)
    assert sequence.state.guesses[0] == Guess(7, pytest.approx(up), run=4)


def test_useful_masks_by_hand():
    """B = 2 and two guesses: positions 3 and 4 are group 0, which saw none of them, and so on."""

    def useful(*groups: int, held: int) -> list[int]:
        plan = Plan(guesses=[None, None], groups=list(groups), group_size=2)
        return list(useful_masks(plan, held))

    assert useful(0, 1, 2, held=1) == [5, 6]  # group 2 saw a guess that failed
    assert useful(0, 1, 2, held=2) == [7, 8]
    assert useful(0, 2, held=1) == [4]  # what the first mask of group 0 predicts is known
    assert useful(0, held=2) == [] and useful(1, 2, held=0) == []
    assert list(useful_masks(Plan(guesses=[None, None], groups=[0], group_size=1), 2)) == []


def test_a_batch_on_a_cpu_has_one_group():
    """And no guesses from the text: every row would be as wide as the widest."""
    model = tiny_model(random.Random(0))
    for rows, groups in ((1, 3), (2, 1)):
        method = Decoder(model, Options(block=3), rows, longest=20).method
        assert (method.most_groups, method.looks_up) == (groups, rows == 1)


def test_what_a_text_says_is_where_its_last_tokens_stood_before():
    """By a search through the whole text; for every length of text and guesses.

    What followed in the first eight places of a text was never found.
    """
    text = [3, 3, 5, 3, 2, 4, 5, 5, 3, 4, 2, 4]
    assert PromptLookup().next_token(text, [2, 4]) == (5, 2)
    for seed in cases(30, 500):
        rng = random.Random(seed)
        repeats = PromptLookup()
        text = []
        for _ in range(60):
            text += [rng.randint(0, 1) for _ in range(rng.randint(0, 3))]
            guesses = [rng.randint(0, 1) for _ in range(rng.randint(0, 8))]
            assert repeats.next_token(text, guesses) == what_followed(text, guesses)


# --------------------------------------------------------------------------- the text and forwards


def test_guesses_from_the_text_are_ars_text_in_fewer_forwards(monkeypatch):
    """Greedy and at a temperature, alone and (as on a GPU) in ragged batches: the text is that of
    tau 1, also where the guesses are invented. Random models repeat themselves often enough."""
    garbage = random.Random(0)

    def invented(self, text, guesses):
        return garbage.randrange(8), garbage.choice([2, 4, 8])

    num_forwards = {None: 0, PromptLookup.next_token: 0, invented: 0}
    for seed in cases(6, 200):
        rng = random.Random(seed)
        model = tiny_model(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": rng.randint(1, 4), "max_new": 40, "temperature": rng.choice([0, 0.5])}
        plain = generate(model, prompts, tau=1, **options)
        for rows in (1, 3):
            for next_token in num_forwards:
                looks_up = next_token is not None
                use_lossless(monkeypatch, groups=5, looks_up=looks_up, on_cpu=rows == 1)
                monkeypatch.setattr(PromptLookup, "next_token", next_token)
                found = generate(model, prompts, rows, **options)
                assert [s.tokens for s in found] == [s.tokens for s in plain], (seed, rows)
                num_forwards[next_token] += sum(sequence.forwards for sequence in found)
    without, with_text, _ = num_forwards.values()
    assert with_text < 0.98 * without


def test_an_index_is_of_its_own_text(monkeypatch):
    """Of rows that share a prompt; one is cancelled, and its row takes the next text."""
    use_lossless(monkeypatch, groups=2, looks_up=True)
    prompt = random_prompt(random.Random(0), 12)
    decoder = Decoder(endless_model(), Options(block=3, max_new=60), rows=2, longest=80)
    sequences = [decoder.add([*prompt, token]) for token in (2, 3, 4)]
    for step in range(16):
        decoder.step()
        sequences[0].done = step >= 4
    assert decoder.method.run_chances[2] != FIRST_RUN_CHANCES[2]  # it learns from both
    for sequence in sequences:
        fresh = PromptLookup()
        for lookup in (fresh, sequence.state.lookup):  # that of the last forward's text
            lookup.next_token(sequence.token_ids, [])
        assert sequence.state.lookup.goes_on_at == fresh.goes_on_at
        assert 13 + 60 > len(sequence.token_ids) > 16
    list(decoder)
    assert sequences[1].state is None  # an index is larger than its text: it was kept


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
    on_cpu: bool,
    temperature=0.0,
    seed=0,
    index=0,
):
    """AR, token by token, and the forwards that guessing would have taken; no cache.

    Returns the tokens; of each forward how many it gave, and its width.

    A forward goes on for as long as AR says what had been guessed. Then the masks that saw the most
    of these guesses, and no others, guess what comes after the last token: all of them if they saw
    all that held, else without the first few. Guesses that hold too rarely are dropped. On a CPU a
    group's last mask must be of use with .7: if all before it hold as often as guesses did lately.
    """

    def with_noise(pos: int, logits):
        return logits + temperature * gumbel_noise(seed, index, pos, *logits.shape, logits.device)

    tokens = []
    accepted = []
    widths = []
    guesses = []
    masked = [0]
    holds = 0.9
    while tokens[-1:] != [EOS] and len(tokens) < max_new:
        num_masks = block
        while on_cpu and num_masks > 1 and holds ** (num_masks - 1) < 0.7:
            num_masks -= 1
        num_before = len(tokens)
        num_fed = 1 if tokens else len(prompt)  # the last token; what held before is cached
        widths.append(num_fed + len(guesses) + len(masked) * num_masks)
        while True:
            [logits] = logits_after(model, prompt + tokens, 0)
            tokens.append(with_noise(len(prompt + tokens), logits).argmax().item())
            if guesses:
                holds = 0.95 * holds + (0.05 if guesses[0] == tokens[-1] else 0)
            if tokens[-1] == EOS or len(tokens) == max_new or guesses[:1] != tokens[-1:]:
                break
            guesses = guesses[1:]
        accepted.append(len(tokens) - num_before)
        held = accepted[-1] - 1
        seen = max((j for j in masked if j <= held), default=None)
        ahead = []
        if seen is not None:
            text = prompt + tokens[: num_before + seen]
            for pos, logits in enumerate(logits_after(model, text, num_masks), start=len(text)):
                chance, token = with_noise(pos, logits).softmax(-1).max(-1)
                ahead.append((chance.item(), token.item()))
            ahead = ahead[1 + held - seen :]
        while math.prod(chance for chance, _ in ahead) < RARE:
            ahead.pop()
        guesses = [token for _, token in ahead]
        masked = groups_by_hand([chance for chance, _ in ahead], groups)
    return tokens, accepted, widths


def test_text_and_forwards_by_hand(monkeypatch):
    """Ragged batches, more prompts than rows; ends and max_new anywhere.

    The wrong group of masks would cost nothing but forwards, other noise for a guess the same, and
    a token that held but was not kept nothing but a position. So all these are compared.
    """
    monkeypatch.setattr("lossless.LEAST_PROBABILITY", RARE)
    accepted = []
    num_ended_early = 0
    for seed in cases(25, 1000):
        rng = random.Random(seed)
        model = tiny_model(rng)
        block = rng.randint(1, 8)
        groups = rng.randint(1, block + 1)
        on_cpu = rng.random() < 0.5
        use_lossless(monkeypatch, groups, on_cpu=on_cpu)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(4)]
        options = {"block": block, "max_new": rng.choice([1, 2, 7, 20, 40])}
        options |= {"temperature": rng.choice([0.0, 0.5, 1.0]), "seed": seed}
        results = generate(model, prompts, rng.randint(1, 6), **options)
        for index, (prompt, result) in enumerate(zip(prompts, results)):
            one = alone(model, prompt, index, **options)
            settings = {"groups": groups, "on_cpu": on_cpu, "index": index}
            by_hand = guessed_by_hand(model, prompt, **settings, **options)
            assert (one.tokens, one.num_accepted, one.widths) == by_hand, (seed, options)
            assert result.tokens == one.tokens
            assert on_cpu or outcome(result) == outcome(one)  # other rows' guesses count there, too
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
    chain = Lossless.chain

    def sometimes_wrong(self, lookup, text, from_masks):
        guesses = chain(self, lookup, text, [guess._replace(chance=1.0) for guess in from_masks])
        if rng.random() < 0.3:
            guesses = [guess._replace(token=guess.token ^ 1) for guess in guesses]
        return guesses

    def some_groups(chances, most):
        return [j for j in range(len(chances) + 1) if rng.random() < 0.6][:most]

    use_lossless(monkeypatch, groups=5)
    monkeypatch.setattr(Lossless, "chain", sometimes_wrong)
    monkeypatch.setattr(Lossless, "group_size", lambda self: rng.randint(1, self.block))
    monkeypatch.setattr("lossless.likely_groups", some_groups)
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


def test_every_seed_text_and_position_has_its_own_noise():
    """Gumbel noise: a mean of .577 and a variance of pi^2 / 6. Mixed, not added: seed 1 of text 0
    has not the noise of seed 0 of text 1, nor has position 12 of text 1 those of 2 of text 11."""
    cpu = torch.device("cpu")
    seen = {}
    for seed, index, position in itertools.product(range(12), range(12), range(12)):
        drawn = gumbel_noise(seed, index, position, 200, cpu)
        assert drawn.dtype == torch.float32
        seen[tuple(drawn.tolist()[:3])] = drawn
    assert len(seen) == 12**3
    noise = torch.cat(list(seen.values()))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02


def test_noise_is_kept_for_one_forward_and_no_longer():
    """128 vectors of the vocabulary were kept for the life of the process: 78 MB with a Qwen."""
    model = tiny_model(random.Random(5))
    decoder = Decoder(model, Options(temperature=1.0, max_new=30, block=3), rows=2, longest=40)
    sequences = [decoder.add([2, 3, 4]) for _ in range(2)]
    before = {}
    num_again = 0
    while decoder.step():
        kept = decoder.runner.noise.kept
        assert len(kept) <= 2 * decoder.runner.widest
        for (index, position), noise in kept.items():
            assert torch.equal(noise, gumbel_noise(0, index, position, 8, noise.device))
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
