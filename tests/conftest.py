"""Tests run side by side (pytest -n auto): one thread each, also in the programs they start."""

import os
import random
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from common import BASE, save_model, tiny_model
from training import write

from model import add_mask_token
from plumbing.chat import Chat

torch.set_num_threads(1)
# Programs that the tests start inherit what is ignored, as in `nohup pytest &`; they are signalled.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def checkpoint(tmp_path):
    """A tied random model, saved by us; returns its directory."""
    model = tiny_model(random.Random(0), vocab_size=640)
    chat = Chat(BASE)
    model.config.tie_word_embeddings = True
    if hasattr(model, "lm_head"):
        del model.lm_head
    add_mask_token(model, chat)
    save_model(model, chat, tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def data(tmp_path) -> Path:
    """A small file to train on: five different rows, too few to hold any out."""
    rows = [{"prompt": "?", "response": f"12 plums and {i}"} for i in range(5)]
    return write(tmp_path / "data.jsonl", rows).path


@pytest.fixture
def out(tmp_path) -> Path:
    """Where a run writes."""
    return tmp_path / "out"
