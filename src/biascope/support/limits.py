"""Type hints that also say which values are meant: `n: Count`, `sigma: NonNegative`, `x: Matrix`; shapes that fit.

`checked` refuses anything else with an error that names the argument, so that a function need not ask itself.
"""

import re
from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.support.arguments import as_number, check_count, check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.inputs import check_inputs
from biascope.support.readers import to_tensor
from biascope.support.signatures import PLAIN, Rule, only_tensors


def shaped(*dims: int, floating: bool = False, finite: bool = False) -> Rule:
    """Real tensors with one of some numbers of dimensions; `finite` ones hold at least one example and no NaN."""

    def check(value: Any, name: str) -> Any:
        found = PLAIN[Tensor].check(check_tensor(to_tensor(value, name), name, dims or None, floating), name)
        return check_inputs(found, name) if finite else found

    return Rule(check, "a tensor")


def _share(value: Any, name: str) -> float:
    found = as_number(value, name)
    if not 0 <= found <= 1:
        raise InputError(f"{name}={found:g}: a number from 0 to 1 is needed")
    return found


Count = Annotated[int, Rule(check_count, "an integer from 1 on")]
CountOrZero = Annotated[int, Rule(lambda value, name: check_count(value, name, least=0), "an integer from 0 on")]
Finite = Annotated[float, Rule(check_number, "a number")]  # neither NaN nor infinite, as those below
Positive = Annotated[float, Rule(lambda value, name: check_number(value, name, above=0), "a number above 0")]
NonNegative = Annotated[float, Rule(lambda value, name: check_number(value, name, least=0), "a number from 0 on")]
Share = Annotated[float, Rule(_share, "a number from 0 to 1")]

Vector = Annotated[Tensor, shaped(1)]
Matrix = Annotated[Tensor, shaped(2)]
Images = Annotated[Tensor, shaped(4)]  # [n, c, h, w]
FloatTensor = Annotated[Tensor, shaped(floating=True)]
OwnTensor = Annotated[Tensor, Rule(only_tensors, "a tensor")]  # which is changed
FiniteTensor = Annotated[Tensor, shaped(finite=True)]


def _float_dtype(value: Any, name: str) -> Any:
    found = PLAIN[torch.dtype].check(value, name)
    if not found.is_floating_point:
        raise InputError(f"{name}={found}: a floating-point dtype is needed, e.g. torch.float32")
    return found


FloatDtype = Annotated[torch.dtype, Rule(_float_dtype, "a floating-point dtype")]


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
