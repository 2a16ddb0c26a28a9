"""Properties of decoding: the loop is the slow decoder, a row is alone, tau = 1 is plain AR."""

import random
from collections import deque

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
    tiny_config,
    tiny_model,
    toy_prompts,
)
from decoding import (
    by_hand,
    decode_each,
    greedy,
    mean,
    one_token_tau,
    outcome,
    random_block_cache,
    random_options,
)

from decode import Decoder, Guarded, Options, Sequence, Threshold, generate, naive
from model import load
from plumbing.errors import UserError


@pytest.fixture(scope="module")
def toy():
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    return model, toy_prompts(chat)


@pytest.mark.parametrize("policy", ["cursor", "block"])
def test_every_row_of_a_ragged_batch_is_the_slow_decoder(policy):
    """A tau per prompt, more prompts than rows, rows that end early: each is what it is alone.

    Tokens after an end of turn are discarded and not counted. (The paper's code gets both wrong:
    finished rows shift the accepted counts of the live ones.)
    """
    accepted = []
    num_ended_early = 0
    num_across_blocks = 0
    for seed in cases(25, 1000):
        rng = random.Random(1000 + seed)
        model = tiny_model(rng)
        model.config.eos_token_id = rng.choice([(EOS,), (EOS, 2)])  # Qwen2.5 has several, too
        options = random_options(rng)
        if policy == "block":
            options["block_cache"] = random_block_cache(rng, options["max_new"])
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(1, 8))]
        low, high = (0.0, 1.8) if options["metric"] == "entropy" else (0.1, 1.0)
        taus = [rng.choice([options["tau"], low, high, rng.uniform(low, high)]) for _ in prompts]
        results = decode_each(model, prompts, taus, rows=rng.randint(1, 8), **options)
        for i, (prompt, tau, result) in enumerate(zip(prompts, taus, results)):
            expected = by_hand(model, prompt, index=i, **options | {"tau": tau})
            assert outcome(result) == expected, seed
            assert max(result.num_accepted) <= options["block"] + 1 and MASK not in result.tokens
            if len(result.tokens) < options["max_new"]:
                num_ended_early += 1
            if policy == "block" and len(result.tokens) > options["block_cache"]:
                num_across_blocks += 1
            if tau != one_token_tau(options["metric"]) and options["max_new"] > 2:
                accepted += result.num_accepted
    assert mean(accepted) > 1.4 and num_ended_early > 10
    assert policy == "cursor" or num_across_blocks > 10


def test_naive_is_the_slow_decoder(toy):
    """The method in decode.py that the README shows, and the same of the loop."""
    accepted = []
    for seed in cases(25, 500):
        rng = random.Random(seed)
        model = tiny_model(rng)
        options = {"block": rng.randint(1, 8), "max_new": rng.choice([1, 2, 7, 40])}
        tau = rng.choice([0.0, 0.2, 0.3, 0.5, 1.0])
        prompt = random_prompt(rng, rng.randint(1, 20))
        tokens, counts = by_hand(model, prompt, tau, **options)
        assert naive(model, prompt, tau, **options) == tokens, (seed, tau, options)
        accepted += counts
    assert mean(accepted) > 1.5
    model, prompts = toy
    prompts = prompts[: len(cases(6, 100))]
    results = generate(model, prompts, rows=5, tau=0.8)
    for result, prompt in zip(results, prompts):
        assert outcome(result) == by_hand(model, prompt, tau=0.8)
        assert result.tokens == naive(model, prompt, tau=0.8, block=4, max_new=256)
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) >= 2


# -------------------------------------------------------------------------- acceptance and tau


def test_acceptance_by_hand():
    rows = [[0.6, 0.3, 0.1], [0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    probs = torch.tensor([rows], dtype=torch.float64)
    candidates = probs.argmax(-1)
    by_hand = {  # the confidences, and for each tau how many are accepted
        "probability": ([0.6, 0.9, 0.5, 1.0], {0.95: 1, 0.89: 2, 0.49: 4}),
        "margin": ([0.3, 0.8, 0.0, 1.0], {0.9: 1, 0.7: 2, 0.0: 4}),
        "entropy": ([0.8979, 0.3251, 0.6931, 0.0], {0.3: 1, 0.4: 2, 0.7: 4}),
    }
    for metric, (expected, lengths) in by_hand.items():
        method = Threshold(block=3, mask_id=MASK, metric=metric)
        confidence = method.confidence(probs.log(), probs.log(), candidates)
        assert confidence[0].tolist() == pytest.approx(expected, abs=1e-4)
        for tau, length in lengths.items():
            sequence = Sequence([2], tiny_model(random.Random(0)).config, max_new=9, tau=tau)
            accepted = method.accept(sequence, candidates[0].tolist(), confidence[0].tolist())
            assert accepted == candidates[0, :length].tolist()
    drawn = torch.tensor([[1, 1, 0, 0]])  # at a temperature a candidate need not be the best
    method = Threshold(block=3, mask_id=MASK, metric="probability")
    found = method.confidence(probs.log(), probs.log() + 9, drawn)
    assert found[0].tolist() == pytest.approx([0.3, 0.1, 0.5, 1.0])


def test_a_confidence_of_tau_passes():
    """For the loop and for naive. Here each of 7 tokens has the same probability, exactly."""
    model = endless_model()
    model.head.data.zero_()
    tau = torch.zeros(7).double().softmax(0)[0].item()
    [result] = generate(model, [[2]], tau=tau, block=3, max_new=8)
    assert result.num_accepted == [4, 4]
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    naive(model, [2], tau, block=3, max_new=8)
    assert len(forwards) == 2


def test_defaults():
    """Without a tau the text is AR's; B is that of the training."""
    assert Options().is_lossless and not Options(tau=0.9).is_lossless
    model = tiny_model(random.Random(0))
    assert Decoder(model, Options(), 1, 10).block == 4
    model.config.block = 3
    assert Decoder(model, Options(), 1, 10).block == 3
    assert Decoder(model, Options(block=5), 1, 10).block == 5


def test_a_one_token_row_among_others_stays_one():
    """Its confidence may be exactly 1, or its entropy exactly 0: only tau decides."""
    model = tiny_model(random.Random(1))
    model.head.data *= 1e4  # every probability is 0 or 1
    prompts = [random_prompt(random.Random(i), 6) for i in (0, 1)]
    for metric, taus in (("probability", [1.0, 0.9999]), ("entropy", [0.0, 0.001])):
        one, other = decode_each(model, prompts, taus, tau=1, metric=metric, max_new=20)
        assert one.num_accepted == [1] * len(one.tokens)
        assert max(other.num_accepted) == 5
        assert naive(model, prompts[0], tau=1, block=4, max_new=20) == one.tokens


def test_a_tiny_temperature_is_greedy():
    """No overflow into NaN."""
    model = tiny_model(random.Random(1))
    for options in ({"tau": 0.3}, {}):
        [cold] = generate(model, [[2, 3]], temperature=1e-40, max_new=20, **options)
        [greedy] = generate(model, [[2, 3]], max_new=20, **options)
        assert cold.tokens == greedy.tokens


def test_tau_acts_at_the_next_step():
    """`sequence.tau` may be set between any two forwards."""
    accepted = {0.2: [], 1.0: []}
    for seed in cases(10, 100):
        rng = random.Random(8000 + seed)
        model = tiny_model(rng)
        prompt = random_prompt(rng, 9)
        schedule = [rng.choice([0.2, 1.0]) for _ in range(40)]
        decoder = Decoder(model, Options(tau=1, block=4, max_new=40), rows=8, longest=49)
        sequence = decoder.add(prompt)
        for tau in schedule:
            sequence.tau = tau
            if not sequence.done:
                decoder.step()
                accepted[tau].append(sequence.num_accepted[-1])
        assert outcome(sequence) == by_hand(model, prompt, schedule.__getitem__, 4, max_new=40)
    assert set(accepted[1.0]) == {1} and mean(accepted[0.2]) > 2


def test_one_token_mode_is_greedy_ar_in_bfloat16(toy):
    """A probability of 0.9989 is 1.0 in bfloat16, and passes tau = 1 in the paper's code."""
    prompts = toy[1][:4]
    model, _ = load(str(ROOT / "toy/mars"), dtype=torch.bfloat16)
    for prompt, result in zip(prompts, generate(model, prompts, tau=1.0)):
        assert result.num_accepted == [1] * len(result.tokens)
        assert result.tokens == greedy(model, prompt, 256)
    results = generate(model, prompts, tau=0.99)  # just below 1, several tokens do pass
    assert max(count for result in results for count in result.num_accepted) > 1


def test_in_bfloat16_on_a_cpu_a_position_has_a_neighbour():
    """A product with one position has another order of sums: of 20 texts of SmolLM2 14 were the
    same at tau 1 and lossless, and 17 with a position of padding next to it."""
    model = endless_model()
    for dtype, width in ((torch.float32, 1), (torch.bfloat16, 2)):
        [answer] = generate(model.to(dtype), [[2, 3]], tau=1, max_new=5)
        assert answer.widths == [2, width, width, width, width]


def test_the_guard_by_hand():
    """Every token passes tau here; 4 5 6 7 stood in the text, and 9 followed them.

    Where the text says nothing a token needs .975: a twentieth of the doubt that tau allows.
    """
    method = Guarded(block=3, mask_id=MASK, metric="probability")
    config = tiny_config(random.Random(0), vocab_size=20)
    text = [10, 11, 12, 13, 4, 5, 6, 7, 9, 3, 4, 5, 6]
    sequence = Sequence(text, config, max_new=9, tau=0.5)
    for tokens, chance, count in (
        ([7, 9, 3, 4], 0.6, 4),  # the text says so
        ([6, 2, 2, 9], 0.98, 2),  # the second 2 repeats the token before it
        ([6, 2, 4, 9], 0.97, 1),  # the text has no 6 6
        ([7, 8, 9, 2], 0.99, 1),  # not what the text says: its own last token, or the next but one
        ([7, 7, 9, 2], 0.99, 1),
        ([6, 9, 8, 5], 0.98, 4),  # the first is AR's, whatever the text says
    ):
        assert method.accept(sequence, tokens, [chance] * 4) == tokens[:count]


# --------------------------------------------------------------------------------------- sequences


def test_every_token_is_fed_once_and_streamed_once():
    rng = random.Random(11)
    model = tiny_model(rng)
    for tau, num_masks in ((0.2, 3), (1, 0)):
        decoder = Decoder(model, Options(tau=tau, block=3, max_new=25), rows=1, longest=50)
        sequences = [decoder.add(random_prompt(rng, length)) for length in (3, 9)]
        streamed = {sequence: [] for sequence in sequences}
        for sequence, tokens in decoder:
            streamed[sequence] += tokens
        for sequence in sequences:
            assert streamed[sequence] == sequence.tokens
            assert len(sequence.num_accepted) == len(sequence.widths) == sequence.forwards
            num_fed = sequence.prompt_length + sum(sequence.num_accepted[:-1])
            assert sum(sequence.widths) == num_fed + num_masks * sequence.forwards
    assert generate(model, []) == []


def test_a_row_that_waits_is_not_starved():
    """A new text always has an open block: with one after another in the second row, the first
    waited for ever."""
    decoder = Decoder(endless_model(), Options(tau=1, block_cache=8), rows=2, longest=64)
    long = decoder.add([2, 3], max_new=60)
    for _ in range(200):
        decoder.add([2, 3], max_new=7)
    for _ in range(120):
        decoder.step()
    assert long.done
    list(decoder)
    assert decoder.scheduler.queue == deque()
    first, second = decoder.add([2, 3], max_new=20), decoder.add([2, 3], max_new=9)
    while len(first.tokens) < 8:
        decoder.step()
    decoder.step()  # the first waits for the second
    first.done = second.done = True
    assert list(decoder) == [] and decoder.add([2, 3], max_new=5) in dict(decoder)


def test_no_text_begins_while_a_row_waits():
    """Also if another row that waited was cancelled, or its text was the last that did."""
    for cancelled in (0, 1):
        decoder = Decoder(endless_model(), Options(tau=1, block_cache=4), rows=3, longest=64)
        sequences = [decoder.add([2, 3], tau, max_new=20) for tau in (0, 0, 1)]
        decoder.step()  # the blocks of the first two are full: they wait for the third
        assert [each for each, _ in decoder.step()] == sequences[2:]
        sequences[cancelled].done = True
        new = decoder.add([2, 3], max_new=20)
        while sequences[2].forwards < 4:
            decoder.step()
        assert new.forwards == 0 and sequences[1 - cancelled].forwards == 1
        list(decoder)
        assert len(new.tokens) == 20


def test_a_full_block_waits_for_the_others_and_costs_no_forward():
    """The paper's code pays one more forward per filled block; here the next feed commits it."""
    model = endless_model()
    options = Options(tau=1, block=3, block_cache=4, max_new=12)
    decoder = Decoder(model, options, rows=3, longest=17)
    sequences = []
    for index, tau in enumerate([0, 1, 1]):
        sequences.append(decoder.add(random_prompt(random.Random(index), 5), tau))
    decoder.step()  # prefill gives 4, 1, 1 tokens: one block is full at once
    assert [len(sequence.tokens) for sequence in sequences] == [4, 1, 1]
    assert decoder.cache.lengths == [5, 5, 5]
    for count in (2, 3, 4):  # the others fill theirs; the first does not move
        assert [sequence.index for sequence, _ in decoder.step()] == [1, 2]
        assert len(sequences[1].tokens) == count and decoder.cache.lengths == [5, 5, 5]
    assert len(decoder.step()) == 3  # all blocks are committed by the forward that goes on
    assert decoder.cache.lengths == [9, 9, 9] and len(sequences[0].tokens) == 8
    list(decoder)
    assert [sequence.forwards for sequence in sequences] == [3, 12, 12]


# ---------------------------------------------------------------------------------------- refusals


def test_a_model_has_so_many_positions():
    decoder = Decoder(tiny_model(random.Random(0)), Options(max_new=5), rows=1, longest=9999)
    decoder.add([2] * 507)
    with pytest.raises(UserError, match="508 tokens .* exceed the 512 positions"):
        decoder.add([2] * 508)


def test_a_model_without_a_mask_cannot_decode():
    model = tiny_model(random.Random(0))
    model.config.mask_token_id = None
    with pytest.raises(UserError, match="no mask token; load it with model.load"):
        generate(model, [[2, 3]])
