"""Hints that bound a number, and shapes that must fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch

from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, FiniteTensor, NonNegative, Positive, Share, check_shapes
from biascope.support.signatures import checked


@checked
def ask(
    n: Count = 1,
    a: Finite = 0.0,
    b: Positive = 1.0,
    c: NonNegative = 0.0,
    d: Share = 0.5,
    x: FiniteTensor | None = None,
    many: Sequence[Count] = (),
    auto: Count | Literal["auto"] = "auto",
) -> tuple[object, ...]:
    return n, a, b, c, d, many, auto


def test_what_is_in_bounds_passes() -> None:
    assert ask(np.int64(3), -2, 1e-9, 0, 1, torch.ones(2), [2, 3], 7) == (3, -2, 1e-9, 0, 1, [2, 3], 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": 1.5}, "n must be an integer"),
        ({"a": float("inf")}, "a=inf: a finite number is needed"),
        ({"b": 0.0}, "b=0.0: a finite number above 0 is needed"),
        ({"c": -1.0}, "c=-1.0: a finite number from 0 on is needed"),
        ({"d": 1.1}, "d=1.1: a number from 0 to 1 is needed"),
        ({"d": float("nan")}, "d=nan"),
        ({"x": torch.tensor([1.0, float("nan")])}, "x has a NaN or infinity, first in example 1"),
        ({"x": "1.0"}, "x: expected a tensor, got str"),
        ({"many": [1, 0]}, r"many\[1\] must be at least 1, not 0"),
        ({"auto": 0}, "auto=0: an integer from 1 on or 'auto' is needed"),
    ],
)
def test_what_is_out_of_bounds_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask(**given)  # type: ignore[arg-type]


def test_shapes() -> None:
    x, y, S = torch.ones(3, 2, 4), torch.ones(3), torch.ones(4, 4)
    check_shapes("x [n, ...], y [n]", x, y)
    check_shapes("x [..., D], S [D, D]", x, S)
    check_shapes("x [n, 2, D], S [D, D]", x, S)
    check_shapes("a [n, ...], b [m, ...]", x, torch.ones(7, 2, 4))
    check_shapes("y [n]", np.ones(3))
    for wanted, tensors, message in (
        ("x [n, ...], y [n]", (x, y[:2]), r"^x \[3, 2, 4\] and y \[2\] do not fit: x \[n, \.\.\.\], y \[n\] is"),
        ("a [n, ...], b [m, ...]", (x, torch.ones(7, 4)), "do not fit"),
        ("x [n, 3, D]", (x,), "does not fit"),
        ("x [n, D, ...]", (y,), r"x \[3\] does not fit"),
    ):
        with pytest.raises(InputError, match=message):
            check_shapes(wanted, *tensors)
