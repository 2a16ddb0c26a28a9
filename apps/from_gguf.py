"""A GGUF file of a Llama (llama.cpp's format, often in 4 bits) as an ordinary checkpoint."""

from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

from plumbing.chat import Chat
from plumbing.errors import failure_as
from plumbing.files import save, write_json

CONTROL = 3  # the type of a special token in a GGUF file
NAMES = {  # in a GGUF file: in a checkpoint
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_config(field) -> dict:
    """config.json; `field` gives a value of the file by its name."""
    end = field("tokenizer.ggml.eos_token_id")
    return {
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "tie_word_embeddings": True,
        "eos_token_id": end,
    }


def read_tokenizer(field) -> Tokenizer:
    """Digits one by one, then byte-level BPE, as SmolLM2's own tokenizer.json has it."""
    words = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for word, kind in zip(words, field("tokenizer.ggml.token_type")):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True)])
    return tokenizer


def read_weights(reader, num_heads: dict[str, int]) -> dict[str, Tensor]:
    """All tensors in float32. num_heads: of queries and keys, by the names that GGUF gives them."""
    weights = {}
    for tensor in tqdm(reader.tensors, unit="tensor", desc="unpacking", leave=False, disable=None):
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        *layer, name, kind = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        if name in num_heads:  # llama.cpp puts the two numbers that are rotated side by side
            pairs = weight.unflatten(0, (num_heads[name], -1, 2))  # (heads, head_dim / 2, 2, D)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{NAMES[name]}.{kind}"] = weight
    return weights


def unpack(file: Path, directory: Path) -> None:
    """Write a checkpoint with the weights, the tokenizer and the chat template of a GGUF file."""
    with failure_as(f"{file}: damaged, or not of a Llama"):
        reader = GGUFReader(file)

        def field(name: str):
            return reader.fields[name].contents()

        config = read_config(field)
        tokenizer = read_tokenizer(field)
        end = field("tokenizer.ggml.tokens")[config["eos_token_id"]]
        settings = {"eos_token": end, "chat_template": field("tokenizer.chat_template")}
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        weights = read_weights(reader, heads)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(directory / "tokenizer_config.json", settings)
    save(directory, config, Chat(directory), weights)
