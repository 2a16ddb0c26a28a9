"""A Decoder that runs: prompts come at any time, and what one client does harms no other."""

import random
from collections import deque

import pytest
from common import EOS, cases, endless_model, random_prompt, tiny_model
from decoding import alone, by_hand, decode_each, outcome

from decode import Decoder, Options, Sequence, generate
from plumbing.attention import FastModel
from plumbing.errors import UserError

WAYS = [{}, {"block_cache": 4}, {"verify": True, "groups": 3}, {"temperature": 1.0}]

BAD_REQUESTS = [
    ([2] * 45, {}, "45 tokens and up to 20 new ones exceed the 64"),
    ([2] * 300, {}, "300 tokens and up to 20 new ones exceed the 64"),
    ([], {}, "must be a list of token ids below 8, at least one"),
    ([2, 8], {}, "must be a list of token ids below 8, at least one"),
    ([-1], {}, "must be a list of token ids"),
    ("abc", {}, "must be a list of token ids"),
    ([[1, 2]], {}, "must be a list of token ids"),
    ([5.0], {}, "must be a list of token ids"),
    ([2], {"max_new": 0}, "max_new 0: must be a whole number, at least 1"),
    ([2], {"max_new": float("nan")}, "max_new nan: must be a whole number"),
    ([2], {"max_new": "5"}, "max_new '5': must be a whole number"),
    ([2], {"tau": 1.5}, "tau"),
    ([2], {"tau": "0.5"}, "tau"),
    ([2], {"tau": [0.5]}, "tau"),
]


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_bad_request_is_refused_and_the_others_go_on(way):
    """It never waits for a row, nor does it take an index, the dice of the next one."""
    model = tiny_model(random.Random(5))
    options = {"max_new": 20} | way
    prompts = [random_prompt(random.Random(i), length) for i, length in enumerate([9, 44, 3, 20])]
    decoder = Decoder(model, Options(**options), rows=2, longest=64)
    running = [decoder.add(prompt) for prompt in prompts[:2]]
    decoder.step()
    for prompt, request, message in BAD_REQUESTS:
        with pytest.raises(UserError, match=message):
            decoder.add(prompt, **request)
    if "verify" in way:
        with pytest.raises(UserError, match="verify takes no tau"):
            decoder.add([2], tau=0.9)
    running += [decoder.add(prompt) for prompt in prompts[2:]]
    list(decoder)
    for index, (prompt, sequence) in enumerate(zip(prompts, running)):
        assert outcome(sequence) == outcome(alone(model, prompt, index, **options))


@pytest.mark.parametrize("way", [*WAYS, {"block_cache": 64}], ids=str)
def test_what_just_fits_runs_to_its_end(way, monkeypatch):
    """In rows that are all as long as the decoder was made for, however wide their feeds are."""
    monkeypatch.setattr("decode.span_unit", lambda *_: 1)  # no room because of rounding
    model = endless_model()
    for most in (4, 64):  # an answer may be longer than the options say
        options = Options(max_new=most, block=8, **way)
        decoder = Decoder(model, options, rows=3, longest=64)
        answers = [1, 30, 63, 31, 55, 4, 4, 4]
        sequences = [decoder.add([2] * (64 - max_new), max_new=max_new) for max_new in answers]
        list(decoder)
        assert [len(sequence.tokens) for sequence in sequences] == answers


def interrupted(*_) -> None:
    raise KeyboardInterrupt


class Interrupted(deque):
    """Waiting prompts; Ctrl-C comes once, before the first one is taken out or just after."""

    def __init__(self, sequences, is_late: bool):
        super().__init__(sequences)
        self.is_late = is_late
        self.comes = True

    def popleft(self):
        sequence = super().popleft() if self.is_late or not self.comes else None
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt
        return sequence


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("moment", ["popleft", "__call__", "take", "commit"])
def test_an_interrupted_step_loses_no_token(moment, way, monkeypatch):
    """After Ctrl-C the cache has not gone on without the text, nor the text without the cache.

    In a prefill it left a prompt that was fed among the ordinary rows, where it exceeded the cache.
    After `take` it lost the confidences of the tokens.
    """
    monkeypatch.setattr("decode.span_unit", lambda *_: 1)  # no room because of rounding
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = endless_model(rng)
        prompts = [random_prompt(rng, length) for length in (rng.randint(1, 24), 10, 56, 4)]
        decoder = Decoder(model, Options(**way), rows=2, longest=64)
        sequences = [decoder.add(each, max_new=min(40, 64 - len(each))) for each in prompts]
        if moment == "popleft":
            decoder.scheduler.waiting = Interrupted(decoder.scheduler.waiting, is_late=seed % 2)
        elif moment == "__call__":
            while not any(sequence.done for sequence in sequences):
                decoder.step()  # the next forward is the prefill of the third prompt
        else:
            for _ in range(rng.randint(0, 20)):
                decoder.step()
        with monkeypatch.context() as patch:
            if moment != "popleft":
                owner = {"__call__": FastModel, "take": Sequence, "commit": type(decoder.cache)}
                patch.setattr(owner[moment], moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                decoder.step()
        list(decoder)
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences)):
            options = way | {"max_new": sequence.max_new}
            assert sequence.tokens == alone(model, prompt, index, **options).tokens
            assert len(sequence.confidences) == len(sequence.tokens)


def test_an_interrupt_inside_take_lets_no_answer_go_past_its_end():
    """Ctrl-C after the last token, before the answer was known to be done, let it go on."""

    class Text(list):
        def append(self, token: int) -> None:
            super().append(token)
            raise KeyboardInterrupt

    for last in (EOS, 3):
        sequence = Sequence([EOS], tiny_model(random.Random(0)).config, max_new=2, tau=None)
        sequence.take([5], width=1)
        sequence.text = Text(sequence.text)
        with pytest.raises(KeyboardInterrupt):
            sequence.take([last], width=1)
        assert sequence.take([6], width=1) == [] and sequence.done
        assert sequence.tokens == [5, last] and len(sequence.confidences) == 2


def raising(waiting: int) -> float:
    return 1 / 0


NONSENSE = [raising, lambda _: "high", lambda _: None, lambda _: 7.0, lambda _: float("nan")]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("block_cache", [None, 4])
def test_a_tau_that_goes_wrong_midway_ends_its_own_sequence_only(nonsense, block_cache):
    """What came before stays; the row goes to the next prompt."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = endless_model(rng)
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


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_cancelling(way):
    """While it waits or while it runs: the others' texts are what they are alone, and its row goes
    to the next. What waits and is cancelled costs no forward."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = endless_model(rng)
        options = {"max_new": 20} | way
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(6)]
        decoder = Decoder(model, Options(**options), rows=2, longest=40)
        sequences = [decoder.add(prompt) for prompt in prompts]
        for _ in range(rng.randint(1, 3)):
            decoder.step()
        running = rng.choice([sequence for sequence in sequences[:2] if not sequence.done])
        waiting = rng.sample(sequences[2:], 2)
        length = len(running.text)
        for sequence in (running, *waiting):
            sequence.done = True
        list(decoder)
        assert len(running.text) == length
        assert [sequence.forwards for sequence in waiting] == [0, 0]
        for index, sequence in enumerate(sequences):
            if sequence is not running and sequence not in waiting:
                assert outcome(sequence) == outcome(alone(model, prompts[index], index, **options))
        cancelled = [decoder.add(prompt) for prompt in prompts]
        decoder.step()
        for sequence in cancelled:
            sequence.done = True
        assert decoder.step() == []
        last = decoder.add(prompts[0])  # a decoder whose sequences are all cancelled takes new ones
        list(decoder)
        assert outcome(last) == outcome(alone(model, prompts[0], last.index, **options))
