"""Loss and accuracy of every example, as groups are compared by them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from biascope.arguments import check_tensor
from biascope.errors import InputError
from biascope.signatures import checked

Loss = str | Callable[[Tensor, Tensor], Tensor]  # a name, or (outputs [n, c], y) -> [n]


def _squares(f: Tensor, y: Tensor) -> Tensor:
    return (f - y.reshape(len(y), -1).to(f)).square().mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda f, y: F.cross_entropy(f, y.long(), reduction="none"),  # class indices, c >= 2 outputs
    "logistic": lambda f, y: F.softplus(-_signs(y).to(f) * f[:, 0]),  # labels -1, +1 or 0, 1; one output
    "squared": _squares,  # mean over outputs of (f - y)^2
}


def loss_name(y: Tensor, outputs: int) -> str:
    """The loss that labels suggest: class indices -> cross-entropy, signs or bits -> logistic, values -> squared.

    Example:
        >>> loss_name(torch.tensor([0, 3]), 4), loss_name(torch.tensor([1, -1]), 1), loss_name(torch.rand(2), 1)
        ('cross_entropy', 'logistic', 'squared')
    """
    if y.is_floating_point():
        return "squared"
    return "cross_entropy" if outputs > 1 else "logistic"


@checked
def example_losses(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
    """Loss of every example [n], float64, from outputs [n, c] and labels.

    Args:
        outputs: [n, c].
        y: class indices [n], signs or bits [n] (one output), or values [n] or [n, c].
        loss: "cross_entropy", "logistic", "squared", a function (outputs, y) -> [n], or None for what y suggests.

    Example:
        >>> example_losses(torch.zeros(2, 4), torch.tensor([0, 1])).exp()
        tensor([4., 4.], dtype=torch.float64)
    """
    check_tensor(outputs, "outputs", dims=2, floating=True)
    if y.dim() == 0 or len(y) != len(outputs) or outputs.shape[1] == 0 or y.is_complex():
        raise InputError(f"y has shape {list(y.shape)} for {len(outputs)} examples")
    name = loss_name(y, outputs.shape[1]) if loss is None else loss
    if isinstance(name, str):
        if name not in LOSSES:
            raise InputError(f"loss_fn={name!r} is not one of {', '.join(LOSSES)}, and not a function")
        if name == "squared" and y[0].numel() != outputs.shape[1]:
            raise InputError(f"y has {y[0].numel()} values per example, the network {outputs.shape[1]} outputs")
        if name == "cross_entropy" and (y.dim() != 1 or y.is_floating_point()):
            fix = ": pass y.argmax(1)" if y.shape == outputs.shape else ""
            raise InputError(f"y must be class indices [n] (integers), not {y.dtype} {list(y.shape)}{fix}")
        if name == "cross_entropy" and not bool((y >= 0).all() & (y < outputs.shape[1]).all()):
            raise InputError(f"y must be classes 0 to {outputs.shape[1] - 1}, got {int(y.min())} to {int(y.max())}")
        if name == "logistic" and outputs.shape[1] != 1:
            raise InputError(f"logistic loss needs one output, the network has {outputs.shape[1]}; use cross_entropy")
        return LOSSES[name](outputs.double(), y)
    found = name(outputs, y)
    if not isinstance(found, Tensor):
        raise InputError(f"loss_fn returned a {type(found).__name__}, not a tensor of losses [{len(outputs)}]")
    if found.shape != (len(outputs),):
        raise InputError(f"loss_fn returned {list(found.shape)}; one loss per example [{len(outputs)}] is needed")
    return found.double()


def correct(outputs: Tensor, y: Tensor) -> Tensor | None:
    """Which examples are classified right [n] (bool); None where labels are values, not classes.

    Example:
        >>> correct(torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 1]))
        tensor([ True, False])
    """
    if y.is_floating_point() or y.dim() != 1:
        return None
    if outputs.shape[1] == 1:
        return (outputs[:, 0] > 0) == (y > 0)
    return outputs.argmax(1) == y


def _signs(y: Tensor) -> Tensor:
    y = y.reshape(len(y), -1)
    if y.shape[1] != 1:
        raise InputError(f"logistic loss needs one label per example, got {y.shape[1]}")
    y = y[:, 0].double()
    if bool((y.abs() == 1).all()):
        return y
    if bool(((y == 0) | (y == 1)).all()):
        return 2 * y - 1
    raise InputError("logistic loss needs labels -1, +1 or 0, 1; pass loss_fn= for others")
