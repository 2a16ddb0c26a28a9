"""Options that are built in Python: the rules of the command line hold for them, too."""

from math import inf, nan

import numpy as np
import pytest
from common import endless_model

from decode import Decoder, Options, generate
from plumbing.errors import UserError


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": nan}, "tau: expected float from 0 to 1, not nan"),
        ({"tau": "0.7"}, "tau: expected float from 0 to 1, not '0.7'"),
        ({"tau": inf, "metric": "entropy"}, "tau: expected float from 0 to 100, not inf"),
        ({"block": 1000}, "block: expected int from 1 to 999, not 1000"),
        ({"block": 2.5}, "block: expected int from 1 to 999, not 2.5"),
        ({"block_cache": 0, "tau": 0.9}, "block_cache: expected int from 1 "),
        ({"max_new": None}, "max_new: expected int from 1 "),
        ({"temperature": inf}, "temperature: expected float from 0 "),
        ({"seed": 2**70}, "seed: expected int from 0 "),
        ({"metric": None}, "metric: must be one of probability, margin, entropy"),
        ({"rows": 0}, "rows 0: must be at least 1"),
        ({"metric": "entropy"}, "need a --tau"),
        ({"block_cache": 4}, "need a --tau"),
        ({"guard": True}, "need a --tau"),
    ],
)
def test_options_that_cannot_run(options, message):
    with pytest.raises(UserError, match=message):
        generate(endless_model(), [[2, 3]], **options)


@pytest.mark.parametrize("number", [np.uint16(3), np.int8(3)])
def test_ids_of_kinds_of_numpy_are_a_prompt(number):
    decoder = Decoder(endless_model(), Options(tau=0.5, max_new=10), rows=2, longest=40)
    ours = decoder.add([3] * 20)
    theirs = decoder.add([number] * 20)
    list(decoder)
    assert theirs.tokens == ours.tokens
