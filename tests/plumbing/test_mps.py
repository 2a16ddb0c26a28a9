"""An Apple GPU whose attention is wrong is refused; a stand-in, since no test has one."""

import functools
import re

import pytest
import torch

import model
from model import attend, load_model
from plumbing.errors import UserError


def exact(q, k, v, mask):
    """Right but for rounding."""
    return attend(q.double(), k.double(), v.double(), mask).to(q.dtype)


def few_queries(q, k, v, mask):
    return attend(q, k, v, mask if q.size(-2) > 8 else mask[:1])


def many_queries(q, k, v, mask):
    return attend(q, k, v, mask[:1] if q.size(-2) > 8 else mask)


def not_a_number(q, k, v, mask):
    return attend(q, k, v, mask) * float("nan")


WRONG = [few_queries, many_queries, not_a_number]


@pytest.fixture
def pretend(monkeypatch):
    """Call it with a kernel: the attention of an mps that this machine then seems to have."""

    def begin(kernel):
        def available_device(name):
            return torch.device("cpu" if name == "cpu" else "mps")

        def stand_in(directory, device, dtype=torch.float32):
            made = load_model(directory, "cpu", dtype)
            if device != "cpu":
                made.forward = functools.partial(made.forward, kernel=kernel)
            return made

        monkeypatch.setattr(model, "available_device", available_device)
        monkeypatch.setattr(model, "load_model", stand_in)

    return begin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_attention_is_refused(dtype, checkpoint, pretend):
    """In some versions of torch it was wrong in silence, and so was every answer."""
    for name in (str(checkpoint), None):
        pretend(exact)
        model.load(name, "mps", dtype)
        for kernel in WRONG:
            pretend(kernel)
            model.load(name, "cpu", dtype)
            message = re.escape(f"torch {torch.__version__} computes other logits on mps")
            with pytest.raises(UserError, match=message):
                model.load(name, "auto", dtype)
