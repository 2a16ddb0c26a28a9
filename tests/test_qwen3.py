"""Qwen3 against transformers: no biases, norms of queries and keys, its own head_dim."""

import json
import random

import pytest
import torch
import transformers
from commands import command, is_refused
from common import ROOT, cases, copy_tokenizer

from decode import generate, naive
from model import Config, load
from plumbing.chat import Chat
from plumbing.config import read_config
from plumbing.data import encode


def their_model(directory, rng: random.Random, shards: int = 1):
    """A random Qwen3 that transformers made and saved; its heads are not hidden_size / heads."""
    torch.manual_seed(rng.randrange(100))
    kv_heads = rng.randint(1, 4)
    heads = kv_heads * rng.randint(1, 2)
    config = transformers.Qwen3Config(
        vocab_size=640,
        hidden_size=2 * heads * rng.choice([2, 4]),
        head_dim=rng.choice([6, 16]),
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        rope_theta=5000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=rng.random() < 0.5,
        initializer_range=0.2,
        eos_token_id=[2, 0],
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)  # the norms, too
    size = sum(weight.numel() * 4 for weight in model.parameters())
    model.save_pretrained(directory, max_shard_size=int(size / shards * 1.3))
    copy_tokenizer(directory)
    return model


def our_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    hidden = model(tokens, positions, None)
    return model.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_a_qwen3_of_transformers_loads_here(tmp_path, dtype, shards):
    """Logits and greedy answers; with the cache, as without it."""
    for seed in cases(4, 40):
        rng = random.Random(seed)
        directory = tmp_path / str(seed)
        theirs = their_model(directory, rng, shards).to(dtype)
        assert (directory / "model.safetensors.index.json").exists() == (shards > 1)
        model, _ = load(str(directory), dtype=dtype)
        assert not any(name.endswith("bias") for name, _ in model.named_parameters())
        tokens = torch.randint(3, 600, (3, 20))
        expected = theirs(tokens).logits
        expected[..., model.config.mask_token_id] = float("-inf")
        torch.testing.assert_close(our_logits(model, tokens), expected, atol=1e-5, rtol=1e-4)
        prompt = tokens[0]
        answer = theirs.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=[model.config.mask_token_id],
        )
        [sequence] = generate(model, [prompt.tolist()], tau=1.0, max_new=20)
        assert sequence.text == answer[0].tolist()
        assert sequence.tokens == naive(model, prompt.tolist(), 1.0, 4, 20)


def test_a_saved_qwen3_is_a_qwen3_for_transformers(tmp_path):
    """Trained for 30 steps from random weights: the loss falls, the logits are the same there.

    And --verify gives the text of tau 1, in float64.
    """
    their_model(tmp_path / "base", random.Random(3))
    words = ["--model", tmp_path / "base", "--data", ROOT / "toy/train.jsonl", "--out"]
    words += [tmp_path / "out", "--steps", 30, "--batch", 8, "--lr", 5e-3, "--held-out", 0]
    done = command("train", *words)
    assert done.status == 0, done.err
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert log[-1]["noisy"] < 0.8 * log[0]["noisy"] and log[-1]["clean"] < 0.8 * log[0]["clean"]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64
    )
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    model, chat = load(str(tmp_path / "out"), dtype=torch.float64)
    tokens = torch.randint(3, 600, (2, 30))
    expected = theirs(tokens).logits
    expected[..., model.config.mask_token_id] = float("-inf")
    torch.testing.assert_close(our_logits(model, tokens), expected, atol=1e-5, rtol=1e-4)

    rows = [json.loads(line) for line in (ROOT / "toy/test.jsonl").read_text().splitlines()]
    prompts = []
    for row in rows[: len(cases(5, 50))]:
        prompts.append(chat.encode(chat.prompt([{"role": "user", "content": row["prompt"]}])))
    plain = generate(model, prompts, tau=1.0, max_new=20)
    checked = generate(model, prompts, verify=True, max_new=20)
    assert [sequence.tokens for sequence in checked] == [sequence.tokens for sequence in plain]


HUB = {  # as the hub has them: hidden, intermediate, layers, heads, tied
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}


@pytest.mark.parametrize("size", HUB)
def test_config_files_of_the_hub(tmp_path, size):
    hidden, intermediate, layers, heads, tied = HUB[size]
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ends = {"eos_token_id": [151645, 151643]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    config = read_config(tmp_path, Config)
    assert (config.model_type, config.head_dim) == ("qwen3", 128)
    assert config.eos_token_id == (151645, 151643) and config.tie_word_embeddings == tied
    assert config.num_attention_heads * config.head_dim in (2048, 4096)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"head_dim": 7}, "head_dim 7: must be even"),
        ({"head_dim": -2}, "head_dim -2: must be a whole number"),
    ],
)
def test_what_is_refused(tmp_path, changes, message):
    their_model(tmp_path, random.Random(0))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert is_refused(command("decode", "--model", tmp_path, "--prompt", "Hi"), message)


# -------------------------------------------------------------------------------- the chat template

# What Qwen3's does with thoughts: an answer begins with a block for them, empty if there are none;
# in earlier turns there is no block.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TURNS = [
    {"role": "user", "content": "How many plums?"},
    {"role": "assistant", "content": "<think>\nSeven?\n</think>\n\nThere are 7 plums."},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def thinker(tmp_path):
    """A directory with this template, and transformers' tokenizer of it."""
    their_model(tmp_path, random.Random(0))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path, transformers.AutoTokenizer.from_pretrained(tmp_path)


def rendered(tokenizer, messages: list[dict], **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_prompts_are_those_of_transformers(thinker, options):
    directory, theirs = thinker
    chat = Chat(directory)
    chat.template_options = options
    expected = rendered(theirs, TURNS, add_generation_prompt=True, **options)
    assert chat.prompt(TURNS) == expected
    assert expected.endswith("</think>\n\n") == (options == {"enable_thinking": False})


def test_training_data_without_thoughts_are_those_of_transformers(thinker):
    """With the option: prompt and response are the whole conversation as transformers writes it."""
    directory, theirs = thinker
    chat = Chat(directory)
    chat.template_options = {"enable_thinking": False}
    messages = [*TURNS, {"role": "assistant", "content": "Still 7."}]
    example = encode({"messages": messages}, chat, eos=2, max_length=512)
    expected = rendered(theirs, messages).removesuffix("<|im_end|>\n")
    text = chat.tokenizer.decode(example.tokens[:-1], skip_special_tokens=False)
    assert text == expected and example.tokens[-1] == 2
    response = chat.tokenizer.decode(example.tokens[example.prompt : -1])
    assert response == "Still 7."


def test_the_option_reaches_decoding_and_training(thinker, tmp_path):
    directory, _ = thinker
    (directory / "chat_template.jinja").write_text("{{ 'x' * (100 if mood == 'long' else 1) }}")
    words = ["--model", directory, "--template-option", "mood=long"]
    done = command("decode", *words, "--prompt", "Hi", "--max-new", 500)
    assert is_refused(done, "a prompt of 1")  # 100 tokens or more
    assert command("decode", *words[:2], "--prompt", "Hi", "--max-new", 500).status == 0
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Hi", "response": "Ho"}))
    done = command("train", *words, "--data", data, "--max-length", 50, "--out", tmp_path / "out")
    assert is_refused(done, "no usable row: 1 ")
    done = command("decode", *words[:2], "--template-option", "mood", "--prompt", "Hi")
    assert is_refused(done, "--template-option: must be NAME=VALUE, not 'mood'")
    deep = f"mood={'[' * 100000}"  # was a RecursionError
    words += ["--template-option", deep, "--prompt", "Hi", "--max-new", 9]
    assert command("decode", *words).status == 0
