"""Curvature of losses: the families of their Gauss-Newton matrices, and the Hessian by products or whole."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.families import (
    IGNORE,
    Bernoulli,
    Categorical,
    ClassDim,
    Family,
    Gaussian,
    OutputShape,
    Weighting,
    checked_labels,
)
from biascope.curvature.metric import Metric, ProductMetric
from biascope.curvature.passes import Pass
from biascope.curvature.pieces import DensePiece, ParameterSpace
from biascope.curvature.plan import Plan
from biascope.curvature.tokens import output_shape
from biascope.linalg.spread import Spread
from biascope.network.derivatives import differentiable_attention
from biascope.network.functional import Params, ParamSelection, functional
from biascope.network.layers.blocks import Anatomy, leaves
from biascope.network.stream import Cut, Stream
from biascope.support.arguments import check_finite
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.memory import parse_bytes, readable
from biascope.support.precision import arithmetic, without_cudnn
from biascope.support.processes import processes
from biascope.support.signatures import checked

Loss = Literal["ce", "bce", "mse"] | Weighting
LIKELIHOODS = {"ce": "categorical", "bce": "bernoulli", "mse": "gaussian"}
UNEQUAL = (
    "ignored labels (-100) make examples weigh unequally; give the loss as a function, or take bs.fisher, which adds "
    "up the positions that have a label"
)


class CrossEntropy(Categorical):
    """The mean cross entropy of an example's positions, for Gauss-Newton matrices."""

    counted = 0  # labels of an example

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """Positions without a label are left out of the mean, as long as all examples have the same number of them."""
        y = super().check_labels(y, n)
        self.counted = equal_count(self.shape.positions if y is None else y, self.counted)
        self.scale = 1.0 / self.counted
        return y


def equal_count(y: Tensor | int, before: int) -> int:
    """How many labels every example of y [n, positions] has, the same as `before`, unless this is 0."""
    counts = {y} if isinstance(y, int) else set((y != IGNORE).sum(1).tolist())
    if len(counts | ({before} - {0})) > 1:
        raise UnsupportedError(UNEQUAL)
    if counts == {0}:
        raise InputError("no position of the data has a label: all are -100, or masked as padding")
    return int(counts.pop())


class LossFamily(Family):
    """A per-example loss [n] of the outputs [n, c] and labels: torch's with reduction="mean", or a user's.

    The H_i of a user's loss are its Hessians, for which it must be convex in the outputs.
    """

    name = "user-supplied loss"
    tolerant = False

    def __init__(self, shape: OutputShape, loss: Loss) -> None:
        super().__init__(shape)
        self.loss, self.given, self.softmax = loss, True, loss == "ce"
        self.counted = 0

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:  # noqa: D102
        if callable(self.loss):
            return y
        y = checked_labels(LIKELIHOODS[self.loss], y, n, self.shape)
        if self.loss == "ce":
            self.counted = equal_count(y, self.counted)
        return y

    def losses(self, z: Tensor, y: Tensor | None) -> Tensor:
        """[n]."""
        if callable(self.loss):
            losses = self.loss(z, y)
            if losses.shape != z.shape[:1]:
                raise InputError(f"the loss must give one number per example [{len(z)}], got {list(losses.shape)}")
            return losses
        given = z if y is None else y  # never None: `check_labels` comes first
        if self.loss == "ce":
            return F.cross_entropy(self.shape.split(z), given, reduction="none").sum(1) / self.counted
        if self.loss == "bce":
            return F.binary_cross_entropy_with_logits(z, given.to(z), reduction="none").mean(1)
        return (z - given.to(z)).square().mean(1)

    def hessians(self, z: Tensor, y: Tensor | None) -> Tensor:
        """[n, c, c] by differentiating the sum of the losses twice."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad(self.losses(z, y).sum(), z, create_graph=True)
            if not g.requires_grad:  # a loss that is linear in the outputs
                return z.new_zeros(*z.shape, z.shape[1])
            sums = g.sum(0)
            rows = [torch.autograd.grad(s, z, retain_graph=True, materialize_grads=True)[0] for s in sums]
        return torch.stack(rows, -1).detach()

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        values, U = torch.linalg.eigh(self.hessians(z, y).double())
        if bool((values < -1e-5 * values.abs().max()).any()):
            raise InputError("the loss is not convex in the outputs: its Gauss-Newton matrix has no square root")
        S = (U * values.clamp_min(0).sqrt()[:, None]).movedim(-1, 0)
        out: Tensor = S[ks.start : ks.stop].to(z)
        return out

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        return torch.einsum("ncd,...nd->...nc", self.hessians(z, y), u)


def loss_family(loss: Loss, shape: OutputShape) -> Family:
    """The family of the Gauss-Newton matrix of a loss as torch computes it with reduction="mean"."""
    if callable(loss):
        return LossFamily(shape, loss)
    if loss == "ce":
        return CrossEntropy(shape, 1.0 / shape.positions)
    if loss == "bce":
        return Bernoulli(shape, 1.0 / shape.total)
    return Gaussian(shape, 2.0 / shape.total)


class HessianMetric(ProductMetric):
    """H v by differentiating the gradient along v (symmetric, not always positive)."""

    def __init__(
        self, space: ParameterSpace, stream: Pass, family: LossFamily, plan: Plan, info: dict[str, Any]
    ) -> None:
        super().__init__(space, plan, info)
        self.stream, self.family = stream, family
        f = stream.f
        if f.shards is not None:
            self.spread = Spread(stream.team, f.own_params, self._own, self._join)
        stream.count()

    def _own(self, X: Tensor) -> Tensor:
        """This process's entries of whole vectors [p, k]."""
        f = self.stream.f
        parts = [f.own_parts(self.space.unflatten(x)).values() for x in X.T]
        return torch.stack([torch.cat([t.reshape(-1) for t in some]) for some in parts], 1)

    def _join(self, X: Tensor) -> Tensor:
        """Whole vectors of the entries of all processes."""
        with self.stream.team:
            return torch.stack([self.space.flatten(self.stream.f.put_together(x)) for x in X.T], 1)

    @arithmetic("float32")
    def _matmat(self, X: Tensor) -> Tensor:
        f, team, out = self.stream.f, self.stream.team, torch.zeros_like(X)
        with team:
            self._add_products(out, [f.own_views(x) if f.shards is not None else self.space.unflatten(x) for x in X.T])
            if f.shards is None:
                team.sum(out)
        return out / self.stream.stream.n

    def _add_products(self, out: Tensor, columns: list[Params]) -> None:
        """Add those of this process's examples, or of all to its own parameters."""
        f, family = self.stream.f, self.family
        for batch in self.stream.batches():
            params = leaves(f)
            ps = list(params.values())
            with torch.enable_grad(), differentiable_attention(), without_cudnn():
                losses = family.losses(f(params, batch.part.inputs), batch.y)
                check_finite(losses, "the loss")
                grads = torch.autograd.grad(
                    losses.sum() * (not batch.idle), ps, create_graph=True, allow_unused=True, materialize_grads=True
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


@checked
def hessian(
    model: nn.Module,
    data: Any,
    representation: Literal["implicit", "dense"] = "implicit",
    loss: Loss = "ce",
    *,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: str = "float32",
    class_dim: ClassDim | None = None,
    max_memory: str | int | None = None,
    group: Any = None,
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
        class_dim: axis of the classes in the model's output, 1 or -1, found as by `bs.fisher` if None.
        max_memory: budget for the dense form.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, and later every
            product, with the same network, data and vectors; each runs its share of the data through the network. Of a
            network that `fully_shard` has spread out, vectors may be dicts of DTensors, and stay in parts.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> H = hessian(net, (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])))
        >>> (H @ torch.ones(8)).shape
        torch.Size([8])
    """
    team = processes(group)
    with team:
        f = functional(model, params, output, precision, team)
        source = Stream(f, data, Cut(what="data", team=team))
        space = ParameterSpace.of(f)
        family = LossFamily(output_shape(source, class_dim), loss)
        limit = None if max_memory is None else parse_bytes(max_memory)
        stream = Pass(source, Anatomy((), (), family.shape.total, 1), family, 0, limit)
        why = "second derivatives of the loss"
        plan = Plan(representation, tuple((k, s, representation, why) for k, s in space.shapes.items()))
        info: dict[str, Any] = {"what": "Hessian", "loss": loss if isinstance(loss, str) else "user-supplied"}
        H = HessianMetric(space, stream, family, plan, info)
        info["n"] = stream.stream.n
    if representation == "implicit":
        return H
    need = 2 * space.size**2 * space.dtype.itemsize
    if need > stream.limit:
        raise InputError(f"a dense Hessian needs {readable(need)}, of {readable(stream.limit)}: use 'implicit'")
    whole = H.to_dense()
    return BlockMetric(space, [DensePiece(tuple(space.shapes), (whole + whole.T) / 2)], plan, info)
