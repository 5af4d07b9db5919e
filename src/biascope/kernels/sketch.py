"""Sketched kernels: tangent features J R / sqrt(dim) with a random R that is drawn from a seed and never stored.

K = J J^T is estimated by features times features^T. The `dim` coordinates are independent and each gives an unbiased
estimate of K on its own, so their scatter is the standard error of their mean.

Matrix blocks have a structure: their share of a row of J is M = sum_t g_t a_t^T. With `factored=True` a coordinate is
r^T M s with independent r and s, at a cost of d_out + d_in random numbers instead of d_out * d_in. It is as unbiased
(E r^T M s r^T N s = <M, N>), but varies more: a diagonal entry has variance (2 ||M||_F^4 + 6 tr (M^T M)^2) / dim for
Gaussian numbers, between 1 and 4 times the unstructured 2 ||M||_F^4 / dim. Blocks are independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.kernels.empirical import Outputs, collect, cotangents
from biascope.kernels.kernel import SHOWN_UP_TO, Kernel
from biascope.network.functional import ParamSelection, functional
from biascope.network.layers.blocks import Factor, MatrixFactor, RowsFactor
from biascope.network.stream import Cut, Stream, anatomy
from biascope.support.errors import InputError
from biascope.support.precision import Precision, arithmetic
from biascope.support.processes import processes
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts, one_line

WORK = 1 << 26  # bytes of scratch
Kind = Literal["rademacher", "gaussian", "sparse"]


@dataclass(frozen=True)
class SketchedKernel:
    """Sketched tangent features of some examples.

    features [n, k, dim] for k outputs: `features @ features^T` estimates K. Two sketches of the same network with the
    same seed share their random numbers: `a.kernel(b)` is the cross kernel.
    """

    features: Tensor
    outputs: str | int
    mode: str
    kind: str
    seed: int
    factored: bool
    columns: tuple[tuple[str, int], ...]  # parameters and their sizes
    model_outputs: int | None = None
    __repr__ = one_line

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.features.shape[2]

    def _repr_html_(self) -> str:
        """Size, seed and, of a small kernel, the estimated error, for notebooks."""
        n, k, dim = self.features.shape
        rows: dict[str, object] = {
            "examples": n,
            "outputs": k,
            "coordinates": dim,
            "kind": self.kind,
            "seed": self.seed,
        }
        rows["parameters"] = sum(size for _, size in self.columns)
        rows |= {"relative error": f"{self.kernel().error:.2g}"} if n * k <= SHOWN_UP_TO and dim > 1 else {}
        return facts(f"Sketched tangent kernel, outputs = {self.outputs}", rows)

    @checked
    def kernel(self, other: SketchedKernel | None = None) -> Kernel:
        """The estimated kernel, K(x, x) or K(x, other's x); `K.error` is its estimated relative Frobenius error."""
        values = self._values(other)
        error = self._errors(other).double().norm() / values.double().norm()
        c = self.model_outputs
        return Kernel(values, self.outputs, self.mode, other is None, error=float(error), model_outputs=c)

    @checked
    def standard_error(self, other: SketchedKernel | None = None) -> Tensor:
        """Standard error of every entry of `kernel(other).tensor`, from the scatter of the coordinates."""
        return Kernel(self._errors(other), self.outputs, self.mode, other is None).tensor

    def _pair(self, other: SketchedKernel | None) -> tuple[Tensor, Tensor]:
        if other is None:
            return self.features, self.features
        mine = (self.mode, self.outputs, self.dim, self.kind, self.seed, self.factored, self.columns)
        theirs = (other.mode, other.outputs, other.dim, other.kind, other.seed, other.factored, other.columns)
        names = ("mode", "outputs", "dim", "kind", "seed", "factored", "parameters")
        for name, a, b in zip(names, mine, theirs):
            if a != b:
                raise InputError(f"the two sketches differ in {name} ({a!r} and {b!r}): their features do not fit")
        return self.features, other.features

    def _values(self, other: SketchedKernel | None) -> Tensor:
        A, B = self._pair(other)
        if self.mode == "trace":
            return A.flatten(1) @ B.flatten(1).mT
        a, b = A.transpose(0, 1), B.transpose(0, 1)  # [k, n, dim]
        if self.mode == "diagonal":
            return a @ b.mT
        return (a.flatten(0, 1) @ b.flatten(0, 1).mT).view(a.shape[0], a.shape[1], b.shape[0], b.shape[1])

    def _errors(self, other: SketchedKernel | None) -> Tensor:
        A, B = self._pair(other)
        dim = self.dim
        if self.mode == "trace":
            square = torch.zeros(len(A), len(B), dtype=A.dtype, device=A.device)
            for d in range(dim):
                square.addcmul_(P := A[:, :, d] @ B[:, :, d].mT, P, value=dim)
        else:
            square = dim * replace(self, features=A.square())._values(replace(self, features=B.square()))
        return ((square - self._values(other).square()).clamp_min(0) / (dim - 1)).sqrt()


@checked
def sketched_ntk(
    model: nn.Module,
    x: Any,
    dim: int = 1024,
    kind: Kind = "rademacher",
    seed: int = 0,
    outputs: Outputs = "full",
    params: ParamSelection = None,
    *,
    factored: bool = True,
    output: Callable[[Any], Tensor] | None = None,
    precision: Precision = "float32",
    batch_size: int = 64,
    group: Any = None,
) -> SketchedKernel:
    """Unbiased sketch of the tangent kernel: n * k * dim numbers instead of a kernel or a Jacobian.

    Args:
        model: any nn.Module whose examples do not mix.
        x: tensor, dict or re-iterable of batches.
        dim: coordinates; the standard error of an entry falls as 1 / sqrt(dim).
        kind: "rademacher" (signs), "gaussian", or "sparse": every coordinate adds up about sqrt(p) of the p entries of
            a parameter with random signs: few random numbers, but noisier where few entries carry the norm.
        seed: of the projection; the same for x and x2 for a cross kernel.
        outputs: as for `ntk`.
        params: which parameters to differentiate.
        factored: project inputs and gradients of a layer separately, see above; no effect on "sparse".
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        batch_size: examples per pass.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call with the same network
            and the same x; each runs its share through the network, and all get the whole result.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> sketch = sketched_ntk(net, torch.randn(5, 3), dim=256)
        >>> sketch.features.shape, sketch.kernel().tensor.shape
        (torch.Size([5, 2, 256]), torch.Size([5, 2, 5, 2]))
    """
    if dim < 2:
        raise InputError(f"dim={dim}: at least 2 coordinates are needed for a standard error")
    team = processes(group)
    with team:
        f = functional(model, params, output, precision, team)
        stream = Stream(f, x, Cut(batch_size, ordered=True, team=team))
        stream.count()
        found = anatomy(f, stream.first[0])
        mode, cot = cotangents(outputs, stream.outputs)
        features = torch.zeros(stream.n, len(cot), dim, dtype=f.dtype, device=f.device)
        draw = _Draw(kind, seed, dim)
        with torch.no_grad(), arithmetic(precision):
            for part in stream.parts():
                with torch.enable_grad():
                    factors = collect(f, found, found.blocks, part.inputs, cot)
                for factor in [] if part.idle else factors:
                    target = features[part.at].transpose(0, 1)
                    if factored and kind != "sparse" and isinstance(factor, MatrixFactor):
                        _factored(target, factor, draw)
                    else:
                        _rows(target, factor, draw)
        team.sum(features)
    features /= dim**0.5
    sizes = tuple((name, q.numel()) for name, q in f.params.items())
    return SketchedKernel(features, outputs, mode, kind, seed, factored and kind != "sparse", sizes, stream.outputs)


@dataclass(frozen=True)
class _Draw:
    """Random numbers by name: mean 0, variance 1, the same whenever they are asked for."""

    kind: str
    seed: int
    dim: int

    def dense(self, rows: int, like: Tensor, *name: object) -> Tensor:
        """[rows, dim]."""
        gen = generator(self.seed, "sketch", self.kind, *name)
        if self.kind == "gaussian":
            return torch.randn(rows, self.dim, generator=gen, device="cpu").to(like)
        return (torch.randint(0, 2, (rows, self.dim), generator=gen, dtype=torch.int8, device="cpu") * 2 - 1).to(like)

    def sparse(self, rows: int, like: Tensor, *name: object) -> Tensor:
        """[dim, rows], about sqrt(rows) random signs in every row, at places drawn with replacement."""
        gen = generator(self.seed, "sketch", self.kind, *name)
        m = max(1, round(rows**0.5))
        at = torch.randint(0, rows, (self.dim, m), generator=gen, device="cpu")
        sign = torch.randint(0, 2, (self.dim, m), generator=gen, dtype=torch.int8, device="cpu") * 2 - 1
        index = torch.stack([torch.arange(self.dim, device="cpu").repeat_interleave(m), at.flatten()])
        weight = sign.flatten().to(like.dtype) * (rows / m) ** 0.5
        return torch.sparse_coo_tensor(index, weight, (self.dim, rows), device=like.device, check_invariants=True)


def _factored(target: Tensor, x: MatrixFactor, draw: _Draw) -> None:
    """target [k, n, dim] += r^T M s for every group of channels."""
    size = x.block.matrix
    groups, d_in, d_out, T, dim = size.groups, size.d_in, size.d_out, size.positions, draw.dim
    like, name = target[0, 0], x.block.names[0]
    d = d_in + x.has_bias  # a bias is the weight of an input that is always 1
    R = draw.dense(groups * d_out, like, name, "out").view(groups, d_out, dim)
    S = draw.dense(groups * d, like, name, "in").view(groups, d, dim)
    forms_M = not x.block.is_embedding and x.k * d_out * d * (T + dim) < T * dim * (d + x.k * d_out)
    per_example = groups * ((d_out * (d + dim)) if forms_M else 2 * T * dim) * like.element_size()
    step = max(1, WORK // per_example)
    for start in range(0, x.n, step):
        s = slice(start, min(start + step, x.n))
        A = None if x.block.is_embedding else x.operand(s).mT  # [b, groups, T, d_in]
        if A is not None and x.has_bias:
            A = torch.cat([A, torch.ones_like(A[..., :1])], -1)
        projected = None if forms_M else _inputs(x, s, S) if A is None else A @ S
        for j in range(x.k):
            G = x.cotangent(j, s)  # [b, groups, d_out, T]
            if projected is None:
                assert A is not None
                target[j, s] += ((G @ A @ S) * R).sum((1, 2))
            else:
                target[j, s] += (projected * (G.mT @ R)).sum((1, 2))


def _inputs(x: MatrixFactor, s: slice, S: Tensor) -> Tensor:
    """Projected one-hot inputs of an embedding, [b, 1, T, dim]: rows of S."""
    at = x.indices(s)
    return (S[0, at.clamp_min(0)] * (at >= 0)[..., None])[:, None]


def _rows(target: Tensor, x: Factor, draw: _Draw) -> None:
    """target [k, n, dim] += rows R, the columns of every parameter in chunks."""
    like = target[0, 0]
    numel = x.block.numel
    step = x.n if isinstance(x, RowsFactor) else max(1, WORK // (x.k * numel * like.element_size()))
    for start in range(0, x.n, step):
        s = slice(start, min(start + step, x.n))
        for name, J in _parameter_rows(x, s):  # [k, b, p]
            if draw.kind == "sparse":
                R = draw.sparse(J.shape[2], like, name)
                target[:, s] += torch.sparse.mm(R, J.flatten(0, 1).mT).mT.view(x.k, -1, draw.dim)
                continue
            width = max(1, WORK // (draw.dim * like.element_size()))
            for c in range(0, J.shape[2], width):
                part = J[:, :, c : c + width]
                target[:, s] += part @ draw.dense(part.shape[2], like, name, c)


def _parameter_rows(x: Factor, s: slice) -> list[tuple[str, Tensor]]:
    """Rows of J [k, b, p] of every parameter of a block."""
    if isinstance(x, RowsFactor):
        return [(x.block.names[0], x.rows[:, s])]
    found = [(x.block.names[0], torch.stack([x.weight_rows(j, s) for j in range(x.k)]))]
    if x.has_bias:
        found.append((x.block.names[1], torch.stack([x.cotangent(j, s).sum(-1).flatten(1) for j in range(x.k)])))
    return found
