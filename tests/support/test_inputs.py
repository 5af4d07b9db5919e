"""Shapes of one input, as people say them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.reports import make_card
from biascope.support.errors import InputError
from biascope.support.inputs import check_shape


@pytest.mark.parametrize("shape", [(3, 4), [3, 4], torch.zeros(2, 3, 4).shape[1:], np.array([3, 4]), range(3, 5)])
def test_any_sequence_of_whole_numbers_is_a_shape(shape: Any) -> None:
    found = check_shape(shape)
    assert found == (3, 4)
    assert all(type(extent) is int for extent in found)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        (torch.zeros(1, 4), r"x\.shape\[1:\]"),
        (4, r"pass \(4,\)"),
        ((), "whole numbers"),
        ((3, 0), "whole numbers"),
        ((3, 2.5), "whole numbers"),
        ("3,4", "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_other_things_are_refused_with_the_fix(shape: Any, fix: str) -> None:
    for call in (check_shape, lambda s: bs.nads(lambda: nn.Linear(4, 1), s, n_networks=2)):
        with pytest.raises(InputError, match=fix):
            call(shape)
    with pytest.raises(InputError, match=fix):
        bs.average_geometry(lambda: nn.Linear(4, 1), shape, n_networks=2)
    if shape is not None:
        with pytest.raises(InputError, match=fix):
            make_card("lenet", input_shape=shape)
