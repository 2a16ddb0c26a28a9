"""Options that are built in Python: the rules of the command line hold for them, too."""

import contextlib
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from common import endless_model

from decode import Decoder, Options
from plumbing.arguments import check_options, option
from plumbing.errors import UserError


@dataclass
class Reader:
    """What a reader of docs/change-it.md may add."""

    penalty: float = option(0.0, "a number with a range", least=0, below=2)
    order: str = option("first", "one of several words", choices=("first", "last"))
    limit: int | None = option(None, "nothing, or a number", kind=int, least=1)


def test_options_that_are_accepted():
    check_options(Reader())
    check_options(Reader(penalty=1.9, order="last", limit=1))


@pytest.mark.parametrize(
    "options, message",
    [
        (Reader(penalty=-1), "penalty -1: must be at least 0, not -1"),
        (Reader(penalty=2), "penalty 2: must be below 2, not 2"),
        (Reader(penalty=float("nan")), "penalty nan: must be at least 0, not nan"),
        (Reader(penalty="1"), "penalty '1': must be a number"),
        (Reader(limit=0), "limit 0: must be at least 1"),
        (Reader(limit=1.5), "limit 1.5: must be a whole number"),
        (Reader(order="nonsense"), "order 'nonsense': must be one of first, last"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_options(options)


NUMBERS = [np.uint16(3), np.int8(100), np.float16(1), Fraction(1), Fraction(1, 2), 2**64]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("field", ["temperature", "max_new", "seed", "block", "groups"])
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_what_passes_the_checks_is_decoded(field, number):
    """A number that fails only in a forward, as numpy's small ones did, would stop all rows."""
    options = {"max_new": 10, "temperature": 0.5, field: number}
    added = []
    with contextlib.suppress(UserError):
        decoder = Decoder(endless_model(), Options(**options), rows=2, longest=210)
        added.append(decoder.add([2] * 105))
        for request in ({"prompt": [number]}, {"tau": number}, {"max_new": number}):
            with contextlib.suppress(UserError):
                added.append(decoder.add(**{"prompt": [3] * 105} | request))
        list(decoder)
    assert all(each.error is None and len(each.tokens) == each.max_new for each in added)
