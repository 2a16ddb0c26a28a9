"""A GGUF file (llama.cpp's format, often in 4 bits) of a Llama or Qwen2 as an ordinary checkpoint.

    pip install --no-deps gguf
    python -m apps.from_gguf FILE DIRECTORY

The weights in such a file have no checksum: a damaged number among them is not noticed.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from torch import Tensor
from tqdm import tqdm

from model import Qwen2, parse_config
from plumbing.arguments import Parser
from plumbing.chat import Chat
from plumbing.errors import UserError, failure_as, require, run_main
from plumbing.files import check_shapes, save, write_json
from plumbing.signals import exit_on_sigterm

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = (  # how Qwen2 cuts a text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config_of(fields: dict) -> dict:
    """config.json, except for `tie_word_embeddings`, which only the tensors tell."""
    family = fields["general.architecture"]
    rules = fields["tokenizer.ggml.pre"]
    if (family, rules) not in (("llama", "smollm"), ("qwen2", "qwen2")):
        raise ValueError(f"a {family} with the tokenizer of {rules}")
    if f"{family}.rope.scaling.type" in fields:
        raise ValueError("scaled rotary angles are not supported")
    tokens = fields["tokenizer.ggml.tokens"]
    ends = [fields["tokenizer.ggml.eos_token_id"]]
    if family == "qwen2":  # its own generation_config.json has this one as well
        ends.append(tokens.index("<|endoftext|>"))
    return {
        "model_type": family,
        "vocab_size": len(tokens),
        "hidden_size": fields[f"{family}.embedding_length"],
        "intermediate_size": fields[f"{family}.feed_forward_length"],
        "num_hidden_layers": fields[f"{family}.block_count"],
        "num_attention_heads": fields[f"{family}.attention.head_count"],
        "num_key_value_heads": fields[f"{family}.attention.head_count_kv"],
        "max_position_embeddings": fields[f"{family}.context_length"],
        "rope_theta": fields[f"{family}.rope.freq_base"],
        "rms_norm_eps": round(fields[f"{family}.attention.layer_norm_rms_epsilon"], 9),  # float32
        "eos_token_id": ends,
    }


def tokenizer_of(fields: dict) -> Tokenizer:
    """Byte-level BPE, after SmolLM2's or Qwen2's rules of what a word is."""
    ids = {}
    added = []
    types = fields["tokenizer.ggml.token_type"]
    for id, (token, kind) in enumerate(zip(fields["tokenizer.ggml.tokens"], types)):
        if kind == UNUSED:  # the name of a row of padding: <|mask|> gets the first of these
            continue
        ids[token] = id
        if kind in (CONTROL, USER_DEFINED):
            added.append(AddedToken(token, normalized=False, special=kind == CONTROL))
    if len(ids) != max(ids.values()) + 1:
        raise ValueError("the vocabulary has a token twice, or gaps")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        words = Split(Regex(WORDS), "isolated")
        to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        words = Digits(individual_digits=True)
        to_bytes = ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer


def chat_of(fields: dict, folder: Path) -> Chat:
    """The tokenizer and the chat template, by way of a checkpoint's files in `folder`."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers: take tokenizer.json as is
        "eos_token": fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)
    return Chat(folder)


def empty_weights(config: dict, num_tensors: int) -> dict[str, Tensor]:
    """The weights of a model with this config and a head of its own, without numbers."""
    if config["num_hidden_layers"] > num_tensors:  # a damaged number would fill the memory
        raise ValueError(f"{config['num_hidden_layers']} layers in {num_tensors} tensors")
    with torch.device("meta"):
        weights = Qwen2(parse_config(config)).state_dict()
    if config["model_type"] == "llama":
        weights = {name: weight for name, weight in weights.items() if "bias" not in name}
    return weights


def weights_of(tensors: list, config: dict, names: Iterable[str]) -> dict[str, Tensor]:
    """All weights in bfloat16, by their names in a checkpoint; tensors: a GGUFReader's."""
    import gguf

    family = gguf.MODEL_ARCH[config["model_type"].upper()]
    gguf_names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    own_names = {gguf_names.get_name(name, (".weight", ".bias")): name for name in names}
    weights = {}
    for tensor in tqdm(tensors, "unpacking", leave=False, disable=None):
        name = own_names[tensor.name]
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(numbers.copy())
        if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp puts the two numbers that are rotated side by side: not so in a Qwen2.
            head_dim = config["hidden_size"] // config["num_attention_heads"]
            pairs = weight.unflatten(0, (-1, head_dim // 2, 2))  # (heads, head_dim / 2, 2, D)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.bfloat16()
    return weights


def tie_head(weights: dict[str, Tensor], tensors: list) -> None:
    """Remove a head that is the embedding, rounded otherwise; keep the one that has more bits."""
    difference = weights[HEAD] - weights[EMBEDDING]
    if difference.norm() < 0.5 * weights[HEAD].norm():
        num_bytes = {tensor.name: tensor.n_bytes for tensor in tensors}
        if num_bytes["output.weight"] > num_bytes["token_embd.weight"]:
            weights[EMBEDDING] = weights[HEAD]
        del weights[HEAD]


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
        config = config_of(fields)
        expected = empty_weights(config, len(content.tensors))
        weights = weights_of(content.tensors, config, expected)
        if HEAD in weights:
            tie_head(weights, content.tensors)
        config["tie_word_embeddings"] = HEAD not in weights
        if config["tie_word_embeddings"]:
            del expected[HEAD]
        check_shapes(file, expected=expected, found=weights)
        chat = chat_of(fields, Path(folder))
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
