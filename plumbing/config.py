"""config.json of transformers 4 or 5, to and from the fields of model.Config; what is refused."""

from dataclasses import asdict, fields
from math import inf
from pathlib import Path
from typing import TypeVar

from .errors import UserError
from .files import read_json

MODEL_TYPES = {  # in config.json: what the model becomes here
    "qwen2": "qwen2",
    "a2d-qwen2": "qwen2",  # the MARS paper's
    "qwen3": "qwen3",
    "llama": "qwen2",  # one whose biases are zero: model.load_model adds these
}

Config = TypeVar("Config")  # model.Config: model.py imports this file, so it passes the class on


def read_config(directory: Path, kind: type[Config]) -> Config:
    """The configuration in config.json; UserError for settings that are not supported."""
    path = directory / "config.json"
    raw = read_json(path)
    generation = directory / "generation_config.json"
    if generation.exists():  # it lists all end-of-turn tokens, config.json often only one
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    try:
        return kind(**parse_config(raw, kind))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None


def parse_config(raw: dict, kind: type[Config]) -> dict:
    """The fields of `kind` from the JSON object `raw`; ValueError for unsupported values."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    check_supported("model_type", raw.get("model_type"), *MODEL_TYPES)
    if raw["model_type"] in ("llama", "qwen3"):
        check_supported("attention_bias", raw.get("attention_bias") or False, False)
        check_supported("mlp_bias", raw.get("mlp_bias") or False, False)
    check_supported("hidden_act", raw.get("hidden_act", "silu"), "silu")
    check_supported("rope_type", rope.get("rope_type", rope.get("type", "default")), "default")
    check_supported("sliding-window attention", raw.get("use_sliding_window") or False, False)

    eos = raw.get("eos_token_id")
    found = raw | {"model_type": MODEL_TYPES[raw["model_type"]]}
    found["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
    if "rope_theta" in rope:  # where transformers 5 writes it
        found["rope_theta"] = rope["rope_theta"]
    return {f.name: found[f.name] for f in fields(kind) if found.get(f.name) is not None}


def check_supported(name: str, value: object, *supported: object) -> None:
    if value not in supported:
        alternatives = " or ".join(map(str, supported))
        raise ValueError(f"{name} {value!r} is not supported, only {alternatives}")


def check_config(config: Config) -> None:
    """Raise ValueError for values that are impossible."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type == int | None and value is None:
            continue
        if field.type in (int, int | None) and not (type(value) is int and value > 0):
            raise ValueError(f"{field.name} {value!r}: must be a whole number above 0")
        if field.type is float and not (type(value) in (int, float) and 0 < value < inf):
            raise ValueError(f"{field.name} {value!r}: must be a number above 0")
    if config.block and config.block >= 1000:  # as on the command lines
        raise ValueError(f"block {config.block}: must be below 1000")
    head_dim = config.head_dim or config.hidden_size / config.num_attention_heads
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim:g}: must be even")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    ends = config.eos_token_id
    if not ends or not all(type(id) is int and 0 <= id < config.vocab_size for id in ends):
        raise ValueError(f"eos_token_id {list(ends)}: no tokens that could end a turn")


def config_json(config: Config) -> dict:
    """The content of config.json, for transformers and for `read_config`."""
    known = {key: value for key, value in asdict(config).items() if value is not None}
    family = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return known | {
        "architectures": [family[config.model_type]],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
