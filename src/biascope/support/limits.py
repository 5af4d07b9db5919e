"""Type hints that also say which values are meant: `n: Count`, `sigma: NotNegative`, `x: Matrix`.

`checked` refuses anything else with an error that names the argument, so that a function need not ask itself.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.support.arguments import as_number, check_count, check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.inputs import check_inputs
from biascope.support.signatures import PLAIN, Rule


def shaped(*dims: int, floating: bool = False, finite: bool = False) -> Rule:
    """Real tensors with one of some numbers of dimensions; `finite` ones hold at least one example and no NaN."""

    def check(value: Any, name: str) -> Any:
        found = PLAIN[Tensor].check(check_tensor(value, name, dims or None, floating), name)
        return check_inputs(found, name) if finite else found

    return Rule(check, "a tensor")


def _share(value: Any, name: str) -> float:
    found = as_number(value, name)
    if not 0 <= found <= 1:
        raise InputError(f"{name}={found:g}: a number from 0 to 1 is needed")
    return found


Count = Annotated[int, Rule(check_count, "an integer")]  # 1, 2, 3, ...
CountOrZero = Annotated[int, Rule(lambda value, name: check_count(value, name, least=0), "an integer")]
Finite = Annotated[float, Rule(check_number, "a number")]  # neither NaN nor infinite, as those below
Positive = Annotated[float, Rule(lambda value, name: check_number(value, name, above=0), "a number")]
NotNegative = Annotated[float, Rule(lambda value, name: check_number(value, name, least=0), "a number")]
Share = Annotated[float, Rule(_share, "a number")]  # from 0 to 1

Vector = Annotated[Tensor, shaped(1)]
Matrix = Annotated[Tensor, shaped(2)]
Images = Annotated[Tensor, shaped(4)]  # [n, c, h, w]
FloatTensor = Annotated[Tensor, shaped(floating=True)]
FiniteTensor = Annotated[Tensor, shaped(finite=True)]


def _float_dtype(value: Any, name: str) -> Any:
    found = PLAIN[torch.dtype].check(value, name)
    if not found.is_floating_point:
        raise InputError(f"{name}={found}: a floating-point dtype is needed, e.g. torch.float32")
    return found


FloatDtype = Annotated[torch.dtype, Rule(_float_dtype, "a floating-point dtype")]
