"""Numbers, tensors and names as users hand them in: refused by name and with the fix, before any work is done."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from operator import index
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from biascope.errors import InputError, near


def as_whole(value: Any, name: str) -> int:
    """A whole number of either sign: Python's, numpy's, or a tensor of one element.

    Example:
        >>> as_whole(None, "seed")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: seed must be an integer, not None
    """
    if not isinstance(value, bool):
        try:
            return index(value)
        except (TypeError, RuntimeError):  # torch says RuntimeError for some tensors
            pass
    raise InputError(f"{name} must be an integer, not {said(value)}")


def check_count(value: Any, name: str, least: int = 1) -> int:
    """A whole number from `least` on: a count, a size, a number of steps.

    Example:
        >>> check_count(0, "samples")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: samples must be at least 1, not 0
    """
    found = as_whole(value, name)
    if found < least:
        raise InputError(f"{name} must be at least {least}, not {found}")
    return found


def check_number(value: Any, name: str, least: float | None = None, above: float | None = None) -> float:
    """One finite number, at least `least` or above `above` where they are given.

    Example:
        >>> check_number(0.1, "damping", least=0)
        0.1
        >>> check_number(float("nan"), "lr", above=0)
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: lr=nan: a finite number above 0 is needed
    """
    found = as_number(value, name)
    if isfinite(found) and (least is None or found >= least) and (above is None or found > above):
        return found
    bound = f" from {least:g} on" if least is not None else f" above {above:g}" if above is not None else ""
    raise InputError(f"{name}={said(value)}: a finite number{bound} is needed")


def as_number(value: Any, name: str) -> float:
    """One number, NaN and infinity among them: Python's, numpy's, or a tensor of one element.

    Example:
        >>> as_number([0.1], "damping")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: damping=[0.1]: one number is needed
    """
    if not isinstance(value, str | bytes | bool):
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise InputError(f"{name}={said(value)}: one number is needed")


def check_tensor(value: Any, name: str, dims: int | Collection[int] | None = None, floating: bool = False) -> Tensor:
    """A tensor, of one of the numbers of dimensions and of real floating-point numbers where that is asked for.

    Example:
        >>> check_tensor([1.0, 2.0], "y")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: y: expected a tensor, got list; pass torch.tensor(y)
        >>> import torch
        >>> check_tensor(torch.arange(3), "y", floating=True)
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: y is torch.int64: real floating-point numbers are needed, e.g. y.float()
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(value).__name__}{tensor_fix(value, name)}")
    if dims is not None and value.dim() not in (wanted := [dims] if isinstance(dims, int) else list(dims)):
        need = " or ".join(map(str, wanted))
        raise InputError(f"{name} has shape {list(value.shape)}: a tensor of {need} dimension(s) is needed")
    if floating and not value.is_floating_point():
        raise InputError(f"{name} is {value.dtype}: real floating-point numbers are needed, e.g. {name}.float()")
    return value


def tensor_fix(value: Any, name: str) -> str:
    """How to make a tensor of an array, a list or a column of a table, to end an error with; "" for anything else.

    Example:
        >>> tensor_fix([0, 1], "y"), tensor_fix(None, "y")
        ('; pass torch.tensor(y)', '')
        >>> tensor_fix(["cat", "dog"], "y")
        '; number the classes, e.g. torch.tensor([sorted(set(y)).index(word) for word in y])'
    """
    held = name if name.isidentifier() else "..."  # "batch 0 of x" is no Python
    if type(value).__name__ == "ndarray":
        return f"; pass torch.from_numpy({held})"
    if isinstance(value, DataLoader):
        return "; pass the tensors of one batch, e.g. x, y = next(iter(loader))"
    if isinstance(value, list):
        first = value[0] if value else None
        if isinstance(first, str):
            return f"; number the classes, e.g. torch.tensor([sorted(set({held})).index(word) for word in {held}])"
        return f"; pass torch.{'cat' if isinstance(first, Tensor) and first.dim() else 'tensor'}({held})"
    if not hasattr(value, "to_numpy"):
        return ""
    if getattr(getattr(value, "dtype", None), "kind", "i") in "iufb":
        return f"; pass torch.from_numpy({held}.to_numpy())"
    return f"; number the classes, e.g. torch.from_numpy(pandas.factorize({held})[0])"


def check_choice(value: Any, name: str, choices: Collection[str]) -> str:
    """One of the names there are; the nearest are suggested.

    Example:
        >>> check_choice("entropi", "kind", ("entropy", "participation"))
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: kind='entropi' is not known; did you mean entropy?
    """
    if isinstance(value, str) and value in choices:
        return value
    hint = near(value, choices) if isinstance(value, str) else f"; there is {', '.join(choices)}"
    raise InputError(f"{name}={said(value)} is not known{hint}")


def said(value: Any) -> str:
    """A value in an error message: short, and tensors by their shape.

    Example:
        >>> import torch
        >>> said(torch.zeros(2, 3)), said("ab")
        ('a tensor of shape [2, 3]', "'ab'")
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value.item()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
