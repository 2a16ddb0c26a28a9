"""What a run will do and what it will hold in memory, said before its first step."""

import argparse
import math

import torch

from .processes import say

PYTHON_AND_TORCH = 0.4e9  # bytes of memory, before a model is loaded
LOGITS_AT_A_TIME = 2**26  # model.LOGITS_AT_A_TIME


def batch_tokens(device: torch.device) -> int:
    """Positions of a forward. On a CPU more are no faster; each takes 1.5 MB in SmolLM2-135M."""
    return 1024 if device.type == "cpu" else 4096


def say_steps(args: argparse.Namespace, data, recipe) -> None:
    """Print the rows and steps of a run; and what is too little to learn from.

    data: a `Dataset`; recipe: train.py's `Recipe`.
    """
    rows = f"{len(data.rows)} rows, {len(data.held_out)} held out"
    num_skipped = data.skipped.total() + data.unusable.total()
    if num_skipped:
        num_read = len(data.held_out) + len(data.first) + num_skipped
        rows += f", {num_skipped} of the first {num_read} skipped"
    tokens = sum(len(example.tokens) for example in data.first) / len(data.first)
    size = f"{recipe.batch} examples, about {recipe.batch * tokens:,.0f} tokens"
    say(f"{rows}; {recipe.steps} steps of {size}")

    if recipe.batch < args.batch:
        say(f"a step has {recipe.batch} examples, not {args.batch}: there are no more to train on")
    if not data.held_out:
        say("fewer than ten rows: none is held out to measure look-ahead on")
    elif len(data.held_out) < 10:
        say("fewer than ten rows held out: the look-ahead that is measured on them is rough")
    if recipe.steps < 50 and not args.steps:
        say("fewer than 50 steps: enough if all responses are alike; else give more --epochs")


def say_memory(model, data, recipe, forward_inputs, recomputes: bool) -> None:
    """Print what a run on a CPU holds at its peak, in one process.

    forward_inputs: train.py's; recomputes: --checkpoint-layers.
    """
    largest = 0
    for begin in range(0, len(data.first), recipe.batch):
        for inputs in forward_inputs(data.first[begin : begin + recipe.batch], recipe):
            largest = max(largest, forward_bytes(model, inputs, recipe.dtype, recomputes))
    fixed = 16 * sum(weight.numel() for weight in model.parameters())
    parts = f"{fixed / 1e9:.2g} weights, gradients and AdamW"
    parts += f", {largest / 1e9:.2g} the largest forward, {PYTHON_AND_TORCH / 1e9:.2g} Python"
    say(f"memory: about {(fixed + largest + PYTHON_AND_TORCH) / 1e9:.1f} GB ({parts})")


def forward_bytes(model, inputs, dtype: torch.dtype, recomputes: bool) -> float:
    """What a forward of model.py keeps for its backward pass, and the head's gradient."""
    config = model.config
    R, T = inputs.tokens.shape
    D = config.hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    # Of a position, in a layer: the dense mask's row; then q, the attention's output and k, v; then
    # gate, up, silu(gate) and their product. The norms compute in float32, and keep 7 vectors.
    narrow = T + 2 * q_size + 2 * kv_size + 4 * config.intermediate_size
    layer = R * T * (dtype.itemsize * narrow + 4 * 7 * D)
    layers = config.num_hidden_layers * layer
    if recomputes:  # of each layer the input, and one layer at a time
        layers = layer + config.num_hidden_layers * R * T * 4 * D
    if dtype == torch.bfloat16:  # of each weight a copy
        layers += 2 * sum(weight.numel() for weight in model.parameters())
    num_logits = 0
    for weight in (inputs.noisy_weight, inputs.clean_weight):
        num_logits = max(num_logits, int((weight > 0).sum()) * config.vocab_size)
    at_a_time = num_logits / max(1, math.ceil(num_logits / LOGITS_AT_A_TIME))
    return layers + 4 * (4 * at_a_time + config.vocab_size * D)
