"""custom_generate/generate.py, in transformers: the tokens are `naive`'s with a tau, else AR's."""

import random
from collections import Counter
from functools import partial
from itertools import product
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
AutoTokenizer = transformers.AutoTokenizer


@pytest.fixture(autouse=True)
def no_cache_of_code(tmp_path, monkeypatch):
    """transformers copies the file that it runs to a folder of its own."""
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def open_folder(folder=ROOT / "toy/mars"):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float64, trust_remote_code=True)


def models(folder):
    """Random tiny models and then the bundled one: ours, transformers', and a prompt."""
    for seed in cases(5, 300):
        rng = random.Random(seed)
        ours = tiny_model(rng)
        ours.config.block = rng.randint(1, 6)
        save_model(ours, Chat(BASE), folder / str(seed), dtype=torch.float64)
        yield ours, open_folder(folder / str(seed)), random_prompt(rng, rng.randint(1, 40))
    ours, chat = load()
    theirs = open_folder()
    for prompt in toy_prompts(chat)[: len(cases(2, 60))]:
        yield ours.double(), theirs, prompt


def run(model, prompt: list[int], generate=None, **options):
    """The output, and the new tokens as output.tokens."""
    ids = torch.tensor([prompt])
    options = {"return_dict_in_generate": True, "pad_token_id": EOS} | options
    output = (generate or model.generate)(ids, **options)
    output.tokens = output.sequences[0, len(prompt) :].tolist()
    return output


def ar(model, prompt: list[int], max_new: int) -> list[int]:
    """transformers' own greedy text, one token per forward, which never has a mask."""
    plain = partial(AR, model, suppress_tokens=[model.config.mask_token_id])
    return run(model, prompt, plain, max_new_tokens=max_new).tokens


def test_a_tau_is_naive(tmp_path):
    """Tokens and forwards."""
    for ours, theirs, prompt in models(tmp_path):
        for tau in (0.3, 0.6, 0.9, 1):
            calls = []
            hook = ours.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            tokens = naive(ours, prompt, tau, ours.config.block, max_new=30)
            hook.remove()
            done = run(theirs, prompt, tau=tau, max_new_tokens=30)
            assert (done.tokens, done.num_forwards) == (tokens, len(calls)), tau
    # A probability of exactly tau passes. Here each token has the same, but for the mask.
    model = open_folder()
    model.lm_head.weight.data.zero_()
    tau = 1 / (model.vocab_size - 1)
    assert run(model, [5, 6, 7], tau=tau, eos_token_id=None, max_new_tokens=20).num_forwards == 4


def test_lossless_is_greedy_ar_in_fewer_forwards(tmp_path):
    """Random texts repeat themselves (prompt lookup), the bundled model's masks guess well."""
    tokens, forwards = Counter(), Counter()
    for _, model, prompt in models(tmp_path):
        done = run(model, prompt, max_new_tokens=40)
        function = partial(AR, model, custom_generate=mars)
        as_function = run(model, prompt, function, max_new_tokens=40)
        assert done.tokens == as_function.tokens == ar(model, prompt, max_new=40)
        tokens[model.vocab_size] += len(done.tokens)
        forwards[model.vocab_size] += done.num_forwards
    assert tokens[8] > 1.4 * forwards[8] and tokens[640] > 2.5 * forwards[640]


def test_samples_are_ars(tmp_path):
    """Two tokens, by a chi-square test against their probabilities; and a text is the one that
    tau 1 draws with the same seed, also with a processor."""
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "eos_token_id": None}
    _, model, prompt = next(models(tmp_path))
    torch.manual_seed(0)
    num_draws = len(cases(300, 5000))
    draws = [run(model, prompt, max_new_tokens=2, **options).tokens for _ in range(num_draws)]
    counts = Counter(map(tuple, draws))
    seen = torch.tensor([[counts[first, second] for second in range(8)] for first in range(8)])
    texts = torch.tensor([[*prompt, first] for first in range(8)])
    logits = model(texts).logits[:, -2:] / 1.3  # (8, 2, 8)
    logits[..., MASK] = -torch.inf
    probs = logits.softmax(-1)
    expected = num_draws * probs[0, 0, :, None] * probs[:, 1]  # (8, 8)
    chi2 = ((seen - expected) ** 2 / expected)[expected > 2]
    assert len(chi2) > 10 and chi2.sum() < len(chi2) + 4.5 * (2 * len(chi2)) ** 0.5

    model = open_folder()
    options |= {"max_new_tokens": 40, "repetition_penalty": 1.1}
    for seed, prompt in enumerate(toy_prompts(Chat(BASE))[:3]):
        torch.manual_seed(seed)
        done = run(model, prompt, **options)
        torch.manual_seed(seed)
        assert done.tokens == run(model, prompt, tau=1, **options).tokens
        assert done.num_forwards < 40


def test_it_ends_exactly_there():
    """At an end of turn, a length or a stopping criterion, also inside a run of accepted tokens; a
    streamer gets the prompt, then every token once, in order, and its end."""
    prompt = toy_prompts(Chat(BASE))[0]
    model = open_folder()
    whole = ar(model, prompt, max_new=60)
    end = torch.tensor([-1])
    for tau, stop in product((None, 0.5), (1, 2, 3, 4, 7, len(whole))):
        eos = whole[stop - 1]
        first = whole[: whole.index(eos) + 1]
        criterion = [lambda ids, _, eos=eos: ids[:, -1] == eos]
        ways = [(first, {"eos_token_id": eos}), (first, {"stopping_criteria": criterion})]
        ways += [(whole[:stop], {"max_new_tokens": stop})]
        ways += [(whole[:stop], {"max_new_tokens": None, "max_length": len(prompt) + stop})]
        for expected, options in ways:
            got = []  # one tensor for each call
            streamer = SimpleNamespace(put=got.append, end=partial(got.append, end))
            options = {"max_new_tokens": 60, "tau": tau, "streamer": streamer} | options
            assert run(model, prompt, **options).tokens == expected
            assert torch.cat([part.flatten() for part in got]).tolist() == [*prompt, *expected, -1]
    # The cache that came back takes the next turn.
    cut = run(model, prompt, max_new_tokens=3)
    cache = {name: cut[name] for name in ("cache", "past_key_values") if name in cut}
    assert run(model, prompt + cut.tokens, max_new_tokens=57, **cache).tokens == whole[3:]


def continuations(answers, start, _, text) -> list[int]:
    """The tokens that go on with one of the answers; none after its end."""
    said = text[start:].tolist()
    return [each[len(said)] for each in answers if each[: len(said)] == said and each != said]


def test_processors_and_stop_strings():
    """A processor that knows nothing after an end of turn; one that changes scores in place (a tau
    tests what the model says). transformers keeps the tokenizer of stop_strings to itself."""
    model = open_folder()
    stops = {"stop_strings": ["So"], "tokenizer": AutoTokenizer.from_pretrained(ROOT / "toy/mars")}
    for prompt, tau in product(toy_prompts(Chat(BASE))[:2], (None, 0.5, 1)):
        whole = ar(model, prompt, max_new=60)
        options = {"tau": tau, "max_new_tokens": 60, "guidance_scale": 1.0}
        answers = [whole, [*whole[:5], EOS]]
        allowed = partial(continuations, answers, len(prompt))
        done = run(model, prompt, prefix_allowed_tokens_fn=allowed, **options)
        assert done.tokens in answers
        flatten = [lambda _, scores: scores / 5], [lambda _, scores: scores.div_(5)]
        once, twice = [run(model, prompt, logits_processor=each, **options) for each in flatten]
        assert (once.tokens, once.num_forwards) == (twice.tokens, twice.num_forwards)
        cut = run(model, prompt, partial(AR, model), max_new_tokens=60, **stops).tokens
        assert 0 < len(cut) < len(whole)
        if tau != 0.5:
            assert run(model, prompt, **options, **stops).tokens == cut


def test_what_cannot_be_is_refused():
    model = open_folder()
    refused = [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"tau": 1.1}]
    refused += [{"assistant_model": model}, {"use_cache": False}, {"prompt_lookup_num_tokens": 5}]
    refused += [{"output_scores": True}, {"inputs_embeds": torch.zeros(1, 3, 128)}]
    for options in [*refused, {"attention_mask": torch.tensor([[0, 1, 1]])}]:
        with pytest.raises(ValueError, match="MARS"):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, **options)


def test_a_saved_folder(tmp_path):
    """It brings the file if masks were trained, and loads as before: in transformers without
    trust_remote_code (one token per forward), and in ours. Saving again replaces the file."""
    name = "custom_generate/generate.py"
    file = (ROOT / name).read_bytes()
    assert file == (ROOT / "toy/mars" / name).read_bytes()
    model = tiny_model(random.Random(0), vocab_size=640)
    for block, out in ((None, tmp_path / "plain"), (4, tmp_path / "mars"), (4, tmp_path / "mars")):
        model.config.block = block
        save_model(model, Chat(BASE), out)
        load(str(out))
        if int(transformers.__version__.split(".")[0]) >= 5:  # 4 runs the code of any local folder
            plain = transformers.AutoModelForCausalLM.from_pretrained(out)
            assert plain.generate.__func__ is AR
        assert (out / name).exists() == (block is not None)
        if block:
            assert (out / name).read_bytes() == file
            (out / name).write_text("an older one")
