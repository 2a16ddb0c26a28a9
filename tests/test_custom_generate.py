"""custom_generate/generate.py, in transformers: the tokens are `naive`'s with a tau, else AR's."""

import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import BASE, EOS, MASK, ROOT, cases, random_prompt, save_model, tiny_model, toy_prompts

from decode import naive
from model import load
from plumbing.chat import Chat

transformers = pytest.importorskip("transformers", exc_type=ImportError)
from custom_generate.generate import mars  # noqa: E402  it needs transformers

AR = transformers.GenerationMixin.generate


class Streamer:
    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


@pytest.fixture(autouse=True)
def no_cache_of_code(tmp_path, monkeypatch):
    """transformers copies the file that it runs to a folder of its own."""
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def open_folder(folder, **options):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float64, trust_remote_code=True, **options)


def tiny(rng: random.Random, folder, block=None):
    """A tiny model of ours, and the same in transformers with its generate.py."""
    model = tiny_model(rng)
    model.config.block = block or rng.randint(1, 6)
    save_model(model, Chat(BASE), folder, dtype=torch.float64)
    return model, open_folder(folder)


def run(model, prompt: list[int], max_new: int, generate=None, **options) -> SimpleNamespace:
    """The new tokens, and the number of forwards."""
    generate = generate or model.generate
    ids = torch.tensor([prompt])
    options |= {"max_new_tokens": max_new, "return_dict_in_generate": True, "pad_token_id": EOS}
    output = generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens = output.sequences[0, len(prompt) :].tolist()
    return SimpleNamespace(tokens=tokens, forwards=output.get("num_forwards"), output=output)


def ar(model, prompt: list[int], max_new: int, **options) -> list[int]:
    """transformers' own text, one token per forward, which never has a mask."""

    def generate(ids, **options):
        return AR(model, ids, suppress_tokens=[MASK], **options)

    return run(model, prompt, max_new, generate, **options).tokens


def test_a_tau_is_naive(tmp_path, monkeypatch):
    """Tokens and forwards: random models with taus from 0 to 1, and the bundled one."""
    num_forwards = num_tokens = 0

    def counted(self, *inputs, **options):
        counted.forwards += 1
        return forward(self, *inputs, **options)

    forward = tiny_model(random.Random(0)).__class__.forward
    monkeypatch.setattr("model.Qwen2.forward", counted)
    for seed in cases(5, 300):
        rng = random.Random(seed)
        ours, theirs = tiny(rng, tmp_path / str(seed))
        prompt = random_prompt(rng, rng.randint(1, 30))
        for tau in (0.3, 0.6, 0.9, 1):
            counted.forwards = 0
            tokens = naive(ours, prompt, tau, ours.config.block, max_new=30)
            done = run(theirs, prompt, 30, tau=tau)
            assert (done.tokens, done.forwards) == (tokens, counted.forwards), (seed, tau)
            num_tokens += len(tokens)
            num_forwards += done.forwards
    assert num_tokens > 1.2 * num_forwards
    ours, chat = load()
    ours.double()
    theirs = open_folder(ROOT / "toy/mars")
    for prompt in toy_prompts(chat)[: len(cases(2, 200))]:
        counted.forwards = 0
        tokens = naive(ours, prompt, 0.8, 4, max_new=60)
        done = run(theirs, prompt, 60, tau=0.8)
        assert (done.tokens, done.forwards) == (tokens, counted.forwards)


def test_lossless_is_greedy_ar_in_fewer_forwards(tmp_path):
    """Random models, whose texts repeat themselves, and the bundled one; as a function, too."""
    num_tokens = num_forwards = 0
    for seed in cases(5, 300):
        rng = random.Random(seed)
        _, model = tiny(rng, tmp_path / str(seed))
        prompt = random_prompt(rng, rng.randint(1, 40))
        expected = ar(model, prompt, 40)
        done = run(model, prompt, 40)
        function = partial(AR, model, custom_generate=mars)
        as_function = run(model, prompt, 40, function)
        assert done.tokens == as_function.tokens == expected, seed
        num_tokens += len(expected)
        num_forwards += done.forwards
    assert num_tokens > 1.3 * num_forwards
    _, chat = load()
    model = open_folder(ROOT / "toy/mars")
    for prompt in toy_prompts(chat)[: len(cases(2, 200))]:
        done = run(model, prompt, 60)
        assert done.tokens == run(model, prompt, 60, tau=1).tokens
        assert len(done.tokens) > 2 * done.forwards


def test_samples_are_ars(tmp_path):
    """Two tokens of many texts, by a chi-square test against AR's probabilities; and each text is
    the one that tau 1 draws with the same seed, also with processors."""
    ours, model = tiny(random.Random(5), tmp_path / "m", block=3)
    prompt = [2, 3, 4, 5, 2, 3, 4]
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "eos_token_id": None}

    def after(text: list[int]) -> list[float]:
        hidden = ours(torch.tensor([text]), torch.arange(len(text))[None], mask=None)
        return (ours.logits(hidden[0, -1:])[0] / options["temperature"]).softmax(-1).tolist()

    torch.manual_seed(0)
    count = 10 * len(cases(20, 500))
    counts = Counter(tuple(run(model, prompt, 2, **options).tokens) for _ in range(count))
    chi2 = degrees = 0
    for one, p in enumerate(after(prompt)):  # (after EOS comes nothing)
        for two, q in enumerate(after([*prompt, one])):
            expected = count * p * q
            if one != EOS and expected > 2:
                chi2 += (counts[one, two] - expected) ** 2 / expected
                degrees += 1
    assert degrees > 5 and chi2 < degrees + 4.5 * (2 * degrees) ** 0.5
    model = open_folder(ROOT / "toy/mars")
    _, chat = load()
    for seed, prompt in enumerate(toy_prompts(chat)[:3]):
        texts = []
        for tau in (None, 1):
            torch.manual_seed(seed)
            texts.append(run(model, prompt, 40, tau=tau, repetition_penalty=1.1, **options))
        assert texts[0].tokens == texts[1].tokens and texts[0].forwards < texts[1].forwards


def test_it_ends_exactly_there(tmp_path):
    """At an end of turn, max_new_tokens or a stopping criterion, also inside a run of accepted
    tokens; a streamer gets the prompt, then every token once, in order."""
    _, chat = load()
    prompt = toy_prompts(chat)[0]
    model = open_folder(ROOT / "toy/mars")
    whole = ar(model, prompt, 60)

    for tau in (None, 0.5):
        for stop in (1, 2, 3, 4, 7, len(whole)):
            eos = whole[stop - 1]
            first = whole[: whole.index(eos) + 1]
            for expected, options in (
                (whole[:stop], {"max_new": stop}),
                (first, {"eos_token_id": eos}),
                (first, {"eos_token_id": [7, eos]}),
                (first, {"stopping_criteria": [lambda ids, _, eos=eos: ids[:, -1] == eos]}),
            ):
                streamer = Streamer()
                options = {"max_new": 60, "tau": tau, "streamer": streamer} | options
                assert run(model, prompt, **options).tokens == expected
                assert streamer.tokens == [*prompt, *expected, "end"]
    # max_length of the generation config; and the cache that came back takes the next turn
    model.generation_config.max_length = len(prompt) + 3
    cut = run(model, prompt, None)
    assert cut.tokens == whole[:3]
    name = "cache" if "cache" in cut.output else "past_key_values"
    assert cut.output[name].get_seq_length() <= len(prompt) + 2
    more = prompt + cut.tokens
    assert run(model, more, 60, **{name: cut.output[name]}).tokens == whole[3:]


def test_what_cannot_be_is_refused():
    model = open_folder(ROOT / "toy/mars")
    row = torch.tensor([[5, 6, 7]])
    for ids, options in (
        (row.repeat(2, 1), {}),
        (row, {"num_beams": 2}),
        (row, {"num_return_sequences": 2, "do_sample": True}),
        (row, {"assistant_model": model}),
        (row, {"prompt_lookup_num_tokens": 5}),
        (row, {"attention_mask": torch.tensor([[0, 1, 1]])}),
        (row, {"use_cache": False}),
    ):
        with pytest.raises(ValueError, match="MARS"):
            model.generate(ids, max_new_tokens=3, **options)


def test_a_saved_folder(tmp_path):
    """It brings the file if masks were trained, and loads as before: in transformers without
    trust_remote_code (one token per forward), and in ours. The bundled folder's file is the same.
    Saving over an old folder replaces the file."""
    name = "custom_generate/generate.py"
    assert (ROOT / name).read_bytes() == (ROOT / "toy/mars" / name).read_bytes()
    model = tiny_model(random.Random(0), vocab_size=640)
    for block, out in ((None, tmp_path / "plain"), (4, tmp_path / "mars"), (4, tmp_path / "mars")):
        model.config.block = block
        save_model(model, Chat(BASE), out)
        assert (out / name).exists() == (block is not None)
        load(str(out))
        if int(transformers.__version__.split(".")[0]) >= 5:  # 4 runs the code of any local folder
            plain = transformers.AutoModelForCausalLM.from_pretrained(out)
            assert plain.generate.__func__ is AR
        if block:
            (out / name).write_text("an older one")
