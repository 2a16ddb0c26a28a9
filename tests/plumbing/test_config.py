"""config.json: numbers that no model has are one line, at once."""

import json

import pytest
from commands import command, is_refused
from common import ROOT

BASE = json.loads((ROOT / "toy/base/config.json").read_text())


def decode(directory):
    return command("decode", "--model", directory, "--prompt", "Hi")


@pytest.mark.parametrize(
    "changes, message",
    [
        # Ran for 40 seconds and more:
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: must be a whole number from"),
        # Tracebacks: "Storage size calculation overflowed", "int too large to convert to float".
        ({"hidden_size": 10**18}, "hidden_size 1000000000000000000: must be a whole number from 1"),
        ({"vocab_size": 10**400}, "vocab_size 1000000"),
        ({"rope_theta": 10**400}, "rope_theta 1000000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps inf: must be a number above 0"),
        ({"max_position_embeddings": 2**60}, "max_position_embeddings 1152921504606846976"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_attention_heads": True}, "num_attention_heads True"),
        ({"block": -1}, "block -1"),
        ({"head_dim": 3}, "head_dim 3: must be even"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no': must be true or false"),
        ({"model_type": "x" * 999}, "is not supported, only qwen2 or"),
    ],
)
def test_numbers_that_no_model_has(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    done = decode(tmp_path)
    assert is_refused(done, message) and len(done.err) < 400


@pytest.mark.parametrize("ends", [[], "2", [2, -1], [99999], True])
def test_a_bad_end_of_turn_is_reported_where_it_is(tmp_path, ends):
    """It stood in generation_config.json, and the message named config.json."""
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    message = f"{tmp_path}/generation_config.json: eos_token_id"
    assert is_refused(decode(tmp_path), message)
