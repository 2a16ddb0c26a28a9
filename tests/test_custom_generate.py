"""custom_generate/generate.py, in transformers: the Decoder's tokens with a tau, else AR's."""

import random
import re
from collections import Counter
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from common import BASE, EOS, MASK, ROOT, cases, random_prompt, tiny_model, toy_prompts

import decode
from model import load
from plumbing.chat import Chat

transformers = pytest.importorskip("transformers", exc_type=ImportError)
from toy.mars.custom_generate.generate import generate  # noqa: E402  it needs transformers

AR = transformers.GenerationMixin.generate
TOY = ROOT / "toy/mars"
PROMPTS = toy_prompts(Chat(BASE))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """toy/mars with its file, which transformers copies to a folder of its own and runs there."""
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(TOY, dtype=torch.float64, trust_remote_code=True)


def random_models(seeds):
    """Ours, the same in transformers, and a prompt that repeats itself."""
    for seed in seeds:
        rng = random.Random(seed)
        ours = tiny_model(rng)
        ours.config.block = rng.randint(1, 6)
        config = ours.config.to_json() | {"eos_token_id": [EOS]}  # a tuple until it is JSON
        config = transformers.AutoConfig.for_model(**config)
        theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        theirs.load_state_dict(ours.state_dict(), strict=False)  # a tied head is there twice
        theirs.generate = partial(generate, model=theirs)
        yield ours, theirs, random_prompt(rng, rng.randint(1, 10)) * rng.randint(1, 4)


def run(model, prompt: list[int], function=None, **options):
    """The output, and the new tokens as output.tokens."""
    options = {"return_dict_in_generate": True, "pad_token_id": EOS, "max_new_tokens": 40} | options
    output = (function or model.generate)(torch.tensor([prompt]), **options)
    output.tokens = output.sequences[0, len(prompt) :].tolist()
    return output


def ar(model, prompt: list[int], **options) -> list[int]:
    """transformers' own text, one token per forward, which never has a mask."""
    plain = partial(AR, model, suppress_tokens=[model.config.mask_token_id])
    return run(model, prompt, plain, **options).tokens


def test_greedy(toy):
    """Lossless it is transformers' own text; with a tau the tokens and forwards of naive or, with
    guard, of the Decoder. Random texts repeat themselves, the bundled model's masks guess well."""
    counts = Counter()
    bundled = [(load()[0].double(), toy, prompt) for prompt in PROMPTS[: len(cases(2, 60))]]
    for ours, theirs, prompt in [*random_models(cases(6, 300)), *bundled]:
        done = run(theirs, prompt)
        assert done.tokens == ar(theirs, prompt)
        counts[theirs is toy] += len(done.tokens) - (1.4, 2.5)[theirs is toy] * done.num_forwards
        for tau, guard in product((0.3, 0.8, 1), (False, True)):
            options = {"tau": tau, "guard": guard}
            [expected] = decode.generate(ours, [prompt], rows=1, max_new=40, **options)
            done = run(theirs, prompt, **options)
            assert (done.tokens, done.num_forwards) == (expected.tokens, expected.forwards), options
            assert guard or done.tokens == decode.naive(ours, prompt, tau, ours.config.block, 40)
            counts[tau, guard] += done.num_forwards
    assert counts[False] > 0 and counts[True] > 0  # the gain of lossless decoding
    assert counts[1, True] > counts[0.3, True] > counts[0.3, False] + 20
    # A probability of exactly tau passes. Here each token has the same, but for the mask.
    toy.lm_head.weight.data.zero_()
    tau = 1 / (toy.vocab_size - 1)
    assert run(toy, [5, 6, 7], tau=tau, eos_token_id=None, max_new_tokens=20).num_forwards == 4


def test_samples_are_ars(toy):
    """Two tokens have their probabilities, by a chi-square test; and a text is the one that tau 1
    draws with the same seed, also with a processor."""
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "eos_token_id": None}
    _, model, prompt = next(random_models([0]))
    torch.manual_seed(0)
    seen = torch.zeros(8, 8)
    for _ in cases(300, 5000):
        seen[tuple(run(model, prompt, max_new_tokens=2, **options).tokens)] += 1
    logits = model(torch.tensor([[*prompt, first] for first in range(8)])).logits[:, -2:] / 1.3
    logits[..., MASK] = -torch.inf
    probs = logits.softmax(-1)  # (8, 2, 8)
    expected = seen.sum() * probs[0, 0, :, None] * probs[:, 1]  # (8, 8)
    chi2 = ((seen - expected) ** 2 / expected)[expected > 2]
    assert len(chi2) > 10 and chi2.sum() < len(chi2) + 4.5 * (2 * len(chi2)) ** 0.5

    for seed, prompt in enumerate(PROMPTS[:3]):
        texts = []
        for tau in (None, 1):
            torch.manual_seed(seed)
            texts.append(run(toy, prompt, tau=tau, repetition_penalty=1.1, **options))
        assert texts[0].tokens == texts[1].tokens and texts[0].num_forwards < 40


def test_it_ends_exactly_there(toy):
    """At an end of turn, a length or a stopping criterion, also inside a run of accepted tokens; a
    streamer gets the prompt, then every token once, in order, and its end."""
    whole = ar(toy, PROMPTS[0])
    lengths = [n for n in range(1, 20) if whole[n - 1] not in whole[: n - 1]]
    for tau, n in product((None, 0.5), lengths):
        eos = whole[n - 1]
        criterion = partial(lambda eos, ids, _: ids[:, -1] == eos, eos)
        for way in ({"eos_token_id": eos}, {"stopping_criteria": [criterion]}, {"max_length": n}):
            got = []
            streamer = SimpleNamespace(put=got.append, end=partial(got.append, torch.tensor(-1)))
            if "max_length" in way:
                way = {"max_new_tokens": None, "max_length": len(PROMPTS[0]) + n}
            assert run(toy, PROMPTS[0], tau=tau, streamer=streamer, **way).tokens == whole[:n]
            got = [token for ids in got for token in ids.flatten().tolist()]
            assert got == [*PROMPTS[0], *whole[:n], -1]
    # The cache that came back takes the next turn.
    cut = run(toy, PROMPTS[0], max_new_tokens=3)
    name = "cache" if "cache" in cut else "past_key_values"
    options = {name: cut[name], "max_new_tokens": 37}
    assert run(toy, PROMPTS[0] + cut.tokens, **options).tokens == whole[3:]


def test_processors(toy):
    """One that knows nothing after an end of turn; one that changes scores in place (a tau tests
    what the model says)."""
    whole = ar(toy, PROMPTS[0], max_new_tokens=60)
    answers = [PROMPTS[0] + whole, [*PROMPTS[0], *whole[:5], EOS]]

    def allowed(_, text):
        """The tokens that go on with one of the answers; none after its end."""
        said = text.tolist()
        return [each[len(said)] for each in answers if each[: len(said)] == said != each]

    for tau in (None, 0.5, 1):
        options = {"tau": tau, "max_new_tokens": 60}
        done = run(toy, PROMPTS[0], prefix_allowed_tokens_fn=allowed, **options)
        assert PROMPTS[0] + done.tokens in answers
        flatten = [lambda _, scores: scores / 5], [lambda _, scores: scores.div_(5)]
        once, twice = [run(toy, PROMPTS[0], logits_processor=each, **options) for each in flatten]
        assert (once.tokens, once.num_forwards) == (twice.tokens, twice.num_forwards)


def test_whose_options_they_are(toy):
    """Refused were a configuration's stop strings (transformers keeps the tokenizer to itself), the
    loader's options, and what plain generate ignores. The caller's own custom_generate was ignored,
    even one that does not exist."""
    options = {"tokenizer": transformers.AutoTokenizer.from_pretrained(TOY)}
    cut = ar(toy, PROMPTS[0], stop_strings="boxes", **options)
    assert 0 < len(cut) < 40
    config = transformers.GenerationConfig(stop_strings=["boxes"])
    for way in ({"stop_strings": "boxes"}, {"generation_config": config}):
        assert run(toy, PROMPTS[0], **options, **way).tokens == cut
    toy.generation_config.stop_strings = ["boxes"]
    options |= {"revision": "main", "token": None, "local_files_only": True, "cache_dir": None}
    options |= {"force_download": False, "output_hidden_states": True, "max_new_tokens": 40}
    named = {"custom_generate": str(TOY), "trust_remote_code": True}
    ids = torch.tensor([PROMPTS[0]])
    for function in (partial(AR, toy, **named), partial(toy.generate, **named), toy.generate):
        assert function(ids, **options)[0].tolist() == PROMPTS[0] + cut
    toy.generation_config.stop_strings = None
    own = {"custom_generate": lambda model, text, **_: text, "max_new_tokens": 5}
    assert toy.generate(ids, **own).equal(ids)
    with pytest.raises(OSError, match="no/such"):
        toy.generate(ids, custom_generate="no/such", trust_remote_code=True)


def test_what_cannot_be_is_refused(toy):
    refused = [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"guard": True}]
    refused += [{"assistant_model": toy}, {"use_cache": False}, {"prompt_lookup_num_tokens": 5}]
    refused += [{"output_scores": True, "return_dict_in_generate": True}, {"tau": 1.1}]
    refused += [{"inputs_embeds": torch.zeros(1, 3, 160)}, {"tau": "x"}]
    refused += [{"attention_mask": torch.tensor([[0, 1, 1]])}, {"inputs": torch.ones(1, 0).long()}]
    for options in refused:
        with pytest.raises(ValueError, match="^MARS.*" + ("empty" if "inputs" in options else "")):
            toy.generate(**{"inputs": torch.tensor([[5, 6, 7]]), "max_new_tokens": 3} | options)


def test_its_folder(toy, monkeypatch, capsys):
    """The README.md that it is saved with shows how to use it. Without trust_remote_code it is a
    plain model; transformers 4 runs the code of any local folder."""
    [lines] = re.findall(r"```python\n(.*?)```", (TOY / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(lines, {})
    assert capsys.readouterr().out.endswith("The answer is 60.<|im_end|> 9 forwards\n")
    if transformers.__version__ >= "5":
        plain = transformers.AutoModelForCausalLM.from_pretrained(TOY)
        assert plain.generate.__func__ is AR
