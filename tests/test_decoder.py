"""A Decoder that runs: prompts come at any time, and what one client does harms no other."""

import random

import pytest
from common import cases, endless_model, random_prompt, tiny_model
from decoding import by_hand, decode_each, outcome

from decode import Decoder, Options, Sequence, generate
from plumbing.errors import UserError

WAYS = [{}, {"block_cache": 4}, {"verify": True, "groups": 3}, {"temperature": 1.0}]


def alone(model, prompt: list[int], index: int, **options) -> tuple[list[int], list[int]]:
    """The outcome of a sequence that is the only one."""
    options = Options(**options)
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    sequence = decoder.add(prompt, index=index)
    list(decoder)
    return outcome(sequence)


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_prompt_that_is_too_long_is_refused_and_the_others_go_on(way):
    """It was accepted. At its turn the cache had no room for it, and every later step raised the
    same error: no other client's answer ever ended. (Nor does it take an index, the dice of the
    next one.)"""
    model = tiny_model(random.Random(5))
    options = {"max_new": 20} | way
    prompts = [random_prompt(random.Random(i), length) for i, length in enumerate([9, 44, 3, 20])]
    decoder = Decoder(model, Options(**options), rows=2, longest=64)
    running = [decoder.add(prompt) for prompt in prompts[:2]]
    decoder.step()
    for length in (45, 64, 65, 300):
        with pytest.raises(UserError, match=f"{length} tokens and up to 20 new ones exceed the 64"):
            decoder.add([2] * length)
    running += [decoder.add(prompt) for prompt in prompts[2:]]
    list(decoder)
    for index, (prompt, sequence) in enumerate(zip(prompts, running)):
        assert outcome(sequence) == alone(model, prompt, index, **options)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_just_fits_runs_to_its_end(way):
    """In rows that are all as long as the decoder was made for, however wide their feeds are."""
    model = endless_model()
    decoder = Decoder(model, Options(max_new=70, block=8, **way), rows=3, longest=64)
    sequences = [decoder.add([2] * (64 - max_new), max_new=max_new) for max_new in (1, 30, 63, 31)]
    list(decoder)
    assert [len(sequence.text) for sequence in sequences] == [64] * 4


@pytest.mark.parametrize("max_new", [0, -1])
def test_a_sequence_has_room_for_a_token(max_new):
    """Less than one new token was taken for the default, or the sequence never ended."""
    decoder = Decoder(endless_model(), Options(), rows=1, longest=300)
    with pytest.raises(UserError, match=f"max_new {max_new}: must be a whole number, at least 1"):
        decoder.add([2], max_new=max_new)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "prompt, request_options",
    [
        ([5.0], {}),  # every later forward failed: embeddings take no floats
        (["a"], {}),
        ([2], {"max_new": float("nan")}),  # json.loads gives it; the sequence never ended
        ([2], {"max_new": 1.5}),
        ([2], {"max_new": "5"}),
        ([2], {"tau": "0.5"}),
        ([2], {"tau": [0.5]}),
    ],
)
def test_a_request_of_a_wrong_kind_is_refused_and_the_others_go_on(prompt, request_options, way):
    """Some were accepted and stopped the decoder for all; others were a TypeError in `add`."""
    model = tiny_model(random.Random(5))
    decoder = Decoder(model, Options(max_new=9, **way), rows=2, longest=64)
    running = decoder.add([3, 4])
    decoder.step()
    with pytest.raises(UserError):
        decoder.add(prompt, **request_options)
    list(decoder)
    assert outcome(running) == alone(model, [3, 4], 0, max_new=9, **way)


def interrupted(*_) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("moment", ["take", "commit"])
def test_an_interrupted_step_loses_no_token(moment, way, monkeypatch):
    """Ctrl-C after `commit` and before `take`: the cache went on, the text did not."""
    for seed in cases(3, 30):
        rng = random.Random(seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (1,)  # the mask: texts end at max_new only
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(2)]
        decoder = Decoder(model, Options(max_new=40, **way), rows=2, longest=64)
        sequences = [decoder.add(prompt) for prompt in prompts]
        for _ in range(rng.randint(1, 3)):
            decoder.step()
        with monkeypatch.context() as patch:
            patch.setattr(
                Sequence if moment == "take" else type(decoder.cache), moment, interrupted
            )
            with pytest.raises(KeyboardInterrupt):
                decoder.step()
        list(decoder)
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences)):
            tokens, _ = alone(model, prompt, index, max_new=40, **way)
            assert sequence.tokens == tokens


def raising(waiting: int) -> float:
    return 1 / 0


NONSENSE = [raising, lambda _: "high", lambda _: None, lambda _: 7.0, lambda _: float("nan")]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("block_cache", [None, 4])
def test_a_tau_that_goes_wrong_midway_ends_its_own_sequence_only(nonsense, block_cache):
    """It ended the decoder, and with it everybody's answer. What came before stays; the row goes
    to the next prompt."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (1,)  # the mask: texts end at max_new only
        options = {"tau": 0.3, "max_new": 20, "block_cache": block_cache}
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(5)]
        num_good = rng.randint(0, 2)
        calls = []

        def tau(waiting: int, num_good=num_good, calls=calls):
            calls.append(waiting)
            return 0.3 if len(calls) <= num_good else nonsense(waiting)

        bad = rng.randrange(5)
        taus = [tau if i == bad else None for i in range(5)]
        sequences = decode_each(model, prompts, taus, rows=2, **options)
        assert len(calls) == num_good + 1
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences)):
            tokens, accepted = by_hand(model, prompt, index=index, **options)
            if index == bad:
                assert sequence.done and isinstance(sequence.error, Exception)
                assert sequence.tokens == tokens[: sum(accepted[:num_good])]
            else:
                assert outcome(sequence) == (tokens, accepted) and sequence.error is None


def test_generate_raises_what_ended_a_sequence():
    with pytest.raises(ZeroDivisionError):
        generate(endless_model(), [[2], [3]], tau=raising, max_new=5)


def test_an_impossible_tau_is_refused_where_it_is_given():
    decoder = Decoder(endless_model(), Options(), rows=1, longest=300)
    with pytest.raises(UserError, match="tau 1.5: must be between 0 and 1"):
        decoder.add([2], tau=1.5)
    assert not decoder.scheduler.waiting and decoder.step() == []


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_cancelling(way):
    """While it waits or while it runs: the others' texts are what they are alone, and its row goes
    to the next. What waits and is cancelled costs no forward."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (1,)
        options = {"max_new": 20} | way
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
        decoder = Decoder(model, Options(**options), rows=2, longest=40)
        sequences = [decoder.add(prompt) for prompt in prompts]
        for _ in range(rng.randint(1, 3)):
            decoder.step()
        running = rng.choice(
            [sequence for sequence in decoder.scheduler.sequences if not sequence.done]
        )
        waiting = rng.sample(list(decoder.scheduler.waiting), 2)
        length = len(running.text)
        for sequence in (running, *waiting):
            sequence.done = True
        list(decoder)
        assert len(running.text) == length
        assert [sequence.forwards for sequence in waiting] == [0, 0]
        for index, sequence in enumerate(sequences):
            if sequence is not running and sequence not in waiting:
                assert outcome(sequence) == alone(model, prompts[index], index, **options)


def test_a_decoder_whose_sequences_are_all_cancelled_takes_new_ones():
    model = endless_model()
    decoder = Decoder(model, Options(max_new=9), rows=2, longest=30)
    cancelled = [decoder.add([2, 3]) for _ in range(4)]
    decoder.step()
    for sequence in cancelled:
        sequence.done = True
    assert decoder.step() == [] and decoder.step() == []
    sequence = decoder.add([2, 3, 4])
    list(decoder)
    assert outcome(sequence) == by_hand(model, [2, 3, 4], tau=0.95, max_new=9)


def test_an_answer_longer_than_the_options_in_cache_blocks(monkeypatch):
    """The cache had room for open blocks of the options' max_new. A longer answer's block made the
    feed so wide that the row of a long prompt beside it overflowed."""
    monkeypatch.setattr("decode.span_unit", lambda *_: 1)  # no room because of rounding
    options = Options(tau=0, block=3, block_cache=64, max_new=4)
    decoder = Decoder(endless_model(), options, rows=2, longest=64)
    long_answer = decoder.add([2] * 9, max_new=55)
    long_prompts = [decoder.add([3] * 60, tau=1) for _ in range(30)]
    list(decoder)
    assert len(long_answer.tokens) == 55
    assert {len(sequence.tokens) for sequence in long_prompts} == {4}
