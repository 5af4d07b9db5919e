"""Groups of examples that are followed by themselves, easy and hard, majority and minority; losses of examples."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.support.arguments import check_tensor, tensor_fix
from biascope.support.errors import InputError
from biascope.support.inputs import Inputs, batch_size, check_inputs
from biascope.support.signatures import checked

Group = Tensor | tuple[Inputs, Tensor]  # indices into the probe batch, or a batch (x, y) of its own
Loss = Literal["cross_entropy", "logistic", "squared"] | Callable[[Tensor, Tensor], Tensor]  # or (outputs, y) -> [n]


def as_groups(groups: Mapping[str, Any] | None, n: int) -> dict[str, Group]:
    """Groups as indices or batches, checked; one group "all" if none are given."""
    if groups is None:
        return {"all": torch.arange(n, device="cpu")}
    found: dict[str, Group] = {}
    for name, group in groups.items():
        what = f"groups[{name!r}]"
        if isinstance(group, tuple):
            inputs = check_inputs(group[0], what)
            found[name] = (inputs, check_labels(group[1], batch_size(inputs), what))
            continue
        index = torch.as_tensor(group)
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0] if index.shape == (n,) else index[:0].long()
        inside = index.numel() > 0 and bool(((index >= 0) & (index < n)).all())
        if index.dim() != 1 or index.is_floating_point() or not inside:
            raise InputError(f"{what}: expected a mask [{n}], indices from 0 to {n - 1}, or a batch (x, y)")
        found[name] = index.long()
    return found


def check_labels(y: Any, n: int, what: str) -> Tensor:
    """A tensor of one label per example."""
    if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != n:
        got = f"{list(y.shape)}" if isinstance(y, Tensor) else f"{type(y).__name__}{tensor_fix(y, what)}"
        raise InputError(f"{what}: expected a tensor of {n} labels, got {got}")
    return y


def _squares(f: Tensor, y: Tensor) -> Tensor:
    return (f - y.reshape(len(y), -1).to(f)).square().mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda f, y: F.cross_entropy(f, y.long(), reduction="none"),  # class indices, c >= 2 outputs
    "logistic": lambda f, y: F.softplus(-_signs(y).to(f) * f[:, 0]),  # labels -1, +1 or 0, 1; one output
    "squared": _squares,  # mean over outputs of (f - y)^2
}


@checked
def example_losses(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
    """Loss of every example [n], float64, from outputs [n, c] and labels.

    `y` are class indices [n], signs or bits [n] (one output), or values [n] or [n, c]; `loss` a name, a function
    (outputs, y) -> [n], or None for what y suggests: classes cross-entropy, signs or bits logistic, values squared.
    """
    n, c = check_tensor(outputs, "outputs", dims=2, floating=True).shape
    check_labels(y, n, "y")
    if y.dim() == 2 and y.shape[1] == 1 < c and not y.is_floating_point():
        y = y[:, 0]  # classes in a column
    name = loss or ("squared" if y.is_floating_point() else "cross_entropy" if c > 1 else "logistic")
    if callable(name):
        found = name(outputs, y)
        if not isinstance(found, Tensor) or found.shape != (n,):
            raise InputError(f"loss_fn must return a tensor of one loss per example, [{n}]")
        return found.double()
    values = {"cross_entropy": 1, "logistic": 1, "squared": c}[name]
    if y[0].numel() != values or (name == "logistic" and c != 1) or (name == "cross_entropy" and y.dim() != 1):
        raise InputError(f"{name} loss of {c} outputs: y has shape {list(y.shape)}; {values} value(s) per example fit")
    if name == "cross_entropy" and (y.is_floating_point() or not bool((y >= 0).all() & (y < c).all())):
        raise InputError(f"y must be classes, whole numbers from 0 to {c - 1}, not {y.dtype} up to {float(y.max()):g}")
    return LOSSES[name](outputs.double(), y)


def _signs(y: Tensor) -> Tensor:
    y = y.reshape(len(y)).double()
    if bool((y.abs() == 1).all()):
        return y
    if not bool(((y == 0) | (y == 1)).all()):
        raise InputError("logistic loss needs labels -1, +1 or 0, 1; pass loss_fn= for others")
    return 2 * y - 1
