"""Lossless decoding: the text is that of plain AR, its samples are AR's, its forwards are few."""

import itertools
import json
import math
import random

import pytest
import torch
from common import ROOT, THOROUGH, cases, random_prompt, tiny_model

import decode
from decode import Answer, Decoder, Options, UserError, generate
from model import load


@torch.inference_mode()
def by_hand(model, prompt: list[int], tau: float, block: int, max_new: int):
    """Greedy AR, token by token, and the forwards that guessing would have saved; no cache.

    A forward goes on for as long as AR says what had been guessed. Then the masks behind the text
    so far (without the last token) guess what comes after it, as far as they are sure of it.
    """
    tokens, accepted, guesses, widths = [], [], [], []
    while tokens[-1:] != [0] and len(tokens) < max_new:
        start, masks = len(tokens), 0 if tau >= 1 else block
        fed = 1 if tokens else len(prompt)  # the last token; what held before is in the cache
        widths.append(fed + len(guesses) + (len(guesses) + 1) * masks)
        while True:
            ids = prompt + tokens + [1] * block
            hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            probs = model.logits(hidden[0, len(prompt + tokens) - 1 :]).softmax(-1)
            said, *ahead = zip(*(x.tolist() for x in probs.max(-1)))
            tokens.append(said[1])
            if tokens[-1] == 0 or len(tokens) == max_new or guesses[:1] != tokens[-1:]:
                break
            guesses = guesses[1:]
        sure = itertools.takewhile(lambda guess: guess[0] >= tau < 1, ahead)
        guesses = [token for _, token in sure]
        accepted.append(len(tokens) - start)
    return tokens, accepted, widths


def test_text_and_forwards_by_hand():
    """Ragged batches, more prompts than rows, a tau per prompt; ends and max_new anywhere.

    A wrong group of masks would cost nothing but forwards, and a token that held but was not kept
    in the cache nothing but a position: that is why they are compared, too.
    """
    kept, ended_early = [], 0
    for seed in cases(25, 1000):
        rng = random.Random(seed)
        model, block = tiny_model(rng), rng.randint(1, 8)
        lengths = [rng.choice([1, 2, 63, 64, 65, rng.randint(3, 90)]) for _ in range(5)]
        prompts = [random_prompt(rng, length) for length in lengths]
        taus = [rng.choice([0.0, 0.2, 0.4, 1.0]) for _ in prompts]
        options = {"block": block, "max_new": rng.choice([1, 2, 7, 20, 40])}
        rows = rng.randint(1, 6)
        answers = generate(model, prompts, rows=rows, tau=taus, verify=True, **options)
        for prompt, tau, answer in zip(prompts, taus, answers):
            expected = by_hand(model, prompt, tau, **options)
            assert (answer.tokens, answer.accepted) == expected[:2], (seed, options, tau)
            [alone] = generate(model, [prompt], tau=tau, verify=True, **options)
            assert (alone.tokens, alone.accepted, alone.positions) == expected, (seed, options, tau)
            ended_early += len(answer.tokens) < options["max_new"]
            kept += answer.accepted[1:] if tau < 0.4 else []
    assert sum(kept) / len(kept) > 1.25 and max(kept) > 3 and ended_early > 10


def test_the_toy_model_says_what_it_says_one_token_at_a_time():
    """In float64, without exception; alone and in rows of 8."""
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    problems = (ROOT / "toy/test.jsonl").read_text().splitlines()[: len(cases(8, 100))]
    turns = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in problems]
    prompts = [chat.encode(chat.prompt(turn)) for turn in turns]
    plain = generate(model, prompts, tau=1)
    for block, tau in itertools.product(
        (2, 4, 8), (0.0, 0.3, 0.6, 0.9) if THOROUGH else (0.0, 0.6)
    ):
        for rows in (1, 8):
            answers = generate(model, prompts, rows, tau=tau, block=block, verify=True)
            assert [a.tokens for a in answers] == [a.tokens for a in plain], (block, tau, rows)
        forwards = sum(a.forwards for a in answers)
        assert sum(len(a.tokens) for a in answers) > (2.3 if block == 2 else 3) * forwards


@pytest.mark.parametrize("metric, sure", [("margin", 0.9), ("entropy", 0.1)])
def test_a_stricter_tau_makes_fewer_guesses_and_a_narrower_feed(metric, sure):
    model = tiny_model(random.Random(4))
    prompts, loose = (
        [random_prompt(random.Random(i), 5) for i in range(8)],
        0 if metric == "margin" else 9,
    )
    options = {"metric": metric, "verify": True, "max_new": 30}
    few, many = (generate(model, prompts, tau=tau, **options) for tau in (sure, loose))
    plain = generate(model, prompts, tau=0 if metric == "entropy" else 1, metric=metric, max_new=30)
    assert [a.tokens for a in few] == [a.tokens for a in many] == [a.tokens for a in plain]
    assert sum(sum(a.positions) for a in few) < sum(sum(a.positions) for a in many)


def test_tau_may_change_while_guesses_are_on_their_way():
    """From guessing all to guessing none and back: pending guesses are checked all the same."""
    now, held = [0.0], 0
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model, prompts = tiny_model(rng), [random_prompt(rng, rng.randint(1, 9)) for _ in range(3)]
        options = Options(tau=lambda waiting: now[0], verify=True, max_new=30)
        answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
        decoder = Decoder(model, answers, options, rows=2)
        while news := decoder.step():
            held += sum(len(tokens) > 1 for _, tokens in news) if now[0] == 1 else 0
            now[0] = rng.choice([0.0, 0.3, 1.0])
        for prompt, answer in zip(prompts, answers):
            assert answer.tokens == by_hand(model, prompt, 1.0, 4, 30)[0]
    assert held > 5  # a forward that guesses nothing still checked what had been guessed


def test_a_conversation_goes_on_from_what_was_checked():
    """Guesses that held are in the cache at their places: the next turn builds on them."""
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model, options = tiny_model(rng), Options(tau=0.0, verify=True, max_new=20)
        decoder, prompt = Decoder(model, [], options, 1, longest=200), random_prompt(rng, 9)
        for turn in range(3):
            answer = Answer(prompt, model, options, turn)
            decoder.waiting.append(answer)
            list(decoder)
            assert answer.tokens == by_hand(model, prompt, 1.0, 4, 20)[0]
            assert turn == 0 or answer.positions[0] <= 3 + 4 + 4 + 1  # the news, the masks
            prompt = answer.ids + random_prompt(rng, 3)


def test_draws_are_those_of_the_prompt_alone():
    """However many guesses the neighbours have."""
    for seed in cases(10, 100):
        rng = random.Random(seed)
        model, options = tiny_model(rng), {"temperature": 1.0, "verify": True, "max_new": 20}
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
        taus = [rng.choice([0.0, 0.3, 1.0]) for _ in prompts]
        one, four = (generate(model, prompts, rows, taus, **options) for rows in (1, 4))
        assert [(a.tokens, a.accepted) for a in one] == [(a.tokens, a.accepted) for a in four]


def ar_distribution(model, prompt: list[int], length: int) -> dict[tuple, float]:
    """The probability of every answer of up to `length` tokens, by enumeration."""
    answers, growing = {}, {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, p in growing.items():
            ids = torch.tensor([prompt + list(tokens)])
            hidden = model(ids, torch.arange(ids.size(1))[None], None)
            probs = model.logits(hidden[0, -1:])[0].softmax(-1).tolist()
            for word, q in enumerate(probs):
                (answers if word == 0 else longer)[(*tokens, word)] = p * q
        growing = longer
    return {tokens: p for tokens, p in (answers | growing).items() if p > 0}


def chi_square_p(counts: dict[tuple, int], expected: dict[tuple, float]) -> float:
    """p-value of the observed counts; cells that expect fewer than five are pooled."""
    draws = sum(counts.values())
    cells = [(counts.get(tokens, 0), draws * p) for tokens, p in expected.items()]
    big = [cell for cell in cells if cell[1] >= 5]
    small = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5))]
    big += [small] if small else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in big)
    half = torch.tensor([(len(big) - 1) / 2, statistic / 2]).double()
    return torch.special.gammaincc(*half).item()


def redraw_what_failed(said, given, again):
    """The bonus from p as it is, not from p without the guess that failed."""
    return torch.where(said == given, said, again)


def accept_every_guess(said, given, again):
    return torch.where(given >= 0, given, said)


@pytest.mark.parametrize("broken", [None, redraw_what_failed, accept_every_guess])
@torch.inference_mode()
def test_samples_are_those_of_plain_ar(broken, monkeypatch):
    """Vocabulary of 6, answers of 3 tokens, temperature 1: against exact enumeration."""
    if broken:
        choose = decode.choose

        def wrong(logits, batch, options):
            said, again = choose(logits, batch, options), choose(logits, batch, options)
            given = torch.full_like(said, -1)
            for row, answer in zip(given, batch):
                guesses = answer.guesses if answer else []
                row[: len(guesses)] = torch.tensor(guesses)
            return broken(said, given, again)

        monkeypatch.setattr(decode, "choose", wrong)
    model, prompt, draws = (
        tiny_model(random.Random(36), vocab_size=6),
        [2, 3, 4],
        len(cases(8_000, 200_000)),
    )
    options = {"temperature": 1.0, "verify": True, "tau": 0.0, "block": 2, "max_new": 3}
    answers = generate(model, [prompt] * draws, rows=1000, **options)
    counts, kept = {}, 0
    for answer in answers:
        counts[tuple(answer.tokens)] = counts.get(tuple(answer.tokens), 0) + 1
        kept += len(answer.tokens) - answer.forwards
    expected = ar_distribution(model, prompt, 3)
    assert counts.keys() <= expected.keys() and math.isclose(sum(expected.values()), 1)
    assert 0.1 * draws < kept and len(expected) > 50  # guesses do hold, and do fail
    p = chi_square_p(counts, expected)
    assert p < 1e-6 if broken else p > 0.01


def test_naive_does_not_pretend_to_verify():
    with pytest.raises(UserError, match="naive does not verify"):
        decode.naive(tiny_model(random.Random(0)), [2], verify=True)


def test_verify_and_blocks_exclude_each_other():
    with pytest.raises(UserError, match="verify has no block_cache"):
        Options(verify=True, block_cache=8)
