"""What the tests share: how many random cases, tiny models that accept several tokens, toy/mars."""

import json
import os
import random
from pathlib import Path

import torch

from model import Config, Qwen2, initialize
from plumbing.chat import Chat
from plumbing.files import save
from train import Streams, join

ROOT = Path(__file__).parent.parent
BASE = ROOT / "toy/base"  # a config and a tokenizer without weights
THOROUGH = os.environ.get("MARS_THOROUGH") == "1"
EOS = 0  # of the tiny models
MASK = 1


def cases(few: int, many: int) -> range:
    """Seeds of random cases: a few by default, many with MARS_THOROUGH=1."""
    return range(many if THOROUGH else few)


def tiny_config(rng: random.Random, vocab_size: int = 8) -> Config:
    """A random shape. With 8 tokens, EOS and MASK among them, a low tau accepts many."""
    kv_heads = rng.randint(1, 2)
    group = rng.randint(1, 2)  # query heads that share a key head
    head_dim = rng.choice([4, 8])
    return Config(
        vocab_size=vocab_size,
        hidden_size=kv_heads * group * head_dim,
        intermediate_size=rng.choice([16, 24]),
        num_hidden_layers=rng.randint(1, 3),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        rope_theta=rng.choice([100.0, 10000.0]),
        tie_word_embeddings=rng.random() < 0.5,
        initializer_range=0.5,
        eos_token_id=(EOS,),
        mask_token_id=MASK,
    )


def tiny_model(rng: random.Random, vocab_size: int = 8) -> Qwen2:
    """Random weights in float64, where rounding can neither cause nor hide a difference."""
    model = initialize(tiny_config(rng, vocab_size), seed=rng.randrange(10**6)).double()
    with torch.no_grad():  # a norm of 1 or a bias of 0 would hide that it is not applied
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def endless_model(rng: random.Random | None = None) -> Qwen2:
    """A tiny model whose answers end at max_new only: its end of turn is the mask."""
    model = tiny_model(rng or random.Random(3))
    model.config.eos_token_id = (MASK,)
    return model


def random_prompt(rng: random.Random, length: int, vocab_size: int = 8) -> list[int]:
    """Tokens that are neither EOS nor MASK."""
    return [rng.randrange(2, vocab_size) for _ in range(length)]


def prompt_length(rng: random.Random) -> int:
    """Attention spans multiples of 64, so these lengths are at one, next to one, and anywhere."""
    return rng.choice([1, 2, 63, 64, 65, rng.randint(3, 90)])


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def toy_prompts(chat: Chat) -> list[list[int]]:
    """The problems of toy/test.jsonl as token ids."""
    prompts = []
    for row in rows_of(ROOT / "toy/test.jsonl"):
        turn = {"role": "user", "content": row["prompt"]}
        prompts.append(chat.encode_prompt([turn]))
    return prompts


def copy_tokenizer(target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((BASE / name).read_bytes())


def save_model(model: Qwen2, chat: Chat, directory: Path, dtype=torch.bfloat16) -> None:
    save(directory, model.config.to_json(), chat, model.state_dict(), dtype)


def unpacked(examples: list[Streams]) -> Streams:
    """A row for each example."""
    width = max(len(streams.tokens) for streams in examples)
    return join(examples, [[i] for i in range(len(examples))], width)
