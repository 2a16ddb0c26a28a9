"""Properties of decoding: loop == naive, batch == its rows, blocks == by hand, tau = 1 == AR."""

import json
import random
import shutil

import pytest
import torch
import torch._dynamo.testing
from common import ROOT, cases, random_prompt, tiny_model

import kv_cache
from decode import (
    METRICS,
    Answer,
    Decoder,
    Options,
    accepted_lengths,
    confidences,
    generate,
    guess,
    logits_at,
    naive,
    plain_ar,
)
from kv_cache import KVCache
from model import UserError, load, visible


@pytest.fixture(scope="module")
def toy():
    model, chat = load(str(ROOT / "toy/mars"), dtype=torch.float64)
    rows = [json.loads(line) for line in (ROOT / "toy/test.jsonl").read_text().splitlines()]
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return model, [chat.encode(chat.prompt(turn)) for turn in turns]


def random_options(rng: random.Random) -> dict:
    """Thresholds low enough that a model of 8 words accepts guesses; sometimes plain AR."""
    metric = rng.choice(METRICS)
    taus = {"probability": (0.15, 0.5), "margin": (0.0, 0.2), "entropy": (1.0, 2.0)}
    ar = 0.0 if metric == "entropy" else 1.0
    return {
        "tau": ar if rng.random() < 0.1 else rng.uniform(*taus[metric]),
        "metric": metric,
        "block": rng.randint(1, 8),
        "max_new": rng.choice([1, 2, 7, 20, 40, 63, 64, 65]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": rng.randrange(100),
    }


def prompt_length(rng: random.Random) -> int:
    """Attention spans multiples of 64, so these lengths are at one, beside one, and anywhere."""
    return rng.choice([1, 2, 63, 64, 65, rng.randint(3, 90)])


def same(result, expected) -> bool:
    """Token for token and forward for forward."""
    return (result.tokens, result.accepted) == (expected.tokens, expected.accepted)


def test_cached_is_naive():
    kept = []
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model, options = tiny_model(rng), random_options(rng)
        prompt = random_prompt(rng, prompt_length(rng))
        [result] = generate(model, [prompt], **options)
        expected = naive(model, prompt, **options)
        assert same(result, expected), (seed, options)
        assert result.tokens_per_forward <= options["block"] + 1
        if options["block"] > 1 and options["max_new"] > 2:
            kept += result.accepted
    assert sum(kept) / len(kept) >= 2  # a model that accepts nothing would test nothing


def random_block_cache(rng: random.Random, max_new: int) -> int:
    """Blocks that divide max_new, miss it by one, or have nothing to do with it."""
    return max(1, rng.choice([1, 2, 3, 4, 8, 16, 32, max_new - 1, max_new, max_new + 1]))


@pytest.mark.parametrize("policy", ["cursor", "block"])
def test_ragged_batch_is_its_rows(policy):
    """A tau per prompt, more prompts than rows, rows that end early: each is what it is alone.

    The paper's code got this wrong: finished rows shifted the accepted counts of the live ones.
    """
    kept, ended_early, boundaries = [], 0, 0
    for seed in cases(25, 1000):
        rng = random.Random(1000 + seed)
        model, options = tiny_model(rng), random_options(rng)
        if policy == "block":
            options["block_cache"] = random_block_cache(rng, options["max_new"])
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(2, 8))]
        low, high = (0.0, 1.8) if options["metric"] == "entropy" else (0.1, 1.0)
        taus = [rng.choice([low, high, rng.uniform(low, high)]) for _ in prompts]
        del options["tau"]
        results = generate(model, prompts, rows=rng.randint(1, 8), tau=taus, **options)
        first_seed = options.pop("seed")
        for i, (prompt, tau, result) in enumerate(zip(prompts, taus, results)):
            alone = naive(model, prompt, tau=tau, seed=first_seed + i, **options)
            assert same(result, alone), (seed, i)
            ended_early += len(result.tokens) < options["max_new"]
            boundaries += len(result.tokens) > (options.get("block_cache") or 1000)
            if not plain_ar(tau, options["metric"]) and options["max_new"] > 2:
                kept += result.accepted
    assert sum(kept) / len(kept) > 1.5 and ended_early > 10
    assert policy == "cursor" or boundaries > 10


def by_hand(model, prompt: list[int], tau, block: int, block_cache: int, max_new: int):
    """The paper's block decoding of one prompt, greedy, slowly; tau may be a function of the step.

    At most `block` masks, and never a candidate behind the end of a block of `block_cache`.
    """
    tokens, accepted = [], []
    while tokens[-1:] != [0] and len(tokens) < max_new:
        left = block_cache - len(tokens) % block_cache
        ids = prompt + tokens + [1] * min(block, left - 1)
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        probs = model.logits(hidden[0, len(prompt + tokens) - 1 :]).softmax(-1)
        bar = tau(len(accepted)) if callable(tau) else tau
        count = 0
        for p, token in zip(*(x.tolist() for x in probs.max(-1))):
            if count and (p < bar or bar >= 1 or tokens[-1] == 0 or len(tokens) == max_new):
                break
            tokens.append(token)
            count += 1
        accepted.append(count)
    return tokens, accepted


@torch.inference_mode()
def test_block_policy_by_hand():
    kept = []
    for seed in cases(25, 200):
        rng = random.Random(6000 + seed)
        model, block, max_new = tiny_model(rng), rng.randint(1, 8), rng.choice([7, 16, 31, 32, 33])
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(3)]
        tau, block_cache = rng.choice([0.2, 0.4, 1.0]), rng.choice([4, 5, 8, 16])
        options = {"tau": tau, "block": block, "block_cache": block_cache, "max_new": max_new}
        for prompt, result in zip(prompts, generate(model, prompts, **options)):
            expected = by_hand(model, prompt, tau, block, block_cache, max_new)
            assert (result.tokens, result.accepted) == expected, (seed, options)
            kept += result.accepted if tau < 1 else []
    assert sum(kept) / len(kept) > 1.5


def test_block_policy_is_the_cursors_where_no_block_cuts():
    """At tau >= 1 every run is one token long, and B_cache >= max_new has no boundary."""
    for seed in cases(25, 1000):
        rng = random.Random(7000 + seed)
        model, options = tiny_model(rng), random_options(rng)
        prompts = [random_prompt(rng, prompt_length(rng)) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.5:
            options["tau"] = 0.0 if options["metric"] == "entropy" else 1.0
            block_cache = random_block_cache(rng, options["max_new"])
        else:
            block_cache = options["max_new"] + rng.randint(0, 3)
            options["temperature"] = 0.0  # where max_new cuts a block, fewer numbers are drawn
        cursor = generate(model, prompts, rows=3, **options)
        block = generate(model, prompts, rows=3, block_cache=block_cache, **options)
        assert all(same(a, b) for a, b in zip(cursor, block)), (seed, options, block_cache)


def test_a_full_block_waits_for_the_others_and_costs_no_forward():
    """The paper's code pays one more forward per filled block; here the next feed commits it."""
    model = tiny_model(random.Random(3))
    model.config.eos_token_id = (1,)  # the mask: nothing ends early
    prompts = [random_prompt(random.Random(i), 5) for i in range(3)]
    options = Options(block=3, block_cache=4, max_new=12)
    answers = [
        Answer(p, model, options, i, tau) for i, (p, tau) in enumerate(zip(prompts, (0, 1, 1)))
    ]
    decoder = Decoder(model, answers, options, rows=3)
    decoder.step()  # prefill gives 4, 1, 1 tokens: one block is full at once
    assert [len(a.tokens) for a in answers] == [4, 1, 1] and decoder.cache.lengths == [5, 5, 5]
    for count in (2, 3, 4):  # the others fill theirs; the first does not move
        assert [answer.index for answer, _ in decoder.step()] == [1, 2]
        assert len(answers[1].tokens) == count and decoder.cache.lengths == [5, 5, 5]
    assert len(decoder.step()) == 3  # all blocks are committed by the forward that goes on
    assert decoder.cache.lengths == [9, 9, 9] and len(answers[0].tokens) == 8
    list(decoder)
    assert [a.forwards for a in answers] == [3, 12, 12]


def test_a_row_that_is_done_lengthens_nothing():
    """Nobody attends over the slots of an answer that has ended, however many there were."""
    model = tiny_model(random.Random(3))
    options = Options(tau=1, max_new=40)
    long, short = Answer([2] * 300, model, options), Answer([2], model, options)
    long.options = Options(tau=1, max_new=2)
    model.config.eos_token_id = short.stop = (1,)  # the mask: nothing ends early
    decoder = Decoder(model, [long, short], options)
    spans = [decoder.cache.span for _ in decoder]
    assert max(spans) > 300 and spans[-1] == 64 and len(short.tokens) == 40


@pytest.mark.parametrize("block, block_cache", [(8, None), (2, 20), (8, 20)])
def test_the_cache_has_room_for_the_widest_feed(block, block_cache):
    """A long row near its end gets the width of its neighbours' feeds, which are young and fast."""
    model = tiny_model(random.Random(3))
    model.config.eos_token_id = (1,)  # the mask: nothing ends early
    prompts, taus = [[2] * 60] + 30 * [[3]], [1] + 30 * [0]
    options = {"block": block, "block_cache": block_cache, "max_new": 30}
    long, *others = generate(model, prompts, rows=2, tau=taus, **options)
    assert long.forwards == 30 and max(others[0].accepted) == block + 1


def test_prompts_that_wait_are_prefilled_together(monkeypatch):
    """As many as there are free rows side by side, but not more positions than PREFILL."""
    model, options = tiny_model(random.Random(3)), Options(tau=1, max_new=5, block=2)
    model.config.eos_token_id = (1,)  # the mask: nothing ends early
    lengths = [10, 30, 10, 60, 5, 5, 5]
    answers = [Answer([2] * n, model, options, i) for i, n in enumerate(lengths)]
    monkeypatch.setattr("decode.PREFILL", 100)
    decoder = Decoder(model, answers, options, rows=5)
    together = [[answer.index for answer, _ in decoder.step()] for _ in range(5)]
    # 3 x (30 + 2) positions; then 62 of one prompt, which a second would double
    assert together == [[0, 1, 2], [3], [4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    list(decoder)
    assert [answer.forwards for answer in answers] == [5] * 7


def test_rows_that_keep_a_prefix_are_not_admitted_beyond_the_cache():
    """A row that keeps much and one that needs much: together they would not fit."""
    model = tiny_model(random.Random(3))
    model.config.eos_token_id = (1,)  # the mask: nothing ends early
    options, texts = Options(tau=1, max_new=4), {}
    for rows in (1, 2):
        decoder = Decoder(model, [], options, rows, longest=104)
        for prompts in ([[2] * 90, [3]], [[2] * 91 + [3], [4] * 100]):
            answers = [Answer(prompt, model, options) for prompt in prompts]
            decoder.waiting.extend(answers)
            list(decoder)
            texts[rows, len(prompts[0])] = [answer.tokens for answer in answers]
    assert texts[1, 90] == texts[2, 90] and texts[1, 92] == texts[2, 92]


def test_compiled_is_eager(monkeypatch):
    """Static shapes change nothing that counts, and are few: two widths, one span."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def traced(model):
        return torch.compile(model.forward, dynamic=False, backend=counter)

    for seed in cases(2, 10):
        rng = random.Random(seed)
        model, block = tiny_model(rng), rng.randint(1, 4)
        prompts = [random_prompt(rng, rng.randint(1, 40)) for _ in range(5)]
        options = {"block": block, "max_new": 30, "tau": [0.2, 1.0, 0.3, 0.2, 1.0]}
        for way in ({}, {"verify": True}, {"block_cache": 6}):
            eager = generate(model, prompts, rows=2, **options, **way)
            monkeypatch.setattr("decode.compiled", traced)
            static = generate(model, prompts, rows=2, **options, **way, compile=True)
            assert [a.tokens for a in static] == [a.tokens for a in eager]
            assert [a.accepted for a in static] == [a.accepted for a in eager]
        assert max(tokens for a in eager for tokens in a.accepted) > 1
    assert 0 < counter.frame_count <= 6 * len(cases(2, 10))


def test_inductor_decodes_a_problem(toy):
    """The real compiler, once: it needs a C++ compiler on a CPU."""
    if not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    model, prompts = toy
    [eager] = generate(model, prompts[:1], tau=0.8)
    [static] = generate(model, prompts[:1], tau=0.8, compile=True)
    assert static.tokens == eager.tokens and static.accepted == eager.accepted


def test_a_model_in_training_keeps_its_layout():
    """Decoding lays weights out anew where that is faster; AdamW pairs weights and moments by
    memory, so that in the midst of training it would mix them up."""
    model = tiny_model(random.Random(3)).float()
    strides = [weight.stride() for weight in model.parameters()]
    [before] = generate(model, [[2, 3]], tau=0.2, max_new=9)
    assert [weight.stride() for weight in model.parameters()] == strides
    values = [weight.clone() for weight in model.requires_grad_(False).parameters()]
    [after] = generate(model, [[2, 3]], tau=0.2, max_new=9)
    assert [weight.stride() for weight in model.parameters()] != strides
    assert all(map(torch.equal, model.parameters(), values)) and before.tokens == after.tokens


def test_admission_order_changes_nothing():
    """Seeds belong to prompts: neither the rows, the order nor the neighbours decide a draw."""
    for seed in cases(10, 100):
        rng = random.Random(5 + seed)
        model, block_cache = tiny_model(rng), rng.choice([None, 4])
        prompts = [random_prompt(rng, rng.randint(1, 30)) for _ in range(9)]
        options = Options(tau=0.2, temperature=1.0, max_new=24, block_cache=block_cache)
        expected = [naive_sample(model, prompt, i, block_cache) for i, prompt in enumerate(prompts)]
        for rows in (1, 2, 4, 9):
            answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
            rng.shuffle(answers)
            list(Decoder(model, answers, options, rows))
            assert all(same(answer, expected[answer.index]) for answer in answers)


def naive_sample(model, prompt, seed, block_cache):
    options = {"tau": 0.2, "temperature": 1.0, "max_new": 24, "block_cache": block_cache}
    return naive(model, prompt, seed=seed, **options)


@torch.inference_mode()
def test_tau_acts_at_the_next_step():
    """Between any two forwards, driven by a function."""
    now, kept = [1.0], {0.2: [], 1.0: []}
    options = Options(tau=lambda waiting: now[0], block=4, max_new=40)
    for seed in cases(10, 100):
        rng = random.Random(8000 + seed)
        model, prompt = tiny_model(rng), random_prompt(rng, 9)
        schedule = [rng.choice([0.2, 1.0]) for _ in range(40)]
        answer = Answer(prompt, model, options)
        decoder = Decoder(model, [answer], options)
        for now[0] in schedule:
            if not answer.done:
                decoder.step()
                kept[now[0]].append(answer.accepted[-1])
        expected = by_hand(model, prompt, schedule.__getitem__, 4, 1000, 40)
        assert (answer.tokens, answer.accepted) == expected
    assert set(kept[1.0]) == {1} and sum(kept[0.2]) / len(kept[0.2]) > 2


def test_tau_follows_the_load(toy):
    """The function gets the number of prompts that wait: here one token at a time while any do."""
    model, prompts = toy
    loads = []

    def knob(waiting: int) -> float:
        loads.append(waiting)
        return 1.0 if waiting else 0.8

    answers = generate(model, prompts[:5], rows=2, tau=knob, max_new=40)
    del loads[:5]  # each request was asked once when it was made
    assert loads[:2] == [3, 3] and loads == sorted(loads, reverse=True) and loads[-1] == 0
    assert set(answers[0].accepted) == {1} and max(answers[4].accepted) == 5


def test_what_a_row_still_holds_is_not_fed_again():
    """The next turn of a conversation starts where the row is; the text is that of a new row."""
    shared = 0
    for seed in cases(25, 200):
        rng = random.Random(9000 + seed)
        model, options = (
            tiny_model(rng),
            Options(tau=0.3, max_new=20, temperature=rng.choice([0, 1])),
        )
        options.block_cache = rng.choice([None, None, 4])
        decoder = Decoder(model, [], options, 1, longest=200)
        prompt = random_prompt(rng, rng.randint(1, 70))
        for turn in range(3):
            decoder.waiting.append(answer := Answer(prompt, model, options, turn))
            held = decoder.cache.lengths[0]
            list(decoder)
            [fresh] = generate(model, [prompt], **vars(options) | {"seed": turn})
            assert same(answer, fresh), (seed, turn)
            spared = sum(fresh.positions) - sum(answer.positions)
            assert spared == min(held, len(prompt) - 1) if turn < 2 else spared < held
            shared += spared > 0
            prompt = answer.ids + random_prompt(rng, rng.randint(0, 3))
            if turn == 1:  # the user takes back the last words
                prompt = prompt[: rng.randint(1, held)]
    assert shared > 20


def test_the_mask_of_the_loop_is_the_mask_rule():
    """`visible` in terms of slots: [committed | real, guesses | windows | padding | left over]."""
    for seed in cases(25, 200):
        rng = random.Random(seed)
        model, options = tiny_model(rng), Options(verify=True, block=rng.randint(1, 5), tau=0.3)
        cache = KVCache(model.config, 2, 200, "cpu", torch.float64)
        cache.lengths = [rng.randint(0, 70), rng.randint(0, 70)]  # one of them decides on the span
        feeds = []
        for length in cache.lengths:
            answer = Answer(random_prompt(rng, length + rng.randint(1, 5)), model, options)
            answer.guesses = random_prompt(rng, rng.randint(0, options.block))
            feeds.append(answer.feed(length, mask_id=1))
        width = max(map(len, feeds))
        padded = [feed + (width - len(feed)) * [(1, 0, 1)] for feed in feeds]
        _, pos, start = torch.tensor(padded).unbind(-1)
        cache.reserve(width)
        mask = cache.mask(pos, start)
        heads = model.config.num_attention_heads // model.config.num_key_value_heads
        assert mask.shape in {(2, 1, n * width, cache.span) for n in (1, heads)}
        assert all(torch.equal(part, mask[:, :, :width]) for part in mask.split(width, dim=2))
        for row, (length, feed) in enumerate(zip(cache.lengths, feeds)):
            k_pos = torch.cat([torch.arange(length), pos[row, : len(feed)]])
            k_start = torch.cat([torch.arange(length) + 1, start[row, : len(feed)]])
            queries = pos[row, : len(feed), None], start[row, : len(feed), None], 0
            expected = visible(*queries, k_pos, k_start, 0)
            assert torch.equal(mask[row, 0, : len(feed), : length + len(feed)], expected)
            assert not mask[row, 0, : len(feed), length + len(feed) :].any()
            assert mask[row].any(-1).all()  # padding, too, sees something: no NaN


@pytest.mark.parametrize("narrow", [0, 3, 96])
def test_heads_as_positions_change_nothing(monkeypatch, narrow):
    """Of no forward, of those of few positions, of nearly all; one thread, so that none idles."""
    monkeypatch.setattr(kv_cache, "NARROW", narrow)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    groups = 0
    for seed in cases(4, 40):
        rng = random.Random(seed)
        model = tiny_model(rng)
        groups += model.config.num_attention_heads > model.config.num_key_value_heads
        prompts = [random_prompt(rng, rng.randint(1, 20)) for _ in range(3)]
        options = {"tau": 0.3, "block": rng.randint(1, 4), "max_new": 12}
        for answer, prompt in zip(generate(model, prompts, rows=2, **options), prompts):
            assert answer.tokens == naive(model, prompt, **options).tokens
    assert groups


def test_toy_model_in_a_batch_is_the_naive_decoder(toy):
    model, prompts = toy
    prompts = prompts[: len(cases(8, 100))]
    results = generate(model, prompts, rows=5, tau=0.8)
    assert all(same(r, naive(model, p, tau=0.8)) for r, p in zip(results, prompts))
    assert sum(len(r.tokens) for r in results) / sum(r.forwards for r in results) >= 2


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """Plain autoregression in six lines, without anything of decode.py."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
        tokens.append(model.logits(hidden[0, -1:]).argmax().item())
        if tokens[-1] in model.config.eos_token_id:
            break
    return tokens[len(prompt) :]


@torch.inference_mode()
def test_one_token_mode_is_greedy_ar():
    for seed in cases(25, 200):
        rng = random.Random(2000 + seed)
        model, prompt = tiny_model(rng), random_prompt(rng, prompt_length(rng))
        metric = rng.choice(METRICS)
        tau = 0 if metric == "entropy" else 1
        [result] = generate(model, [prompt], tau=tau, metric=metric, max_new=20)
        assert result.tokens == greedy(model, prompt, 20)
        assert result.accepted == [1] * len(result.tokens)
        assert sum(result.positions) == len(prompt) + len(result.tokens) - 1  # no mask was computed


def test_a_one_token_row_among_others_stays_one():
    """Its confidence may be exactly 1, or its entropy exactly 0: only tau decides."""
    model = tiny_model(random.Random(1))
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    head.weight.data *= 1e4  # every probability is 0 or 1
    prompts = [random_prompt(random.Random(i), 6) for i in (0, 1)]
    for metric, taus in (("probability", [1.0, 0.5]), ("entropy", [0.0, 0.5])):
        one, other = generate(model, prompts, tau=taus, metric=metric, max_new=20)
        assert one.accepted == [1] * len(one.tokens)
        assert max(other.accepted) == 5


@torch.inference_mode()
def test_one_token_mode_is_greedy_ar_in_bfloat16(toy):
    """In the paper's code a probability of 0.9989 rounded to 1.0 in bfloat16 and passed tau = 1."""
    prompts = toy[1][:4]
    model, _ = load(str(ROOT / "toy/mars"), dtype=torch.bfloat16)
    for prompt, result in zip(prompts, generate(model, prompts, tau=1.0)):
        assert result.accepted == [1] * len(result.tokens)
        assert result.tokens == greedy(model, prompt, 256)
    results = generate(model, prompts, tau=0.99)  # just below, guesses do pass
    assert max(n for result in results for n in result.accepted) > 1


def test_probabilities_are_not_rounded_to_bfloat16():
    """0.9995 is 1.0 in bfloat16, and would pass tau = 0.9999 there."""
    model = tiny_model(random.Random(0)).bfloat16()
    hidden = torch.zeros(1, 2, model.config.hidden_size, dtype=torch.bfloat16)
    model.logits = lambda hidden: torch.eye(8, dtype=hidden.dtype)[[3, 3]] * 9.5  # p(3) = 0.9995
    logits = logits_at(model, hidden, torch.tensor([[0, 1]]))
    assert logits.dtype == torch.float32 and logits.bfloat16().softmax(-1).max() == 1
    options = Options(tau=0.9999, block=1)
    assert guess(logits, [Answer([2, 3], model, options)], options)[1].tolist() == [1]


def test_nothing_counts_behind_the_end_of_turn():
    """The paper's code counts what comes behind the end, which inflates tokens per forward."""
    ended = 0
    for seed in cases(25, 100):
        rng = random.Random(3000 + seed)
        model = tiny_model(rng)
        model.config.eos_token_id = (0, 2)  # several ends, as Qwen2.5 has
        [result] = generate(model, [random_prompt(rng, 5)], tau=0.0, block=8, max_new=30)
        ends = [i for i, token in enumerate(result.tokens) if token in (0, 2)]
        assert ends in ([], [len(result.tokens) - 1])
        assert sum(result.accepted) == len(result.tokens) <= 30
        ended += bool(ends)
    assert ended > 5


def test_mask_token_is_never_generated():
    for seed in cases(10, 50):
        rng = random.Random(4000 + seed)
        model = tiny_model(rng)
        for temperature in (0.0, 2.0):
            options = {"tau": 0.2, "temperature": temperature, "max_new": 30}
            [result] = generate(model, [random_prompt(rng, 4)], **options)
            assert model.config.mask_token_id not in result.tokens


def test_acceptance_by_hand():
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    guesses = probs.argmax(-1)
    by_hand = {
        "probability": ([0.6, 0.9, 0.5, 1.0], {0.95: 1, 0.9: 2, 0.5: 4}),
        "margin": ([0.3, 0.8, 0.0, 1.0], {0.9: 1, 0.7: 2, 0.0: 4}),
        "entropy": ([0.8979, 0.3251, 0.6931, 0.0], {0.3: 1, 0.4: 2, 0.7: 4}),
    }
    for metric, (expected, lengths) in by_hand.items():
        confidence = confidences(probs, guesses, metric)
        assert confidence[0].tolist() == pytest.approx(expected, abs=1e-4)
        for tau, length in lengths.items():
            assert accepted_lengths(confidence, torch.tensor([tau]), metric).tolist() == [length]


def test_guesses_at_a_temperature_by_hand():
    """Drawn from p^(1/T), each position for itself; confidence is the drawn token's p at T = 1."""
    p = torch.tensor([0.5, 0.3, 0.2])
    options, draws = Options(temperature=0.5, tau=0.25, block=1), 3000
    model = tiny_model(random.Random(0))
    batch = [Answer([2], model, options, i) for i in range(draws)]
    tokens, counts = guess(p.log().expand(draws, 2, 3), batch, options)
    expected = draws * p**2 / (p**2).sum()
    for position in (0, 1):
        drawn = torch.bincount(tokens[:, position], minlength=3)
        assert ((drawn - expected) ** 2 / expected).sum() < 13.8  # p = 0.001, 2 degrees of freedom
    assert torch.equal(counts == 2, p[tokens[:, 1]] >= 0.25)
    cold = Options(temperature=1e-40, tau=0.25, block=1)  # must not overflow into NaN
    assert (guess(p.log().expand(draws, 2, 3), batch, cold)[0] == 0).all()


def test_temperature_one_draws_from_the_softmax():
    """Plain AR at T = 1: the first token over many seeds against its probabilities (chi-square)."""
    rng = random.Random(7)
    model, prompt, draws = tiny_model(rng, vocab_size=6).float(), [2, 3, 4], 4000
    results = generate(model, [prompt] * draws, rows=500, tau=1, temperature=1.0, max_new=1)
    counts = torch.bincount(torch.tensor([r.tokens[0] for r in results]), minlength=6)
    hidden = model(torch.tensor([prompt]), torch.arange(3)[None], None)
    expected = draws * model.logits(hidden[0, -1:])[0].softmax(-1)
    big = expected >= 5
    chi_square = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert chi_square < 20.5  # p = 0.001 at 5 degrees of freedom, the most there can be
    assert counts[1] == 0 and (counts > 0).sum() > 1


def test_results_hold_together():
    rng = random.Random(11)
    model = tiny_model(rng)
    prompts = [random_prompt(rng, n) for n in (3, 9)]
    for prompt, result in zip(
        prompts, generate(model, prompts, rows=1, tau=0.2, block=3, max_new=25)
    ):
        assert sum(k * n for k, n in result.histogram.items()) == len(result.tokens)
        assert sum(result.histogram.values()) == result.forwards
        assert result.ids == prompt + result.tokens
        fed = sum(result.accepted[:-1])  # every token once, and three masks each time
        assert sum(result.positions) == len(prompt) + fed + 3 * result.forwards
    options = Options(tau=0.2, block=3, max_new=25)
    answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
    events = list(Decoder(model, answers, options))
    for answer in answers:
        assert sum((tokens for other, tokens in events if other is answer), []) == answer.tokens
    assert generate(model, []) == []


def test_cache_refuses_what_does_not_fit():
    """Before anything is written; only real positions count, and rewinding gives them back."""
    model = tiny_model(random.Random(0))
    cache = KVCache(model.config, 2, 10, "cpu", torch.float64)
    cache.reserve(8)
    cache.commit([8, 3])
    with pytest.raises(ValueError, match="8 \\+ 3 positions exceed the capacity of 10"):
        cache.reserve(3)
    assert cache.lengths == [8, 3]
    cache.rewind(0, 2)
    assert cache.reserve(3).tolist() == [[2, 3, 4], [3, 4, 5]]
    with pytest.raises(ValueError):
        cache.rewind(0, 5)


@pytest.mark.parametrize("prompt", [[], [2, 8], [-1]])
def test_prompts_that_cannot_run(prompt):
    with pytest.raises(UserError, match="must be token ids below 8, at least one"):
        generate(tiny_model(random.Random(0)), [[2], prompt])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": 1.5}, "tau 1.5: must be between 0 and 1"),
        ({"tau": -0.1, "metric": "entropy"}, "at least 0"),
        ({"tau": float("nan")}, "tau nan"),
        ({"metric": "luck"}, "metric 'luck'"),
        ({"block": 0}, "block 0: must be at least 1"),
        ({"max_new": 0}, "max_new 0"),
        ({"max_new": 600}, "exceed the model's 512 positions"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"rows": 0}, "rows 0"),
        ({"tau": [0.5, 0.6]}, "2 values of tau for 1 prompts"),
        ({"block": 1000}, "or 1000 masks, exceed the model's 512 positions"),
        ({"temperature": float("inf")}, "out of range"),
        ({"seed": 2**70}, "out of range"),
        ({"block_cache": 0}, "block_cache 0: must be at least 1"),
        ({"tau": lambda waiting: 7}, "tau 7.0: must be between 0 and 1"),
    ],
)
def test_options_that_cannot_run(options, message):
    with pytest.raises(UserError, match=message):
        generate(tiny_model(random.Random(0)), [[2, 3]], **options)
