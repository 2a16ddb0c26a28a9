"""config.json of transformers 4 or 5, to and from the fields of model.Config; what is refused."""

import math
from dataclasses import asdict, fields
from pathlib import Path

from .chat import Chat
from .errors import UserError
from .files import read_json

MODEL_TYPES = {  # in config.json: what the model becomes here
    "qwen2": "qwen2",
    "a2d-qwen2": "qwen2",  # the MARS paper's
    "qwen3": "qwen3",
    "llama": "qwen2",  # one whose biases are zero: model.load_model adds these
}


def read_config(directory: Path, kind: type) -> object:
    """A model.Config (`kind`) from config.json; UserError for settings that are not supported."""
    path = directory / "config.json"
    raw = read_json(path)
    generation = directory / "generation_config.json"
    if generation.exists():  # it lists all end-of-turn tokens, config.json often only one
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    try:
        if raw.get("eos_token_id") is None:  # transformers writes it only if it was told
            chat = Chat(directory)
            raw["eos_token_id"] = chat.tokenizer.token_to_id(chat.special.get("eos_token", ""))
        return kind(**parse_config(raw, kind))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None


def parse_config(raw: dict, kind: type) -> dict:
    """The fields of `kind` from the JSON object `raw`; ValueError for unsupported values."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    require("model_type", raw.get("model_type"), *MODEL_TYPES)
    if raw["model_type"] in ("llama", "qwen3"):
        require("attention_bias", raw.get("attention_bias") or False, False)
        require("mlp_bias", raw.get("mlp_bias") or False, False)
    require("hidden_act", raw.get("hidden_act", "silu"), "silu")
    require("rope_type", rope.get("rope_type", rope.get("type", "default")), "default")
    require("sliding-window attention", raw.get("use_sliding_window") or False, False)

    raw = raw | {"model_type": MODEL_TYPES[raw["model_type"]]}
    if "rope_theta" in rope:  # where transformers 5 writes it
        raw["rope_theta"] = rope["rope_theta"]
    eos = raw.get("eos_token_id")
    if not isinstance(eos, list):
        eos = [eos]
    raw["eos_token_id"] = tuple(eos)
    return {f.name: raw[f.name] for f in fields(kind) if raw.get(f.name) is not None}


def require(name: str, value: object, *supported: object) -> None:
    if value not in supported:
        alternatives = " or ".join(map(str, supported))
        raise ValueError(f"{name} {value!r} is not supported, only {alternatives}")


def check_config(config) -> None:
    """Raise ValueError for values of a model.Config that are impossible."""
    for field in fields(config):
        value = getattr(config, field.name)
        is_number = field.type in (int, float, int | None) and field.name != "mask_token_id"
        kinds, what = [int], "whole number"
        if field.type is float:
            kinds, what = [int, float], "number"
        is_right = type(value) in kinds and 0 < value < math.inf
        if is_number and value is not None and not is_right:
            raise ValueError(f"{field.name} {value!r}: must be a {what} above 0")
    head_dim = config.head_dim or config.hidden_size / config.num_attention_heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim:g}: must be even")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    ends = config.eos_token_id
    if not ends or not all(type(id) is int and 0 <= id < config.vocab_size for id in ends):
        raise ValueError(f"eos_token_id {list(ends)}: no tokens that could end a turn")


def config_json(config) -> dict:
    """The content of config.json of a model.Config, for transformers and for `read_config`."""
    known = {key: value for key, value in asdict(config).items() if value is not None}
    family = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return known | {
        "architectures": [family[config.model_type]],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
