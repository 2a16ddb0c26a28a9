"""A Decoder that runs: prompts come at any time, and what one client does harms no other."""

import random

import pytest
import torch
from common import cases, endless_model, random_prompt, tiny_model
from decoding import alone, outcome, use_lossless

from decode import Decoder, Options, Sequence
from plumbing.errors import UserError
from plumbing.runner import Runner

WAYS = [{"tau": 0.3}, {"tau": 0.3, "block_cache": 4}, {}]
WAYS += [{"tau": 0.3, "temperature": 1.0}]


@pytest.fixture
def plain_lossless(monkeypatch):
    """As many groups alone as in a batch on a CPU."""
    use_lossless(monkeypatch, groups=3)


BAD_REQUESTS = [
    ([2] * 45, {}, "45 tokens and up to 20 new ones exceed the 64"),
    ([2] * 300, {}, "300 tokens and up to 20 new ones exceed the 64"),
    ([], {}, "must be a list of token ids below 8, at least one"),
    ([2, 8], {}, "must be a list of token ids below 8, at least one"),
    ([-1], {}, "must be a list of token ids"),
    ("abc", {}, "must be a list of token ids"),
    ([[1, 2]], {}, "must be a list of token ids"),
    ([5.0], {}, "must be a list of token ids"),
    (torch.tensor([2, 3]), {}, "must be a list of token ids"),
    ([2], {"index": [1]}, "index: expected int"),
    ([2], {"max_new": 0}, "max_new: expected int from 1 "),
    ([2], {"max_new": float("nan")}, "max_new: expected int from 1 "),
    ([2], {"max_new": "5"}, "max_new: expected int from 1 "),
    ([2], {"tau": 1.5}, "tau"),
    ([2], {"tau": "0.5"}, "tau"),
    ([2], {"tau": [0.5]}, "tau"),
]


@pytest.mark.usefixtures("plain_lossless")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_bad_request_is_refused_and_the_others_go_on(way):
    """It never waits for a row, nor does it take an index, the noise of the next one."""
    model = tiny_model(random.Random(5))
    options = {"max_new": 20} | way
    prompts = [random_prompt(random.Random(i), length) for i, length in enumerate([9, 44, 3, 20])]
    decoder = Decoder(model, Options(**options), rows=2, longest=64)
    running = [decoder.add(prompt) for prompt in prompts[:2]]
    decoder.step()
    for prompt, request, message in BAD_REQUESTS:
        with pytest.raises(UserError, match=message):
            decoder.add(prompt, **request)
    if "tau" not in way:
        with pytest.raises(UserError, match="needs --tau"):
            decoder.add([2], tau=0.9)
    running += [decoder.add(prompt) for prompt in prompts[2:]]
    list(decoder)
    for index, (prompt, sequence) in enumerate(zip(prompts, running)):
        assert outcome(sequence) == outcome(alone(model, prompt, index, **options))


@pytest.mark.parametrize("way", [*WAYS, {"tau": 0.3, "block_cache": 64}], ids=str)
def test_what_just_fits_runs_to_its_end(way, monkeypatch):
    """In rows that are all as long as the decoder was made for, however wide their feeds are."""
    monkeypatch.setattr("kv_cache.UNIT", 1)  # no room because of rounding
    model = endless_model()
    for most in (4, 64):  # an answer may be longer than the options say
        options = Options(max_new=most, block=8, **way)
        decoder = Decoder(model, options, rows=3, longest=64)
        answers = [1, 30, 63, 31, 55, 4, 4, 4]
        sequences = [decoder.add([2] * (64 - max_new), max_new=max_new) for max_new in answers]
        list(decoder)
        assert [len(sequence.tokens) for sequence in sequences] == answers


@pytest.mark.parametrize("compile", [False, True])
def test_idle_rows_are_left_out(compile, monkeypatch):
    """On a CPU the last of 64 rows took as long as all: each forward had every row.

    Compiled forwards keep all rows: their shapes are static.
    """
    sizes = []
    forward = Runner.forward

    def counted(self, fed, columns, noise):
        sizes.append(len(fed))
        return forward(self, fed, columns, noise)

    monkeypatch.setattr(Runner, "forward", counted)
    monkeypatch.setattr("plumbing.runner.compiled", lambda forward, cache: forward)
    decoder = Decoder(endless_model(), Options(tau=1, compile=compile), rows=4, longest=64)
    for max_new in (4, 3, 5, 2):
        decoder.add([2, 3], max_new=max_new)
    list(decoder)
    assert sizes == ([4, 4, 4, 4, 4] if compile else [4, 4, 4, 2, 1])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("owner, moment", [(Runner, "forward"), (Sequence, "take")])
def test_an_interrupted_step_loses_no_token(owner, moment, way, monkeypatch):
    """An exception or Ctrl-C, in a prefill or later: the next step goes on with the same text.

    In a prefill it left a prompt that was fed among the ordinary rows, where it exceeded the cache.
    """

    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = endless_model(rng)
        prompts = [random_prompt(rng, length) for length in (rng.randint(1, 24), 10, 56, 4)]
        decoder = Decoder(model, Options(**way), rows=2, longest=64)
        sequences = [decoder.add(each, max_new=min(40, 64 - len(each))) for each in prompts]
        while seed % 2 and not any(sequence.done for sequence in sequences):
            decoder.step()  # the next forward is the prefill of the third prompt
        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                decoder.step()
        list(decoder)
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences)):
            options = way | {"max_new": sequence.max_new}
            assert sequence.tokens == alone(model, prompt, index, **options).tokens


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_that_is_interrupted_between_two_rows(way, monkeypatch):
    """A prompt that was fed, but not committed, was then fed among ordinary rows. Next to a long
    row it exceeded the cache, in this step and all later ones."""
    take = Sequence.take
    calls = []

    def interrupted(*words):
        calls.append(words)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return take(*words)

    model = endless_model()
    decoder = Decoder(model, Options(**way), rows=3, longest=200)
    prompts = [[2, 3] * 85, [2], [2], [2] * 150, [3] * 150]
    max_new = [30, 1, 1, 30, 30]
    sequences = [decoder.add(*each) for each in zip(prompts[:3], [None] * 3, max_new)]
    for _ in range(3):
        decoder.step()
    sequences += [decoder.add(*each) for each in zip(prompts[3:], [None] * 2, max_new[3:])]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sequence, "take", interrupted)
        decoder.step()
    list(decoder)
    for index, sequence in enumerate(sequences):
        options = way | {"max_new": max_new[index]}
        assert sequence.tokens == alone(model, prompts[index], index, **options).tokens


@pytest.mark.usefixtures("plain_lossless")
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
        length = len(running.token_ids)
        for sequence in (running, *waiting):
            sequence.done = True
        list(decoder)
        assert len(running.token_ids) == length
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
