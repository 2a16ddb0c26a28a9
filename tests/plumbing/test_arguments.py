"""Options that are built in Python: the rules of the command line hold for them, too."""

import contextlib

import numpy as np
import pytest
from common import endless_model

from decode import Decoder, Options
from plumbing.arguments import check_tau
from plumbing.errors import UserError


@pytest.mark.parametrize(
    "tau, metric, is_accepted",
    [
        (0, "probability", True),
        (1, "margin", True),
        (1.1, "probability", False),
        (3, "entropy", True),
        (-1, "entropy", False),
        (float("inf"), "entropy", False),
        ("0.7", "probability", False),
    ],
)
def test_taus(tau, metric, is_accepted):
    expected = contextlib.nullcontext() if is_accepted else pytest.raises(UserError, match="tau")
    with expected:
        check_tau(tau, metric)


@pytest.mark.parametrize("number", [np.uint16(3), np.int8(3)])
def test_ids_of_kinds_of_numpy_are_a_prompt(number):
    decoder = Decoder(endless_model(), Options(tau=0.5, max_new=10), rows=2, longest=40)
    ours = decoder.add([3] * 20)
    theirs = decoder.add([number] * 20)
    list(decoder)
    assert theirs.tokens == ours.tokens


@pytest.mark.parametrize(
    "request_", [{"prompt": [0.5]}, {"tau": np.float16(0.5)}, {"max_new": np.int8(3)}, {"tau": 2}]
)
def test_a_request_that_would_stop_all_rows_in_a_forward(request_):
    decoder = Decoder(endless_model(), Options(tau=0.5, max_new=10), rows=2, longest=40)
    with pytest.raises(UserError):
        decoder.add(**{"prompt": [3] * 20} | request_)
