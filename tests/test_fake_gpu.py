"""Where every tensor is: decoding and the loss on a pretended GPU, for machines without one.

Torch's fake tensors have a shape, a dtype and a device, but no numbers. An operation that mixes
devices raises, as on a GPU: most of what breaks on a first one. This measures nothing.
"""

import functools
import random
from unittest.mock import MagicMock

import pytest
import torch
from common import MASK, random_prompt, tiny_config
from torch._subclasses import fake_tensor
from training import random_example

import train
from decode import Decoder, Options, naive
from model import Qwen2

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch with CUDA in it")


def ones(tensor: torch.Tensor) -> list:
    """tensor.tolist(), of a fake one: every forward accepts one token, and it is never EOS."""
    if tensor.dim() == 0:
        return 1.0 if tensor.is_floating_point() else 1
    return [ones(part) for part in tensor]


@pytest.fixture
def gpu(monkeypatch):
    """Within it every tensor is fake, and there is a GPU."""
    torch._C._ensureCUDADeviceGuardSet()
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)  # no numbers, however few
    monkeypatch.setattr(fake_tensor.FakeTensor, "tolist", ones)
    monkeypatch.setattr(fake_tensor.FakeTensor, "__bool__", lambda tensor: True)
    monkeypatch.setattr(torch, "Generator", MagicMock())  # a GPU's needs a GPU
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # but in its shapes
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda tensor, generator: tensor)
    # How many positions have a target depends on numbers. Here one of each row has.
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda x, as_tuple: (x[:, 0].long(), 0))
    monkeypatch.setattr(train, "can_use_flex", lambda *_: False)  # it would be compiled
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=False):
        yield


def fake_model(dtype=torch.bfloat16) -> Qwen2:
    with torch.device("meta"):
        model = Qwen2(tiny_config(random.Random(3)))
    on_gpu = functools.partial(torch.empty, dtype=dtype, device="cuda")
    weights = {name: on_gpu(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model


WAYS = [{"metric": "margin", "tau": 0.5}, {"metric": "entropy", "tau": 0.2, "block_cache": 4}]
WAYS += [{}, {"tau": 0.9, "temperature": 1.0}, {"compile": True}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_decoding(way, dtype, gpu):
    with pytest.raises(RuntimeError, match="same device"):  # what these tests rely on
        torch.ones(2, device="cuda") + torch.ones(2)
    model = fake_model(dtype)
    decoder = Decoder(model, Options(max_new=9, **way), rows=2, longest=40)
    answers = [decoder.add(random_prompt(random.Random(0), length)) for length in (3, 20, 1, 30)]
    list(decoder)
    assert [len(answer.tokens) for answer in answers] == [9] * 4
    assert len(naive(model, [2, 3], tau=0.5, block=4, max_new=9)) == 9


@pytest.mark.parametrize("block", [4, None])
def test_the_loss(block, gpu):
    """Not its gradient: autograd asks for the real device."""
    model = fake_model(torch.float32)
    examples = [random_example(random.Random(seed), 4) for seed in range(3)]
    for inputs in train.forward_inputs(examples, train.Recipe(MASK, block)):
        assert sum(train.losses(model, inputs.to(model.device))).is_cuda
    assert train.naive_loss(model, [2, 3], [4, 5, 6], block=2).is_cuda
