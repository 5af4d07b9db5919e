"""Labels that a loss is defined for."""

from __future__ import annotations

from torch import Tensor

from biascope.errors import InputError
from biascope.inputs import check_inputs


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
    if loss == "logistic" and bool((wrong := y.abs() != 1).any()):
        found = float(y[wrong][0])
        raise InputError(f'{name} holds {found:g}: "logistic" wants labels -1 and +1; for classes 0 and 1 give 2 y - 1')
