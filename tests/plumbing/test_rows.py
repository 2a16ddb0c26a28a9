"""Which prompt sits in which row: waiting, prefill, a kept prefix, and room in the cache."""

import random

import pytest
from common import cases, endless_model, random_prompt, tiny_model
from decoding import same

from decode import Answer, Decoder, Options, generate, naive
from plumbing import attention


def test_a_row_that_is_done_lengthens_nothing():
    """Attention does not span the slots of an answer that has ended, however many they were."""
    model = endless_model()
    options = Options(tau=1, max_new=40)
    long = Answer([2] * 300, model, Options(tau=1, max_new=2))
    short = Answer([2], model, options)
    decoder = Decoder(model, [long, short], options)
    spans = [decoder.cache.span for _ in decoder]
    assert max(spans) > 300 and spans[-1] == 64 and len(short.tokens) == 40


@pytest.mark.parametrize("block, block_cache", [(8, None), (2, 20), (8, 20)])
def test_the_cache_has_room_for_the_widest_feed(block, block_cache, monkeypatch):
    """A long row near its end gets the width of its neighbours' feeds, which are young and fast."""
    monkeypatch.setattr(attention, "span_unit", lambda *_: 1)  # no room because of rounding
    model = endless_model()
    prompts = [[2] * 60] + 30 * [[3]]
    taus = [1] + 30 * [0]
    options = {"block": block, "block_cache": block_cache, "max_new": 30}
    long, *others = generate(model, prompts, rows=2, tau=taus, **options)
    assert long.forwards == 30 and max(others[0].accepted) == block + 1


def test_the_cache_has_room_for_an_answer_longer_than_the_others():
    """An answer with options of its own: the cache was made for those of the decoder."""
    model = endless_model()
    answer = Answer([2] * 9, model, Options(tau=1, max_new=200))
    list(Decoder(model, [answer], Options(tau=1, max_new=5), rows=1))
    assert len(answer.tokens) == 200


def test_prompts_that_wait_are_prefilled_together(monkeypatch):
    """As many as there are free rows next to each other, but not more positions than PREFILL."""
    model = endless_model()
    options = Options(tau=1, max_new=5, block=2)
    lengths = [10, 30, 10, 60, 5, 5, 5]
    answers = [Answer([2] * length, model, options, i) for i, length in enumerate(lengths)]
    monkeypatch.setattr("plumbing.scheduler.PREFILL", 100)
    decoder = Decoder(model, answers, options, rows=5)
    together = []
    for _ in range(5):
        together.append([answer.index for answer, _ in decoder.step()])
    # 3 x (30 + 2) positions; then 62 of one prompt, which a second would double
    assert together == [[0, 1, 2], [3], [4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    list(decoder)
    assert [answer.forwards for answer in answers] == [5] * 7


def test_rows_that_keep_a_prefix_are_not_admitted_beyond_the_cache():
    """One row keeps much and one needs much: together they would not fit."""
    model = endless_model()
    options = Options(tau=1, max_new=4)
    texts = {}
    for rows in (1, 2):
        decoder = Decoder(model, [], options, rows, longest=104)
        for prompts in ([[2] * 90, [3]], [[2] * 91 + [3], [4] * 100]):
            answers = [Answer(prompt, model, options) for prompt in prompts]
            decoder.waiting.extend(answers)
            list(decoder)
            texts[rows, len(prompts[0])] = [answer.tokens for answer in answers]
    assert texts[1, 90] == texts[2, 90] and texts[1, 92] == texts[2, 92]


def test_admission_order_changes_nothing():
    """Seeds belong to prompts: neither the rows, the order nor the neighbours decide a draw."""
    for seed in cases(10, 100):
        rng = random.Random(5 + seed)
        model = tiny_model(rng)
        block_cache = rng.choice([None, 4])
        prompts = [random_prompt(rng, rng.randint(1, 30)) for _ in range(9)]
        how = {"tau": 0.2, "temperature": 1.0, "max_new": 24, "block_cache": block_cache}
        expected = [naive(model, prompt, i, **how) for i, prompt in enumerate(prompts)]
        options = Options(**how)
        for rows in (1, 2, 4, 9):
            answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
            rng.shuffle(answers)
            list(Decoder(model, answers, options, rows))
            assert all(same(answer, expected[answer.index]) for answer in answers)


def test_what_a_row_still_holds_is_not_fed_again():
    """The next turn of a conversation starts where the row is; the text is that of a new row."""
    num_spared = 0
    for seed in cases(25, 200):
        rng = random.Random(9000 + seed)
        model = tiny_model(rng)
        options = Options(tau=0.3, max_new=20, temperature=rng.choice([0, 1]))
        options.block_cache = rng.choice([None, None, 4])
        decoder = Decoder(model, [], options, 1, longest=200)
        prompt = random_prompt(rng, rng.randint(1, 70))
        for turn in range(3):
            answer = Answer(prompt, model, options, turn)
            decoder.waiting.append(answer)
            held = decoder.cache.lengths[0]
            list(decoder)
            fresh = Answer(prompt, model, options, turn)
            list(Decoder(model, [fresh], options, 1))
            assert same(answer, fresh), (seed, turn)
            spared = sum(fresh.positions) - sum(answer.positions)
            if turn < 2:
                assert spared == min(held, len(prompt) - 1)
            else:
                assert spared < held
            num_spared += spared > 0
            prompt = answer.ids + random_prompt(rng, rng.randint(0, 3))
            if turn == 1:  # the user takes back the last tokens
                prompt = prompt[: rng.randint(1, held)]
    assert num_spared > 20
