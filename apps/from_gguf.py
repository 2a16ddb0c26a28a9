"""A GGUF file (llama.cpp's format, often in 4 bits) of a Llama or Qwen2 as an ordinary checkpoint.

    pip install -r apps/requirements.txt
    python -m apps.from_gguf FILE DIRECTORY

transformers reads the file. It leaves out a rule of each tokenizer: they are put back here.
The weights in such a file have no checksum: a damaged number among them is not noticed.
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, normalizers
from tokenizers.pre_tokenizers import Digits, Sequence
from torch import Tensor

from model import parse_config
from plumbing.arguments import Parser, new_model
from plumbing.chat import Chat
from plumbing.errors import exit_on_sigterm, failure_as, require, run_main
from plumbing.files import save, write_json
from plumbing.terminal import decode_command, note

UNUSED = 5  # a type of token: the name of a row of padding
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_fields(file: Path) -> dict:
    """What the file says besides its tensors; ValueError for a model that we would read wrongly."""
    from gguf import GGUFReader

    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    family = fields["general.architecture"]
    rules = fields["tokenizer.ggml.pre"]
    if (family, rules) not in (("llama", "smollm"), ("qwen2", "qwen2")):
        raise ValueError(f"a {family} with the tokenizer of {rules}")
    if f"{family}.rope.scaling.type" in fields:
        raise ValueError("scaled rotary angles are not supported")
    return fields


def read_chat(file: Path, fields: dict) -> Chat:
    """The tokenizer and the chat template."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    content = json.loads(theirs.backend_tokenizer.to_str())
    kinds = fields["tokenizer.ggml.token_type"]
    ids = content["model"]["vocab"]
    # Without the rows of padding, the first of them is free for <|mask|>.
    content["model"]["vocab"] = {token: id for token, id in ids.items() if kinds[id] != UNUSED}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    else:
        digits = Digits(individual_digits=True)
        tokenizer.pre_tokenizer = Sequence([digits, tokenizer.pre_tokenizer])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers: take tokenizer.json as is
        "eos_token": theirs.eos_token,
        "chat_template": theirs.chat_template,
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        write_json(Path(folder, "tokenizer_config.json"), settings)
        return Chat(Path(folder))


def read_model(file: Path, fields: dict) -> tuple[dict, dict[str, Tensor]]:
    """The content of config.json, and the weights in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model, report = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if report["missing_keys"]:  # transformers has filled these with random numbers
        raise ValueError(f"has no tensor for {min(report['missing_keys'])}")
    weights = model.state_dict()
    # A head that is the embedding, rounded otherwise, has more bits: it is taken for both.
    difference = weights[HEAD] - weights[EMBEDDING]
    is_tied = bool(difference.norm() < 0.5 * weights[HEAD].norm())
    if is_tied:
        weights[EMBEDDING] = weights.pop(HEAD)
    raw = model.config.to_dict()
    raw["tie_word_embeddings"] = is_tied
    raw["rms_norm_eps"] = round(raw["rms_norm_eps"], 9)  # the file has it in float32
    raw["eos_token_id"] = [raw["eos_token_id"]]
    if raw["model_type"] == "qwen2":  # its own generation_config.json has this one as well
        raw["eos_token_id"].append(fields["tokenizer.ggml.tokens"].index("<|endoftext|>"))
    config = parse_config(raw).to_json()
    config["model_type"] = raw["model_type"]  # a Llama has no biases, as a Qwen2 would
    config["architectures"] = [type(model).__name__]
    return config, weights


def unpack(file: Path, directory: Path) -> None:
    """Write a checkpoint with the weights, the tokenizer and the chat template of a GGUF file."""
    require("gguf", "-r apps/requirements.txt")
    with (
        failure_as(f"{file}: missing, damaged, or not of a Llama like SmolLM2 or a Qwen2"),
        contextlib.redirect_stderr(io.StringIO()),  # transformers' progress bars
    ):
        fields = read_fields(file)
        chat = read_chat(file, fields)
        config, weights = read_model(file, fields)
    save(directory, config, chat, weights)


def main() -> None:
    parser = Parser("Write a GGUF file of a Llama or Qwen2 as an ordinary checkpoint.")
    parser.add_argument("file", metavar="FILE", type=Path, help="a GGUF file")
    parser.add_argument("directory", metavar="DIRECTORY", type=new_model, help="the one to write")
    args = parser.parse_args()
    exit_on_sigterm()
    unpack(args.file, args.directory)
    note(decode_command(args.directory))


if __name__ == "__main__":
    run_main(main)
