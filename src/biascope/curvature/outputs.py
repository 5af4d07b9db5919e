"""Classes and positions in the network's outputs, and labels that fit them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from biascope.arguments import tensor_fix
from biascope.errors import InputError
from biascope.functional import Functional
from biascope.inputs import Inputs, take

IGNORE = -100  # torch's ignore_index: a position without a label


@dataclass(frozen=True)
class OutputShape:
    """How a row of outputs [c_total] splits into classes and positions."""

    classes: int
    positions: int
    classes_last: bool

    @staticmethod
    def of(shape: tuple[int, ...], class_dim: int) -> OutputShape:
        """From the shape of one example's output; class_dim is 1 (as torch's losses, examples counted) or -1."""
        if class_dim not in (1, -1):
            raise InputError(
                f"class_dim={class_dim}: the classes are axis 1 (as in torch's cross_entropy) or -1 (the last)"
            )
        shape = shape or (1,)
        if class_dim == 1:
            return OutputShape(shape[0], prod(shape[1:]), False)
        return OutputShape(shape[-1], prod(shape[:-1]), True)

    @property
    def total(self) -> int:
        """Numbers per example."""
        return self.classes * self.positions

    def split(self, rows: Tensor) -> Tensor:
        """[..., total] to [..., classes, positions]."""
        if self.positions == 1:
            return rows[..., None]
        if self.classes_last:
            return rows.reshape(*rows.shape[:-1], self.positions, self.classes).mT
        return rows.reshape(*rows.shape[:-1], self.classes, self.positions)

    def join(self, t: Tensor) -> Tensor:
        """[..., classes, positions] to [..., total]."""
        if self.positions == 1:
            return t[..., 0]
        return (t.mT if self.classes_last else t).flatten(-2)


def output_shape(f: Functional, inputs: Inputs, class_dim: int) -> OutputShape:
    """Find the class axis of what the model returns for one example; class_dim is 1 (as torch's losses) or -1."""
    return OutputShape.of(_seen_shape(f, inputs), class_dim)


def _seen_shape(f: Functional, inputs: Inputs) -> tuple[int, ...]:
    seen: list[tuple[int, ...]] = []

    def spy(out: object) -> Tensor:
        t = f.output(out) if f.output is not None else out
        if f.output is None and not isinstance(t, Tensor):
            t = getattr(t, "logits", t)
        if isinstance(t, Tensor):
            seen.append(tuple(t.shape[1:]))
        return t  # type: ignore[return-value]  # what is no tensor is refused by the caller, with advice

    with torch.no_grad():
        replace(f, output=spy)(f.params, f.prepare(take(inputs, slice(0, 1))))
    return seen[0]


def checked_labels(likelihood: str, y: Tensor | None, n: int, shape: OutputShape) -> Tensor:
    """Labels [n, positions] (categorical) or targets [n, total], or an error that says what is wrong with them."""
    if y is None:
        raise InputError("this needs labels: give data as (x, y) or as batches (x, y)")
    if not isinstance(y, Tensor):
        raise InputError(f"labels must be a tensor, got {type(y).__name__}{tensor_fix(y, 'y')}")
    if y.is_complex():
        raise InputError(f"labels must be real numbers, got {y.dtype}")
    if y.dim() == 0 or len(y) != n:
        raise InputError(f"{n} examples but labels of shape {list(y.shape)}")
    if likelihood == "categorical":
        if y.is_floating_point():
            hint = _label_hint(y, shape) or "; pass y.long(), or say likelihood='gaussian' for regression"
            raise InputError(f"categorical labels are class indices (integers), got {y.dtype}{hint}")
        if y.numel() != n * shape.positions:
            raise InputError(
                f"labels of shape {list(y.shape)} do not fit {shape.positions} positions per example"
                f"{_label_hint(y, shape)}"
            )
        y = y.reshape(n, -1).long()
        bad = (y != IGNORE) & ((y < 0) | (y >= shape.classes))
        if bool(bad.any()):
            i = int(bad.any(1).nonzero()[0])
            raise InputError(f"label {int(y[bad][0])} of example {i} is not a class: the model has {shape.classes}")
        return y
    if y.numel() != n * shape.total:
        raise InputError(f"targets of shape {list(y.shape)} do not fit outputs [{n}, {shape.total}]")
    y = y.reshape(n, -1)
    if not bool(torch.isfinite(y).all()):
        raise InputError(f"target of example {int((~torch.isfinite(y).all(1)).nonzero()[0])} has a NaN or infinity")
    if likelihood == "bernoulli" and bool(((y < 0) | (y > 1)).any()):
        raise InputError("bernoulli labels must lie between 0 and 1")
    return y


def _label_hint(y: Tensor, shape: OutputShape) -> str:
    """What labels that do not fit look like: one-hot rows, or tokens where the classes were taken for positions."""
    if y.dim() == 2 and y.shape[1] == shape.classes and shape.positions == 1:
        return "; one-hot labels become class indices with y.argmax(1)"
    if not shape.classes_last and y.dim() > 1 and y[0].numel() == shape.classes:
        return "; where the classes are the last axis, as in language models, say class_dim=-1"
    return ""
