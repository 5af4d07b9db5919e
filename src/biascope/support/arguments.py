"""Numbers, tensors and names as users hand them in: refused by name and with the fix, before any work is done."""

from collections.abc import Collection
from math import inf, isfinite
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from biascope.support.errors import InputError, near


def as_whole(value: Any, name: str) -> int:
    """A whole number of either sign: Python's, numpy's, or a tensor of one element."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except (TypeError, RuntimeError):  # torch says RuntimeError for some tensors
            pass
    raise InputError(f"{name} must be an integer, not {shown(value)}")


def check_count(value: Any, name: str, least: int = 1) -> int:
    """A whole number from `least` on: a count, a size, a number of steps."""
    found = as_whole(value, name)
    if found < least:
        raise InputError(f"{name} must be at least {least}, not {found}")
    return found


def check_number(value: Any, name: str, least: float | None = None, above: float | None = None) -> float:
    """One finite number, at least `least` or above `above` where they are given."""
    found = as_number(value, name)
    if isfinite(found) and (least is None or found >= least) and (above is None or found > above):
        return found
    bound = f" from {least:g} on" if least is not None else f" above {above:g}" if above is not None else ""
    raise InputError(f"{name}={shown(value)}: a finite number{bound} is needed")


def as_number(value: Any, name: str) -> float:
    """One number, NaN and infinity among them: Python's, numpy's, or a tensor of one element."""
    if not isinstance(value, str | bytes | bool):
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise InputError(f"{name}={shown(value)}: one number is needed")


def check_tensor(value: Any, name: str, dims: int | Collection[int] | None = None, floating: bool = False) -> Tensor:
    """A tensor, of one of the numbers of dimensions and of real floating-point numbers where that is asked for."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(value).__name__}{tensor_fix(value, name)}")
    if dims is not None and value.dim() not in (wanted := [dims] if isinstance(dims, int) else list(dims)):
        need = " or ".join(map(str, wanted))
        raise InputError(f"{name} has shape {list(value.shape)}: a tensor of {need} dimension(s) is needed")
    if floating and not value.is_floating_point():
        raise InputError(f"{name} is {value.dtype}: real floating-point numbers are needed, e.g. {name}.float()")
    return value


def tensor_fix(value: Any, name: str) -> str:
    """How to make a tensor of an array, a list or a column of a table, to end an error with; "" for anything else."""
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
    """One of the names there are; the nearest are suggested."""
    if isinstance(value, str) and value in choices:
        return value
    hint = near(value, choices) if isinstance(value, str) else f"; there is {', '.join(choices)}"
    raise InputError(f"{name}={shown(value)} is not known{hint}")


def shown(value: Any) -> str:
    """A value in an error message: short, and tensors by their shape."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value.item()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that is meant, the CPU by default; refused before any work where torch does not see it.

    The one place that says where biascope computes: on the processor or a CUDA device. Others are refused: mps has no
    float64, which much of what is measured needs, and meta has no values.
    """
    try:
        where = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device {device!r} is not a torch device; use cpu, cuda or cuda:0") from error
    if where.type not in {"cpu", "cuda"}:
        raise InputError(f"device {str(device)!r} is not supported here; use cpu, cuda or cuda:0")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} was asked for, but torch sees no CUDA device here; use cpu")
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise InputError(f"device {str(device)!r}: torch sees {count} CUDA device(s), the first is cuda:0")
    return where


def check_damping(damping: Any) -> float:
    """A number to add to a diagonal: finite and not negative."""
    found = as_number(damping, "damping")
    if not 0 <= found < inf:
        raise InputError(f"damping must be a number >= 0, not {found}")
    return found


def check_finite(value: Tensor, name: str) -> Tensor:
    """A tensor without NaN or infinity."""
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{name} has a NaN or infinity")
    return value


def check_between(value: int, name: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if not low <= value <= high:
        raise InputError(f"{name} must be between {low} and {high}, not {value}")
    return value


def check_share(value: Any, name: str) -> float:
    """A number from 0 to below 1."""
    if not 0 <= as_number(value, name) < 1:
        raise InputError(f"{name} must be at least 0 and below 1, not {value}")
    return as_number(value, name)
