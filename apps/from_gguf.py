"""A GGUF file (llama.cpp's format, often in 4 bits) of a Llama or Qwen2 as an ordinary checkpoint.

    pip install --no-deps gguf
    python -m apps.from_gguf FILE DIRECTORY

The weights in such a file have no checksum: a damaged number among them is not noticed.
"""

import tempfile
from pathlib import Path

if not __package__:
    import as_file  # noqa: F401 - says how to run it, and exits

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from torch import Tensor
from tqdm import tqdm

from model import Config, Qwen2
from plumbing.arguments import Parser
from plumbing.chat import Chat
from plumbing.config import parse_config
from plumbing.errors import UserError, failure_as, require, run_main
from plumbing.files import check_shapes, save, write_json
from plumbing.signals import exit_on_sigterm

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
NAMES = {  # in a GGUF file: in a checkpoint
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
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
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = (  # how Qwen2 cuts a text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_config(fields: dict) -> dict:
    """config.json, except for `tie_word_embeddings`, which only the tensors tell."""
    family = fields["general.architecture"]
    rules = fields["tokenizer.ggml.pre"]
    if (family, rules) not in (("llama", "smollm"), ("qwen2", "qwen2")):
        raise ValueError(f"a {family} with the tokenizer of {rules}")
    if f"{family}.rope.scaling.type" in fields:
        raise ValueError("scaled rotary angles are not supported")
    words = fields["tokenizer.ggml.tokens"]
    ends = [fields["tokenizer.ggml.eos_token_id"]]
    if family == "qwen2":  # its own generation_config.json has this one as well
        ends.append(words.index("<|endoftext|>"))
    return {
        "model_type": family,
        "vocab_size": len(words),
        "hidden_size": fields[f"{family}.embedding_length"],
        "intermediate_size": fields[f"{family}.feed_forward_length"],
        "num_hidden_layers": fields[f"{family}.block_count"],
        "num_attention_heads": fields[f"{family}.attention.head_count"],
        "num_key_value_heads": fields[f"{family}.attention.head_count_kv"],
        "max_position_embeddings": fields[f"{family}.context_length"],
        "rope_theta": fields[f"{family}.rope.freq_base"],
        "rms_norm_eps": round(fields[f"{family}.attention.layer_norm_rms_epsilon"], 9),
        "eos_token_id": ends,
    }


def read_tokenizer(fields: dict) -> Tokenizer:
    """Byte-level BPE, after SmolLM2's or Qwen2's rules of what a word is."""
    words = list(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]))
    # Unused tokens are names for rows that pad the embedding: <|mask|> gets the first of these.
    ids = {word: id for id, (word, kind) in enumerate(words) if kind != UNUSED}
    if len(ids) != max(ids.values()) + 1:
        raise ValueError("the vocabulary has a token twice, or gaps")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        rules = [
            Split(Regex(WORDS), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        rules = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = Sequence(rules)
    tokenizer.decoder = decoders.ByteLevel()
    for word, kind in words:
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(word, normalized=False)])
    return tokenizer


def read_weights(tensors: list, config: dict) -> dict[str, Tensor]:
    """All weights in bfloat16, by their names in a checkpoint; tensors: a GGUFReader's."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for packed in tqdm(tensors, "unpacking", leave=False, disable=None):
        weight = torch.from_numpy(dequantize(packed.data, packed.tensor_type).copy())
        *layer, name, kind = packed.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        if config["model_type"] == "llama" and name in heads:
            # llama.cpp puts the two numbers that are rotated side by side: not so in a Qwen2.
            pairs = weight.unflatten(0, (heads[name], -1, 2))  # (heads, head_dim / 2, 2, D)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{NAMES[name]}.{kind}"] = weight.bfloat16()
    if HEAD in weights and (weights[HEAD] - weights[EMBEDDING]).norm() < 0.5 * weights[HEAD].norm():
        # They were one matrix, rounded twice: the one in more bits serves for both.
        num_bytes = {packed.name: packed.n_bytes for packed in tensors}
        if num_bytes["output.weight"] > num_bytes["token_embd.weight"]:
            weights[EMBEDDING] = weights[HEAD]
        del weights[HEAD]
    return weights


def check(file: Path, config: dict, weights: dict[str, Tensor]) -> None:
    """Raise an error if the weights are not those of the model in `config`."""
    if config["num_hidden_layers"] > len(weights):  # a damaged number would fill the memory
        raise ValueError(f"{config['num_hidden_layers']} layers in {len(weights)} tensors")
    with torch.device("meta"):
        expected = Qwen2(Config(**parse_config(config, Config))).state_dict()
    if config["model_type"] == "llama":
        expected = {name: weight for name, weight in expected.items() if "bias" not in name}
    check_shapes(file, expected=expected, found=weights)


def unpack(file: Path, directory: Path) -> None:
    """Write a checkpoint with the weights, the tokenizer and the chat template of a GGUF file."""
    require("gguf", "--no-deps gguf")
    from gguf import GGUFReader

    with (
        failure_as(f"{file}: damaged, or not of a Llama like SmolLM2 or a Qwen2"),
        tempfile.TemporaryDirectory(prefix=f"{file.name}-") as folder,
    ):
        content = GGUFReader(file)
        fields = {name: field.contents() for name, field in content.fields.items()}
        config = read_config(fields)
        weights = read_weights(content.tensors, config)
        config["tie_word_embeddings"] = HEAD not in weights
        check(file, config, weights)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # transformers: take tokenizer.json as is
            "eos_token": fields["tokenizer.ggml.tokens"][config["eos_token_id"][0]],
            "chat_template": fields.get("tokenizer.chat_template"),
        }
        read_tokenizer(fields).save(f"{folder}/tokenizer.json")
        write_json(Path(folder) / "tokenizer_config.json", settings)
        chat = Chat(Path(folder))
    save(directory, config, chat, weights)


def main() -> None:
    parser = Parser("Write a GGUF file of a Llama or Qwen2 as an ordinary checkpoint.")
    parser.add_argument("file", metavar="FILE", type=Path, help="a GGUF file")
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="the directory to write")
    args = parser.parse_args()
    exit_on_sigterm()
    if args.directory.exists() and any(args.directory.iterdir()):
        raise UserError(f"{args.directory}: is not empty; choose another directory")
    unpack(args.file, args.directory)


if __name__ == "__main__":
    run_main(main)
