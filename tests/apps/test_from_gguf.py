"""A small GGUF file of a Qwen2, against transformers; and damaged ones. (A Llama: test_smollm2.)"""

import json
import struct

import gguf
import pytest
import torch
import transformers
from commands import command, is_refused
from common import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from decode import generate
from model import load

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
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = ["", "cafe\u0301 \u1112\u1161\u11ab \u212b", "I'LL we've", " x = 12  \n\n\t y\r\n\u3000z"]
TEXTS += ["你好，世界！", "👩‍👩‍👧 🇩🇪", "a<|im_end|>b <tool_call> <|im_end |>", "[PAD404]½ ²!?\n"]


@pytest.fixture(scope="module")
def theirs():
    """A Qwen2 with random weights, rounded as a checkpoint's."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, **heads)).eval()
    for weight in model.parameters():  # a norm of 1 or a bias of 0 would hide that it is left out
        weight.data = (weight + 0.2 * torch.randn_like(weight)).data.bfloat16().float()
    return model


def write(file, model, head) -> None:
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
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(kinds))
    writer.add_token_types(list(kinds.values()))
    writer.add_token_merges([" ".join(pair) for pair in learnt["merges"]])
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, weight in (model.state_dict() | {"lm_head.weight": head}).items():
        data, kind = weight.detach().numpy(), None
        if "embed_tokens" in name:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write(path, theirs, theirs.lm_head.weight)
    return path


@pytest.fixture(scope="module")
def directory(file):
    """The checkpoint that the command writes, and never writes over."""
    out = file.with_name("checkpoint")
    done = command("apps.from_gguf", file, out)
    assert done.status == 0, done.err
    assert is_refused(command("apps.from_gguf", file, out), "is not empty; choose another")
    return str(out)


def test_the_tokenizer_is_that_of_transformers(directory):
    """Its rules for words, NFC, special and added tokens; and a row of padding is the mask's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model, chat = load(directory)
    for text in TEXTS:
        assert chat.encode(text) == tokenizer(text)["input_ids"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " é\n"}]
    assert chat.prompt(messages) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat.encode("".join(ADDED)) == [400, 401, 402, 403]
    assert chat.decode([400, 401, 402, 403]) == "<tool_call>"
    assert (chat.mask_id, model.config.vocab_size) == (MASK, 512)
    assert model.config.eos_token_id == (402, 400)


@torch.inference_mode()
def test_logits_and_answers_are_those_of_transformers(directory, theirs):
    """Of the model that the file was made from, and of the checkpoint as transformers reads it."""
    ours, chat = load(directory)
    again = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    others = torch.arange(512) != MASK
    for text in TEXTS:
        prompt = chat.encode(chat.prompt([{"role": "user", "content": text}]))
        tokens = torch.tensor([prompt])
        hidden = ours(tokens, torch.arange(len(prompt))[None], None)
        found = ours.logits(hidden[0])[:, others]
        assert torch.allclose(found, theirs(tokens).logits[0, :, others], atol=1e-3)
        assert torch.allclose(found, again(tokens).logits[0, :, others], atol=1e-3)
        [answer] = generate(ours, [prompt], tau=1, max_new=24)
        [checked] = generate(ours, [prompt], max_new=24)
        how = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [MASK]}
        expected = again.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        assert answer.tokens == checked.tokens == expected[0, len(prompt) :].tolist()


def test_a_head_that_is_another_matrix(theirs, tmp_path):
    """It is not taken for the embedding in more bits."""
    head = torch.randn(512, 64).bfloat16().float()
    write(tmp_path / "untied.gguf", theirs, head)
    assert command("apps.from_gguf", tmp_path / "untied.gguf", tmp_path / "out").status == 0
    model, _ = load(str(tmp_path / "out"))
    assert model.head.equal(head) and not model.model.embed_tokens.weight.equal(head)


@pytest.mark.parametrize(
    "name, distance, kind, value, reason",  # what is written where, after the name of a field
    [
        ("tokenizer.ggml.tokens", 24, "c", b"?", "the vocabulary has a token twice"),
        ("tokenizer.ggml.pre", 12, "5s", b"llama", "a qwen2 with the tokenizer of llama"),
        ("qwen2.block_count", 4, "I", 2**31, "2147483648 layers in 27 tensors"),
        ("qwen2.embedding_length", 4, "I", 2**30, "expected (512, 1073741824), found (512, 64)"),
        ("token_embd.weight", 20, "I", 999, "is not a valid GGMLQuantizationType"),
    ],
)
def test_a_damaged_file(file, tmp_path, name, distance, kind, value, reason):
    """One line, and nothing is written."""
    content = bytearray(file.read_bytes())
    place = content.index(name.encode()) + len(name) + distance
    struct.pack_into(f"<{kind}", content, place, value)
    (tmp_path / "bad.gguf").write_bytes(content)
    done = command("apps.from_gguf", tmp_path / "bad.gguf", tmp_path / "out")
    assert is_refused(done, reason) and "bad.gguf: " in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_file_that_is_cut_off(file, tmp_path, size):
    (tmp_path / "bad.gguf").write_bytes(file.read_bytes()[:size])
    done = command("apps.from_gguf", tmp_path / "bad.gguf", tmp_path / "out")
    assert is_refused(done, "bad.gguf: damaged, or not of") and not (tmp_path / "out").exists()
