"""The transformer against transformers: logits, answers, checkpoints both ways."""

import random

import pytest
import torch
import transformers
from common import BASE, MASK, copy_tokenizer, save_model, tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from decode import generate, naive
from model import Config, add_mask_token, initialize, load, load_model
from plumbing.chat import Chat
from plumbing.errors import UserError

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
THETA = 5000.0  # neither library's default
FAMILIES = ["Qwen2", "Llama", "Qwen3"]
# Only a Qwen3 may have heads whose size is not hidden_size / num_attention_heads.
OWN = {"Qwen2": {}, "Llama": {}, "Qwen3": {"head_dim": 20}}


def shake(model) -> None:
    """A norm of 1 or a bias of 0 would hide that it is not applied."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)


def their_model(target, family: str, tied: bool = True, shards: int = 1, **options):
    """A random model that transformers made, saved by transformers."""
    torch.manual_seed(3)
    # Version 4 of transformers takes one name for theta, version 5 the other.
    rope = {"rope_type": "default", "rope_theta": THETA}
    options |= SHAPE | OWN[family] | {"rope_theta": THETA, "rope_parameters": rope}
    options |= {"vocab_size": 640, "eos_token_id": [2, 0], "tie_word_embeddings": tied}
    config = getattr(transformers, family + "Config")(**options)
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    shake(model)
    size = sum(weight.numel() * 4 for weight in model.parameters())
    model.save_pretrained(target, max_shard_size=int(size / shards * 1.3))
    copy_tokenizer(target)
    return model


def our_config(vocab_size: int, tied: bool, **options) -> Config:
    options = SHAPE | {"rope_theta": THETA, "eos_token_id": (2, 0), "block": 4} | options
    return Config(vocab_size=vocab_size, tie_word_embeddings=tied, **options)


def our_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    hidden = model(tokens, positions, None)
    return model.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)


def assert_equal_logits(ours, theirs, tokens: torch.Tensor, atol=1e-4) -> None:
    """With the mask's logit as ours: it is never predicted."""
    expected = theirs(tokens).logits
    expected[..., ours.config.mask_token_id] = float("-inf")
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=atol, rtol=0)


def assert_equal_answers(ours, theirs, prompt: torch.Tensor, **options) -> None:
    """Greedy; transformers reads the end-of-turn tokens from the checkpoint, if none are given."""
    answer = theirs.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=[ours.config.mask_token_id],
        **options,
    )
    [sequence] = generate(ours, [prompt.tolist()], tau=1, max_new=24)
    assert sequence.token_ids == answer[0].tolist()
    assert sequence.tokens == naive(ours, prompt.tolist(), tau=1, block=4, max_new=24)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformers_loads_here(tmp_path, tied, family, shards):
    theirs = their_model(tmp_path, family, tied, shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    ours, _ = load(str(tmp_path))
    expected = SHAPE | OWN[family] | {"rope_theta": THETA, "eos_token_id": (2, 0)}
    assert {name: getattr(ours.config, name) for name in expected} == expected
    assert ours.config.tie_word_embeddings == tied and ours.config.block is None
    tokens = torch.randint(4, 640, (2, 250))  # nearly all positions that there are
    assert_equal_logits(ours, theirs, tokens)
    assert_equal_answers(ours, theirs, tokens[0, :9], eos_token_id=[2, 0])
    in_bfloat16, _ = load(str(tmp_path), dtype=torch.bfloat16)
    assert {weight.dtype for weight in in_bfloat16.parameters()} == {torch.bfloat16}
    assert our_logits(in_bfloat16, tokens).isfinite().any()


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_checkpoint_saved_here_loads_in_transformers(tmp_path, tied, family):
    ours = initialize(our_config(640, tied, model_type=family.lower(), **OWN[family]), 1)
    shake(ours)
    chat = Chat(BASE)
    add_mask_token(ours, chat)
    save_model(ours, chat, tmp_path / "x", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    tokens = torch.randint(4, 640, (2, 30))
    assert_equal_logits(ours, theirs, tokens)
    assert_equal_answers(ours, theirs, tokens[0])
    again, _ = load(str(tmp_path / "x"))
    assert again.config == ours.config
    assert torch.equal(our_logits(again, tokens), our_logits(ours, tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    text = "<|im_start|>user\nMia has 12 plums. 🙂<|mask|>"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat.encode(text)


@torch.inference_mode()
def test_a_llama_is_saved_as_a_qwen2(tmp_path):
    """With biases that are zero, as transformers sees."""
    llama = their_model(tmp_path / "llama", "Llama")
    ours, chat = load(str(tmp_path / "llama"))
    save_model(ours, chat, tmp_path / "qwen2", torch.float32)
    qwen2 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    assert type(qwen2) is transformers.Qwen2ForCausalLM
    assert not qwen2.model.layers[0].self_attn.q_proj.bias.any()
    tokens = torch.randint(4, 640, (2, 30))
    assert torch.allclose(qwen2(tokens).logits, llama(tokens).logits, atol=1e-5)


@torch.inference_mode()
def test_in_bfloat16_near_ties_are_decided_in_float32():
    """Where the logits of two tokens round to the same number, the likelier token is still best."""
    torch.manual_seed(0)
    model = tiny_model(random.Random(0), vocab_size=300).bfloat16()
    head = model.head.float()
    model.head.data = (head[:1] + 0.05 * head).bfloat16()  # all tokens are nearly alike
    hidden = 3 * torch.randn(4, 50, model.config.hidden_size).bfloat16()
    exact = hidden.double() @ model.head.double().T
    exact[..., MASK] = float("-inf")
    rounded = model.logits(hidden.flatten(0, 1)).view(4, 50, 300)
    assert (rounded.argmax(-1) != exact.argmax(-1)).sum() > 10
    found = model.logits_at(hidden, torch.arange(50).expand(4, 50))
    assert found.dtype == torch.float32 and torch.equal(found.argmax(-1), exact.argmax(-1))
    best = rounded.topk(32).indices
    assert (found - exact).gather(-1, best).abs().max() < 1e-5
    others = torch.ones_like(found, dtype=torch.bool).scatter(-1, best, False)
    assert torch.equal(found[others], rounded[others])


@torch.inference_mode()
def test_in_bfloat16_the_mask_is_never_among_the_best():
    """Not even where fewer tokens are left than are computed again."""
    model = tiny_model(random.Random(0), vocab_size=8).bfloat16()
    hidden = torch.randn(1, 3, model.config.hidden_size).bfloat16()
    found = model.logits_at(hidden, torch.arange(3)[None])
    assert (found[..., MASK] == float("-inf")).all() and found.isfinite().sum() == 3 * 7


def test_a_dtype_by_name_and_a_device_that_is_not_there():
    """They were "damaged (invalid combination of arguments)", and torch's own RuntimeError."""
    with pytest.raises(UserError, match="dtype: torch.bfloat16, say, not 'bfloat16'"):
        load("toy/mars", dtype="bfloat16")
    with pytest.raises(UserError, match="device gpu: this machine has .*cpu"):
        load("toy/mars", device="gpu")


def test_a_head_in_the_file_is_the_head(checkpoint):
    """Some checkpoints have an lm_head.weight although they say tie_word_embeddings: true."""
    head = torch.randn(640, load_model(checkpoint).config.hidden_size)
    tensors = load_file(checkpoint / "model.safetensors") | {"lm_head.weight": head}
    save_file(tensors, checkpoint / "model.safetensors")
    model = load_model(checkpoint)
    assert not model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, head)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_free", [3, 0])
def test_the_mask_takes_a_free_row_or_a_new_one(tmp_path, tied, num_free):
    """Qwen2.5 has rows to spare; the vocabulary of a tokenizer may also be exactly full."""
    text = Tokenizer.from_file(str(BASE / "tokenizer.json")).to_str()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|mask|>", "<|gone|>"))
    chat = Chat(tmp_path)
    num_tokens = chat.tokenizer.get_vocab_size()
    num_rows = num_tokens + num_free
    model = initialize(our_config(num_rows, tied), 0)
    matrices = [model.model.embed_tokens] if tied else [model.model.embed_tokens, model.lm_head]
    before = [matrix.weight.clone() for matrix in matrices]
    add_mask_token(model, chat)
    assert model.config.mask_token_id == chat.tokenizer.token_to_id("<|mask|>") == num_tokens
    assert model.config.vocab_size == max(num_rows, num_tokens + 1)
    for matrix, old in zip(matrices, before):
        assert torch.equal(matrix.weight[:num_rows], old)
        new = matrix.weight[num_rows:]
        assert torch.allclose(new, old.mean(0).expand_as(new))
    logits = our_logits(model, torch.tensor([[4, num_tokens]]))
    assert logits.shape[-1] == model.config.vocab_size
    assert logits[..., num_tokens].max() == float("-inf")
    assert logits[..., :num_tokens].isfinite().all()


def test_chunks_keep_their_order(monkeypatch):
    """However many there are, with their gradients."""
    model = tiny_model(random.Random(0))
    x = torch.randn(7, 3).double().requires_grad_()
    y = torch.randn(7).double()
    for at_a_time in (8, 16, 1000):
        monkeypatch.setattr("model.LOGITS_AT_A_TIME", at_a_time)
        found = model.in_chunks(lambda x, y: x.square().sum(-1) * y, x, y)
        assert torch.allclose(found, x.square().sum(-1) * y)
        [gradient] = torch.autograd.grad((found * y).sum(), x)
        assert torch.allclose(gradient, 2 * x * y[:, None].square())
