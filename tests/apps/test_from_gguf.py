"""A small GGUF file of a Qwen2, against what was written into it; and damaged ones."""

import json

import pytest
import torch
from commands import command, is_refused
from common import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model import load

transformers = pytest.importorskip("transformers", minversion="5.24")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NUMBERS = {
    "qwen2.block_count": 2,
    "qwen2.context_length": 512,
    "qwen2.embedding_length": 64,
    "qwen2.feed_forward_length": 96,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.head_count_kv": 2,
    "tokenizer.ggml.eos_token_id": 402,
}
ADDED = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<tool_call>": 4}  # 400 to 403
MASK = 404  # the first row of padding


@pytest.fixture(scope="module")
def theirs():
    """The state_dict of a Qwen2 with random weights, rounded as a checkpoint's."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, **heads))
    weights = {}
    for name, weight in model.state_dict().items():  # a norm of 1, say, would hide its absence
        weights[name] = (weight + 0.2 * torch.randn_like(weight)).bfloat16().float()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def write(file, weights: dict, rules: str = "qwen2") -> None:
    """Write a GGUF file: the embedding in 4 bits, the head and all else in 32."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = (ROOT / "LICENSE").read_text() + 99 * " 12"  # a token that Qwen2's rules never give
    tokenizer.train_from_iterator([text], trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    kinds = dict.fromkeys(learnt["vocab"], 1) | ADDED
    kinds |= {f"[PAD{row}]": 5 for row in range(MASK, 512)}
    writer = gguf.GGUFWriter(file, "qwen2")
    for name, value in NUMBERS.items():
        writer.add_uint32(name, value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    writer.add_token_list(list(kinds))
    writer.add_token_types(list(kinds.values()))
    writer.add_token_merges([" ".join(pair) for pair in learnt["merges"]])
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, weight in weights.items():
        data, kind = weight.numpy(), None
        if "embed_tokens" in name:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_was_written_comes_back(theirs, tmp_path):
    """The weights, the embedding in the head's bits; the tokenizer; a padding row is the mask's."""
    file = tmp_path / "small.gguf"
    write(file, theirs)
    out = tmp_path / "out"
    done = command("apps.from_gguf", file, out)
    assert done.status == 0, done.err
    # No bars of transformers, and not silence.
    assert done.err == f'{out} holds a model: python decode.py --model {out} --prompt "..."\n'
    assert is_refused(command("apps.from_gguf", file, out), "out has a model")
    model, chat = load(str(out))
    found = model.state_dict()
    assert found.keys() == theirs.keys() - {"lm_head.weight"}
    others = torch.arange(512) != MASK
    for name, weight in found.items():
        if "embed_tokens" in name:
            assert weight[others].equal(theirs[name][others])
        else:
            assert weight.equal(theirs[name])
    config = model.config
    assert (config.rms_norm_eps, config.rope_theta, config.eos_token_id) == (1e-6, 1e4, (402, 400))
    assert (chat.mask_id, config.vocab_size) == (MASK, 512)
    assert chat.encode("".join(ADDED)) == [400, 401, 402, 403]
    assert chat.decode([400, 401, 402, 403]) == "<tool_call>"
    assert chat.encode("cafe\u0301") == chat.encode("caf\u00e9")  # transformers' reading lacks NFC
    assert chat.decode(chat.encode(" 12")) == " 12" and len(chat.encode(" 12")) == 3
    assert chat.prompt([{"role": "user", "content": "é"}]) == "<|im_start|>é"


def test_a_head_that_is_another_matrix(theirs, tmp_path):
    """It is not taken for the embedding in more bits."""
    head = torch.randn(512, 64).bfloat16().float()
    write(tmp_path / "untied.gguf", theirs | {"lm_head.weight": head})
    assert command("apps.from_gguf", tmp_path / "untied.gguf", tmp_path / "out").status == 0
    model, _ = load(str(tmp_path / "out"))
    assert model.head.equal(head) and not model.model.embed_tokens.weight.equal(head)


def test_what_is_refused(theirs, tmp_path):
    """One line, and nothing is written."""
    file = tmp_path / "bad.gguf"
    out = tmp_path / "out"
    assert is_refused(command("apps.from_gguf", file, out), "bad.gguf: missing, damaged, or not")
    write(file, theirs, rules="llama-bpe")
    done = command("apps.from_gguf", file, out)
    assert is_refused(done, "a qwen2 with the tokenizer of llama-bpe")
    file.write_bytes(file.read_bytes()[:-1])
    assert is_refused(command("apps.from_gguf", file, out), "bad.gguf: missing, damaged, or not")
    norm = "model.norm.weight"
    write(file, {name: weight for name, weight in theirs.items() if name != norm})
    assert "has no tensor for model.norm.weight" in command("apps.from_gguf", file, out).err
    assert not out.exists()
