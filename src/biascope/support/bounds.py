"""Type hints that say more than a type, for functions under `@checked`, and shapes that must fit together."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from biascope.support.arguments import as_number, check_count, check_number
from biascope.support.errors import InputError
from biascope.support.inputs import check_inputs
from biascope.support.signatures import PLAIN, Rule

if TYPE_CHECKING:
    Count = int
    Finite = float
    Positive = float
    NonNegative = float
    Share = float
    FiniteTensor = Tensor
else:

    class Count:
        """A whole number from 1 on."""

    class Finite:
        """A number, neither NaN nor infinite."""

    class Positive:
        """A finite number above 0."""

    class NonNegative:
        """A finite number from 0 on."""

    class Share:
        """A number from 0 to 1."""

    class FiniteTensor:
        """A real tensor [n, ...], n >= 1, without NaN and infinity."""

    def _share(value: Any, name: str) -> float:
        if not 0 <= (found := as_number(value, name)) <= 1:
            raise InputError(f"{name}={found:g}: a number from 0 to 1 is needed")
        return found

    def _finite(value: Any, name: str) -> Tensor:
        return check_inputs(PLAIN[Tensor].check(value, name), name)

    PLAIN[Count] = Rule(check_count, "an integer from 1 on")
    PLAIN[Finite] = Rule(check_number, "a number")
    PLAIN[Positive] = Rule(lambda value, name: check_number(value, name, above=0), "a number above 0")
    PLAIN[NonNegative] = Rule(lambda value, name: check_number(value, name, least=0), "a number from 0 on")
    PLAIN[Share] = Rule(_share, "a number from 0 to 1")
    PLAIN[FiniteTensor] = Rule(_finite, "a tensor")


def check_shapes(wanted: str, *tensors: Any) -> None:
    """Refuse tensors or arrays whose shapes do not fit: a letter stands for one size, "..." for one tail of sizes.

    Example:
        >>> import torch
        >>> check_shapes("x [m, ...], y [m]", torch.ones(3, 2), torch.ones(4))
        Traceback (most recent call last):
        ...
        biascope.InputError: x [3, 2] and y [4] do not fit: x [m, ...], y [m] is needed
    """
    known: dict[str, Any] = {}
    names, sides = _parsed(wanted)
    if not all(_fits(tuple(t.shape), each, known) for t, each in zip(tensors, sides, strict=True)):
        found = " and ".join(f"{name} {list(t.shape)}" for name, t in zip(names, tensors))
        raise InputError(f"{found} {'do' if len(names) > 1 else 'does'} not fit: {wanted} is needed")


@cache
def _parsed(wanted: str) -> tuple[list[str], list[list[str]]]:
    found = re.findall(r"([^\s,]+) \[(.*?)\]", wanted)
    return [name for name, _ in found], [sides.split(", ") for _, sides in found]


def _fits(shape: tuple[Any, ...], sides: list[str], known: dict[str, Any]) -> bool:
    if "..." in sides:
        first, last = sides.index("..."), len(sides) - sides.index("...") - 1
        if len(shape) < first + last:
            return False
        middle = shape[first : len(shape) - last]
        shape = (*shape[:first], middle, *shape[len(shape) - last :])
    if len(shape) != len(sides):
        return False
    return all(n == int(side) if side.isdigit() else known.setdefault(side, n) == n for n, side in zip(shape, sides))
