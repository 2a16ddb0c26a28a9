"""Options that are built in Python: the rules of the command line hold for them, too."""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
from common import endless_model

from decode import Decoder, Options
from plumbing.arguments import check_options, check_tau, option
from plumbing.errors import UserError


@dataclass
class Reader:
    """What a reader of docs/change-it.md may add."""

    penalty: float = option(0.0, "a number with a range", least=0, below=2)
    order: str = option("first", "one of several words", choices=("first", "last"))
    limit: int | None = option(None, "nothing, or a number", kind=int, least=1)


@pytest.mark.parametrize(
    "options, message",
    [
        (Reader(penalty=-1), "penalty: must be at least 0, not -1"),
        (Reader(penalty=2), "penalty: must be below 2, not 2"),
        (Reader(penalty=float("nan")), "penalty: must be a number, not nan"),
        (Reader(limit=0), "limit: must be at least 1"),
        (Reader(order="nonsense"), "order: must be one of first, last, not 'nonsense'"),
    ],
)
def test_options_that_are_refused(options, message):
    check_options(Reader(penalty=1.9, order="last", limit=1))  # in their ranges
    with pytest.raises(UserError, match=message):
        check_options(options)


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
