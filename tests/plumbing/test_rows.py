"""Which prompt sits in which row: waiting, prefill, a kept prefix, and room in the cache."""

import random

import pytest
from common import cases, endless_model, random_prompt, tiny_model
from decoding import by_hand, decode_each, outcome

from decode import Decoder, Options


def test_a_row_that_is_done_lengthens_nothing():
    """Attention does not span the slots of an answer that has ended, however many they were."""
    for rows in (8, 3):  # of eight the idle ones are left out, of three they are fed padding
        decoder = Decoder(endless_model(), Options(tau=1, max_new=40), rows, longest=302)
        decoder.add([2] * 300, max_new=2)
        short, _ = decoder.add([2]), decoder.add([2])
        spans = [decoder.cache.span for _ in decoder]
        assert max(spans) > 300 and spans[-1] == 64 and len(short.tokens) == 40


@pytest.mark.parametrize("block, block_cache", [(8, None), (2, 20), (8, 20)])
def test_the_cache_has_room_for_the_widest_feed(block, block_cache, monkeypatch):
    """A long row near its end gets the width of its neighbours' feeds, which are young and fast."""
    monkeypatch.setattr("kv_cache.UNIT", 1)  # no room because of rounding
    model = endless_model()
    prompts = [[2] * 60] + 30 * [[3]]
    taus = [1] + 30 * [0]
    options = {"tau": 1, "block": block, "block_cache": block_cache, "max_new": 30}
    long, *others = decode_each(model, prompts, taus, rows=2, **options)
    assert long.forwards == 30 and max(others[0].num_accepted) == block + 1


def test_prompts_that_wait_are_prefilled_together(monkeypatch):
    """As many as there are free rows, but not more positions than MOST_POSITIONS."""
    lengths = [10, 30, 10, 60, 5, 5, 5]
    monkeypatch.setattr("scheduler.MOST_POSITIONS", 100)
    decoder = Decoder(endless_model(), Options(tau=1, max_new=5, block=2), rows=5, longest=65)
    sequences = [decoder.add([2] * length) for length in lengths]
    together = []
    for _ in range(5):
        together.append([sequence.index for sequence, _ in decoder.step()])
    # 3 x (30 + 2) positions; then 62 of one prompt, which a second would double
    assert together == [[0, 1, 2], [3], [4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    list(decoder)
    assert [sequence.forwards for sequence in sequences] == [5] * 7


def test_rows_that_keep_a_prefix_are_not_admitted_beyond_the_cache():
    """One row keeps much and one needs much: together they would not fit."""
    model = endless_model()
    texts = {}
    for rows in (1, 2):
        decoder = Decoder(model, Options(tau=1, max_new=4), rows, longest=104)
        for prompts in ([[2] * 90, [3]], [[2] * 91 + [3], [4] * 100]):
            sequences = [decoder.add(prompt) for prompt in prompts]
            list(decoder)
            texts[rows, len(prompts[0])] = [sequence.tokens for sequence in sequences]
    assert texts[1, 90] == texts[2, 90] and texts[1, 92] == texts[2, 92]


def test_what_a_row_still_holds_is_not_fed_again():
    """The next turn of a conversation starts where the row is; the text is that of a new row."""
    num_spared = 0
    for seed in cases(25, 200):
        rng = random.Random(9000 + seed)
        model = tiny_model(rng)
        options = {"tau": 0.3, "max_new": 20, "temperature": rng.choice([0.0, 1.0])}
        options["block_cache"] = rng.choice([None, None, 4])
        decoder = Decoder(model, Options(**options), 1, longest=200)
        prompt = random_prompt(rng, rng.randint(1, 70))
        for turn in range(3):
            held = decoder.cache.lengths[0]
            sequence = decoder.add(prompt)
            list(decoder)
            assert outcome(sequence) == by_hand(model, prompt, index=turn, **options), (seed, turn)
            new_decoder = Decoder(model, Options(**options), 1, longest=200)
            fresh = new_decoder.add(prompt, index=turn)
            list(new_decoder)
            spared = sum(fresh.widths) - sum(sequence.widths)
            if turn < 2:
                assert spared == min(held, len(prompt) - 1)
            else:
                assert spared < held
            num_spared += spared > 0
            prompt = sequence.token_ids + random_prompt(rng, rng.randint(0, 3))
            if turn == 1:  # the user takes back the last tokens
                prompt = prompt[: rng.randint(1, held)]
    assert num_spared > 20
