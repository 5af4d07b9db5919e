"""Limits that type hints carry: what they refuse, by name, and that they combine with others."""

import doctest
import importlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pytest
import torch
from torch import Tensor

from biascope.support.errors import InputError
from biascope.support.limits import (
    Count,
    CountOrZero,
    Finite,
    FiniteTensor,
    FloatTensor,
    Images,
    Matrix,
    NonNegative,
    Positive,
    Share,
    Vector,
    shaped,
)
from biascope.support.signatures import checked

NAN, INF = float("nan"), float("inf")


@checked
def numbers(
    n: Count = 1,
    k: CountOrZero = 0,
    a: Finite = 0.0,
    b: Positive = 1.0,
    c: NonNegative = 0.0,
    share: Share = 0.5,
    widths: Sequence[Count] = (),
    rate: Positive | None = None,
    help_text: Annotated[float, "some words"] = 1.0,
) -> tuple[object, ...]:
    return n, k, a, b, c, share, widths, rate, help_text


@checked
def tensors(
    v: Vector | None = None,
    m: Matrix | None = None,
    x: Images | None = None,
    f: FloatTensor | None = None,
    finite: FiniteTensor | None = None,
    both: Annotated[Tensor, shaped(1, 2, floating=True)] | None = None,
) -> Tensor | None:
    return v


def test_what_is_meant_passes_and_numpy_becomes_python() -> None:
    found = numbers(np.int64(3), np.int64(0), np.float64(-1.5), 2, 0, 1.0, [1, np.int64(2)], 0.5)
    assert found == (3, 0, -1.5, 2.0, 0.0, 1.0, (1, 2), 0.5, 1.0)
    assert type(found[0]) is int
    vector = torch.arange(3)
    assert tensors(vector, torch.zeros(2, 2), torch.zeros(1, 1, 2, 2), torch.zeros(0), vector, torch.ones(2)) is vector


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": 2.0}, "n must be an integer, not 2.0"),
        ({"k": -1}, "k must be at least 0, not -1"),
        ({"a": INF}, "a=inf: a finite number is needed"),
        ({"b": 0.0}, "b=0.0: a finite number above 0 is needed"),
        ({"c": -1}, "c=-1: a finite number from 0 on is needed"),
        ({"c": NAN}, "c=nan"),
        ({"share": 1.5}, "share=1.5: a number from 0 to 1 is needed"),
        ({"share": NAN}, "share=nan"),
        ({"widths": (4, 0)}, r"widths\[1\] must be at least 1, not 0"),
        ({"widths": 4}, "widths=4: a sequence of integers is needed"),
        ({"rate": -0.5}, "rate=-0.5: a finite number above 0 is needed"),
        ({"help_text": "x"}, "help_text='x': one number is needed"),
    ],
)
def test_numbers_beyond_their_limits_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        numbers(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"v": torch.zeros(2, 2)}, r"v has shape \[2, 2\]: a tensor of 1 dimension"),
        ({"v": "1.0"}, "v: expected a tensor, got str"),
        ({"v": torch.zeros(2, dtype=torch.complex64)}, "v is complex"),
        ({"m": torch.zeros(2)}, "m has shape .* 2 dimension"),
        ({"x": torch.zeros(2, 2)}, "x has shape .* 4 dimension"),
        ({"f": torch.arange(3)}, r"f is torch\.int64: real floating-point"),
        ({"finite": torch.tensor([1.0, NAN])}, "finite has a NaN or infinity, first in example 1"),
        ({"finite": torch.zeros(0, 2)}, "finite is empty"),
        ({"both": torch.zeros(1, 1, 1)}, "1 or 2 dimension"),
    ],
)
def test_tensors_beyond_their_limits_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tensors(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["estimate"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"biascope.support.{name}"))
    assert result.attempted
    assert not result.failed
