"""Inputs and labels that a loss is defined for, and losses that are one number."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from biascope.errors import InputError
from biascope.inputs import check_inputs


def check_reals(x: Tensor, name: str) -> None:
    """Refuse inputs [n, ...] that are not finite numbers of floating point: pixels 0 to 255 would be taken as they are.

    Example:
        >>> check_reals(torch.ones(2, 3, dtype=torch.uint8), "x_train")
        Traceback (most recent call last):
        ...
        biascope.errors.InputError: x_train is torch.uint8: pass x_train.float(), scaled as in training
    """
    check_inputs(x, name)
    if not x.is_floating_point():
        raise InputError(f"{name} is {x.dtype}: pass {name}.float(), scaled as in training")


def check_labels(y: Tensor, loss: object, name: str = "y") -> None:
    """Refuse labels [n] that are not finite, and for the loss "logistic" any but -1 and +1.

    softplus(-y f) takes any number: classes 0 and 1 would give the constant log 2 for one of them, and no gradient.

    Example:
        >>> check_labels(torch.tensor([1.0, -1.0]), "logistic")
        >>> check_labels(torch.tensor([0.0, 1.0]), "logistic")
        Traceback (most recent call last):
        biascope.errors.InputError: y holds 0: "logistic" wants labels -1 and +1; for classes 0 and 1 give 2 y - 1
    """
    check_inputs(y, name)
    if loss == "logistic" and bool((wrong := y.double().abs() != 1).any()):
        found = float(y[wrong][0])
        raise InputError(f'{name} holds {found:g}: "logistic" wants labels -1 and +1; for classes 0 and 1 give 2 y - 1')


def as_sum(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss (f [b], y [b]) -> sum of losses, refused when it gives anything but one number.

    Example:
        >>> as_sum(lambda f, y: (f - y) ** 2)(torch.ones(2), torch.zeros(2))
        Traceback (most recent call last):
        biascope.errors.InputError: loss gave shape [2] for outputs [2]: it must give their sum
    """

    def total(f: Tensor, labels: Tensor) -> Tensor:
        made = loss(f, labels)
        if not isinstance(made, Tensor) or made.dim():
            what = f"shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise InputError(f"loss gave {what} for outputs {list(f.shape)}: it must give their sum")
        return made

    return total
