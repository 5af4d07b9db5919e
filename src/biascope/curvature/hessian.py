"""The Hessian of a loss: by products (implicit) or whole (dense)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.curvature.accumulate import Stream
from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.families import Family
from biascope.curvature.implicit import ProductMetric
from biascope.curvature.metric import Metric
from biascope.curvature.outputs import IGNORE, OutputShape, checked_labels, output_shape
from biascope.curvature.pieces import DensePiece
from biascope.curvature.plan import Plan
from biascope.curvature.space import ParameterSpace
from biascope.derivatives import differentiable_attention
from biascope.errors import InputError, UnsupportedError
from biascope.functional import ParamSelection, functional
from biascope.inputs import batches
from biascope.layers import Anatomy, leaves
from biascope.memory import readable
from biascope.precision import arithmetic, without_cudnn
from biascope.signatures import checked

Loss = str | Callable[[Tensor, Tensor | None], Tensor]


class LossFamily(Family):
    """A per-example loss [n] of the outputs [n, c] and labels, as torch computes it with reduction="mean"."""

    KINDS = {"ce": "categorical", "bce": "bernoulli", "mse": "gaussian"}  # noqa: RUF012

    def __init__(self, shape: OutputShape, loss: Loss) -> None:
        super().__init__(shape)
        if isinstance(loss, str) and loss not in self.KINDS:
            raise InputError(f"loss={loss!r}: choose ce, bce, mse, or give a function (outputs [n, c], labels) -> [n]")
        self.loss = loss

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:  # noqa: D102
        if callable(self.loss):
            return y
        y = checked_labels(self.KINDS[self.loss], y, n, self.shape)
        if self.loss == "ce" and bool((y == IGNORE).any()):
            raise UnsupportedError("ignored labels (-100) make examples weigh unequally; give the loss as a function")
        return y

    def losses(self, z: Tensor, y: Tensor | None) -> Tensor:
        """[n]."""
        if callable(self.loss):
            out = self.loss(z, y)
            if out.shape != z.shape[:1]:
                raise InputError(f"the loss must give one number per example [{len(z)}], got {list(out.shape)}")
            return out
        assert y is not None
        if self.loss == "ce":
            return F.cross_entropy(self.shape.split(z), y, reduction="none").mean(1)
        if self.loss == "bce":
            return F.binary_cross_entropy_with_logits(z, y.to(z), reduction="none").mean(1)
        return (z - y.to(z)).square().mean(1)


class HessianMetric(ProductMetric):
    """H v by differentiating the gradient along v (symmetric, not always positive)."""

    def __init__(self, space: ParameterSpace, stream: Stream, plan: Plan, info: dict[str, Any]) -> None:
        super().__init__(space, plan, info)
        self.stream = stream
        stream.count()

    @arithmetic("float32")
    def _matmat(self, X: Tensor) -> Tensor:
        f, family = self.stream.f, self.stream.family
        assert isinstance(family, LossFamily)
        out = torch.zeros_like(X)
        columns = [self.space.unflatten(x) for x in X.T]
        for inputs, y, _ in self.stream.batches():
            params = leaves(f)
            ps = list(params.values())
            with torch.enable_grad(), differentiable_attention(), without_cudnn():
                losses = family.losses(f(params, inputs), y)
                if not bool(torch.isfinite(losses).all()):
                    bad = int((~torch.isfinite(losses)).nonzero()[0])
                    raise InputError(f"the loss of example {bad} of a batch is not finite")
                grads = torch.autograd.grad(
                    losses.sum(), ps, create_graph=True, allow_unused=True, materialize_grads=True
                )
                for j, v in enumerate(columns):
                    inner = torch.stack([(g * v[name]).sum() for name, g in zip(params, grads)]).sum()
                    if not inner.requires_grad:  # a loss linear in the parameters
                        continue
                    second = torch.autograd.grad(
                        inner, ps, retain_graph=True, allow_unused=True, materialize_grads=True
                    )
                    out[:, j] += torch.cat([s.reshape(-1) for s in second])
            del grads, losses
        return out / self.stream.n


@checked
def hessian(
    model: nn.Module,
    data: Any,
    representation: str = "implicit",
    loss: Loss = "ce",
    *,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
    class_dim: int = 1,
    max_memory: str | int | None = None,
) -> Metric:
    """Hessian of the mean loss over labelled data with respect to the parameters.

    Args:
        model: any nn.Module whose examples do not mix.
        data: (x, y), or an iterable of such batches that can be read again.
        representation: "implicit" (products; solve, eigh(k) and estimates follow) or "dense".
        loss: "ce", "bce", "mse" as torch computes them with reduction="mean", or a function
            (outputs [n, c], labels) -> [n].
        params: which parameters (see `bs.functional.functional`).
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        class_dim: axis of the classes in the model's output, 1 or -1.
        max_memory: budget for the dense form.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> H = hessian(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])))
        >>> (H @ torch.ones(8)).shape
        torch.Size([8])
    """
    if representation not in {"implicit", "dense"}:
        raise UnsupportedError(
            f"the Hessian has no representation={representation!r}: choose implicit or dense; bs.ggn has all of them"
        )
    f = functional(model, params, output, precision)
    first, _ = next(iter(batches(data, "data")))
    space = ParameterSpace.of(f)
    family = LossFamily(output_shape(f, first, class_dim), loss)
    stream = Stream(f, Anatomy((), (), family.shape.total, 1), data, family, 0, max_memory)
    why = "second derivatives of the loss"
    plan = Plan(representation, tuple((k, s, representation, why) for k, s in space.shapes.items()))
    info: dict[str, Any] = {"what": "Hessian", "loss": loss if isinstance(loss, str) else "user-supplied"}
    H = HessianMetric(space, stream, plan, info)
    info["n"] = stream.n
    if representation == "implicit":
        return H
    need = 2 * space.size**2 * space.dtype.itemsize
    if need > stream.limit:
        raise InputError(
            f"a dense Hessian of {space.size} parameters needs {readable(need)}, the budget is "
            f"{readable(stream.limit)}: use representation='implicit'"
        )
    whole = H.to_dense()
    return BlockMetric(space, [DensePiece(tuple(space.shapes), (whole + whole.T) / 2)], plan, info)
