"""What the tests share: how many random cases, and tiny models that accept several tokens."""

import os
import random
from pathlib import Path

import torch

from model import Config, Qwen2, initialize
from train import Batch, collate

ROOT = Path(__file__).parent.parent
THOROUGH = os.environ.get("MARS_THOROUGH") == "1"


def cases(few: int, many: int) -> range:
    """Seeds of random cases: a few by default, many with MARS_THOROUGH=1."""
    return range(many if THOROUGH else few)


def tiny_config(rng: random.Random, vocab_size: int = 8) -> Config:
    """A random shape. With 8 words, end (0) and mask (1) among them, low taus accept a lot."""
    kv_heads, groups, head_dim = rng.randint(1, 2), rng.randint(1, 2), rng.choice([4, 8])
    return Config(
        vocab_size=vocab_size,
        hidden_size=kv_heads * groups * head_dim,
        intermediate_size=rng.choice([16, 24]),
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        rope_theta=rng.choice([100.0, 10000.0]),
        tie_word_embeddings=rng.random() < 0.5,
        initializer_range=0.5,
        eos_token_id=(0,),
        mask_token_id=1,
    )


def tiny_model(rng: random.Random, vocab_size: int = 8) -> Qwen2:
    """Random weights in float64, where rounding can neither fake nor hide a difference."""
    model = initialize(tiny_config(rng, vocab_size), seed=rng.randrange(10**6)).double()
    with torch.no_grad():  # norms and biases that are not 1 and 0, or a missing one would not show
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def random_prompt(rng: random.Random, length: int, vocab_size: int = 8) -> list[int]:
    return [rng.randrange(2, vocab_size) for _ in range(length)]


def unpacked(layouts: list[Batch]) -> Batch:
    """A row for each example."""
    return collate([[layout] for layout in layouts], max(len(layout.tokens) for layout in layouts))
