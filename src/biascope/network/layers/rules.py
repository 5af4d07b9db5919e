"""How one layer's share of the Jacobian follows from its input and its output's gradient.

Shapes, once and for all. A *use* is one call of a torch function with a differentiated parameter. Its saved input `a`
and its output's gradient `g` arrive example-major as [n, m, ...] (m > 1 where the model folded another axis, such as
time, into the batch). Two families:

- **matrix rules** (linear, convolution, embedding): the weight's gradient is a sum over T positions of outer products,
      dW_i = sum_t  G_i[:, t] A_i[:, t]^T   with   A [n, groups, d_in, T],   G [n, groups, d_out, T],
  so that Gram matrices can be contracted without ever forming dW.
- **row rules** (normalisation, broadcast sums and products): the gradient is small; it is formed at once as [n, p].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of a matrix rule: groups, inputs and outputs per group, positions per example."""

    groups: int
    d_in: int
    d_out: int
    positions: int


class MatrixRule:
    """dW_i = sum_t G_i[:, t] A_i[:, t]^T; `input_major` weights are stored as [d_in, d_out]."""

    kind = "matrix"
    input_major = False
    bias_shares_positions = True  # the bias sees the same positions t as the weight (False for transposed convolutions)
    modules: ClassVar[tuple[type[nn.Module], ...]] = ()  # whose forward is one call with this rule (see `rule_of`)

    @classmethod
    def of(cls, module: Any) -> MatrixRule | str:
        """The rule of one of the `modules`, or the reason why it does not hold."""
        return cls()

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:
        """May the batch lie along axis a of the input and g of the output's `ndim`? There must be no features there."""
        return a == g == 0

    def operand(self, a: Tensor) -> Tensor:
        """A [n, groups, d_in, T] from the saved input [n, m, ...]."""
        raise AssertionError("a matrix rule gives its operand")

    def cotangent(self, g: Tensor) -> Tensor:
        """G [n, groups, d_out, T] from the output's gradient [n, m, ...]."""
        raise AssertionError("a matrix rule gives its cotangent")

    def cotangents(self, g: Tensor) -> Tensor:
        """G [k, n, groups, d_out, T] from k gradients of the output [k, n, m, ...]."""
        G = self.cotangent(g.flatten(0, 1))
        return G.reshape(len(g), -1, *G.shape[1:])

    def bias_rows(self, g: Tensor) -> Tensor:
        """Per-example gradient of the bias [n, d_out * groups]."""
        return self.cotangent(g).sum(-1).flatten(1)

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:
        """Sizes from the shapes of a and g (both [n, m, ...]), without forming anything."""
        raise AssertionError("a matrix rule gives its sizes")

    def weight_rows(self, a: Tensor, g: Tensor) -> Tensor:
        """Per-example gradient of the weight, flat in the parameter's own order [n, p]."""
        return matrix_rows(self.operand(a), self.cotangent(g), self.input_major)

    def signature(self) -> tuple[object, ...]:
        """Uses of one parameter whose signatures agree can be joined along the positions."""
        return (type(self).__name__, self.input_major)


def matrix_rows(A: Tensor, G: Tensor, input_major: bool) -> Tensor:
    """sum_t G_t A_t^T, flat: [n, p]."""
    dW = A @ G.mT if input_major else G @ A.mT
    return dW.flatten(1)


class Linear(MatrixRule):
    """F.linear(x, W, b) with any leading dimensions; W [d_out, d_in]."""

    kind = "linear"
    modules = (nn.Linear,)

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:  # noqa: D102
        return g < ndim - 1 and a is not None and a < ndim - 1

    def operand(self, a: Tensor) -> Tensor:  # noqa: D102
        return a.reshape(a.shape[0], -1, a.shape[-1]).mT[:, None]

    def cotangent(self, g: Tensor) -> Tensor:  # noqa: D102
        return self.operand(g)

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:  # noqa: D102
        return Sizes(1, a[-1], g[-1], prod(a[1:-1]))


class MatMul(Linear):
    """X @ W with W [d_in, d_out] (also torch.addmm, the Conv1D of GPT-2)."""

    kind = "matmul"
    input_major = True


def _pairs(v: int | tuple[int, ...], n: int) -> tuple[int, ...]:
    values = (v,) if isinstance(v, int) else tuple(v)
    return values * n if len(values) == 1 else values


def unfold(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int,
    limit: tuple[int, ...] | None = None,
) -> Tensor:
    """Patches of x [N, C, *spatial] as [N, groups, C/groups * prod(kernel), T]; at most `limit` positions per axis."""
    nd = len(kernel)
    if prod(kernel) == 1 and limit is None and all(s == 1 for s in stride) and not any(map(sum, padding)):
        return x.reshape(x.shape[0], groups, -1, prod(x.shape[2:]))
    if any(map(sum, padding)):
        x = F.pad(x, [p for pair in reversed(padding) for p in pair])
    for d in range(nd):  # each unfold appends the window as a last dimension
        x = x.unfold(2 + d, (kernel[d] - 1) * dilation[d] + 1, stride[d])[..., :: dilation[d]]
        if limit is not None:
            x = x.narrow(2 + d, 0, min(limit[d], x.shape[2 + d]))
    x = x.movedim(tuple(range(2, 2 + nd)), tuple(range(-nd, 0)))  # [N, C, *kernel, *out]
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * prod(kernel), prod(x.shape[-nd:]))


@dataclass(frozen=True)
class Conv(MatrixRule):
    """F.conv1d/2d/3d; W [d_out, C/groups, *kernel]. Padding modes other than zeros arrive already padded."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    kind = "conv"
    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    @classmethod
    def of(cls, module: Any) -> MatrixRule | str:
        """Reflecting, circular and replicated borders are padded before."""
        padding = module.padding if module.padding_mode == "zeros" else 0
        return cls.parse(module.weight, module.stride, padding, module.dilation, module.groups)

    @staticmethod
    def parse(
        weight: Tensor,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> Conv:
        """Read the arguments as F.conv*d does."""
        kernel = tuple(weight.shape[2:])
        nd = len(kernel)
        dil = _pairs(dilation, nd)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dil, kernel)]
            pads = tuple((t // 2, t - t // 2) for t in total)
        else:
            pads = tuple((p, p) for p in _pairs(0 if isinstance(padding, str) else padding, nd))
        return Conv(kernel, _pairs(stride, nd), pads, dil, groups)

    def operand(self, a: Tensor) -> Tensor:  # noqa: D102
        patches = unfold(a.flatten(0, 1), self.kernel, self.stride, self.padding, self.dilation, self.groups)
        return _by_example(patches, *a.shape[:2])

    def cotangent(self, g: Tensor) -> Tensor:  # noqa: D102
        return _by_example(_in_groups(g, self.groups), *g.shape[:2])

    def cotangents(self, g: Tensor) -> Tensor:  # noqa: D102
        if g.shape[2] > 1:
            return super().cotangents(g)
        return g.reshape(*g.shape[:2], self.groups, g.shape[3] // self.groups, -1)  # of some examples, still a view

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:  # noqa: D102
        gr = self.groups
        return Sizes(gr, a[2] // gr * prod(self.kernel), g[2] // gr, g[1] * prod(g[3:]))

    def signature(self) -> tuple[object, ...]:  # noqa: D102
        return ("Conv", self.groups)


@dataclass(frozen=True)
class ConvTranspose(MatrixRule):
    """F.conv_transpose1d/2d/3d; W [C_in, C_out/groups, *kernel]. The gradient is unfolded instead of the input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    spatial: tuple[int, ...]
    kind = "conv_transpose"
    input_major = True
    bias_shares_positions = False

    @staticmethod
    def parse(
        x: Tensor,
        weight: Tensor,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        dilation: int | tuple[int, ...] = 1,
    ) -> ConvTranspose:
        """Read the arguments as F.conv_transpose*d does (output_padding only adds positions that are not read)."""
        kernel = tuple(weight.shape[2:])
        nd = len(kernel)
        pads = tuple((p, p) for p in _pairs(padding, nd))
        return ConvTranspose(
            kernel, _pairs(stride, nd), pads, _pairs(dilation, nd), groups, tuple(x.shape[x.dim() - nd :])
        )

    def operand(self, a: Tensor) -> Tensor:  # noqa: D102
        return _by_example(_in_groups(a, self.groups), *a.shape[:2])

    def cotangent(self, g: Tensor) -> Tensor:  # noqa: D102
        G = unfold(g.flatten(0, 1), self.kernel, self.stride, self.padding, self.dilation, self.groups, self.spatial)
        return _by_example(G, *g.shape[:2])

    def bias_rows(self, g: Tensor) -> Tensor:  # noqa: D102
        return g.flatten(3).sum((1, 3)) if g.dim() > 3 else g.sum(1)

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:  # noqa: D102
        gr = self.groups
        return Sizes(gr, a[2] // gr, g[2] // gr * prod(self.kernel), a[1] * prod(a[3:]))

    def signature(self) -> tuple[object, ...]:  # noqa: D102
        return ("ConvTranspose", self.groups)


def _in_groups(t: Tensor, groups: int) -> Tensor:
    """[n, m, groups*d, ...] -> [n*m, groups, d, L]."""
    return t.reshape(t.shape[0] * t.shape[1], groups, t.shape[2] // groups, -1)


def _by_example(t: Tensor, n: int, m: int) -> Tensor:
    """[n*m, groups, d, L] -> [n, groups, d, m*L]."""
    return t if m == 1 else t.reshape(n, m, *t.shape[1:]).movedim(1, -2).flatten(-2)


@dataclass(frozen=True)
class Embedding(MatrixRule):
    """F.embedding; W [vocabulary, d]. The operand is one-hot; it is kept as indices and compared, never formed."""

    vocabulary: int
    padding_idx: int | None
    kind = "embedding"
    input_major = True
    modules = (nn.Embedding,)

    @classmethod
    def of(cls, module: Any) -> MatrixRule | str:  # noqa: D102
        if module.sparse or module.max_norm or module.scale_grad_by_freq:
            return "an embedding with sparse gradients, max_norm or scale_grad_by_freq"
        return cls(module.num_embeddings, module.padding_idx)

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:  # noqa: D102
        return g < ndim - 1

    def indices(self, a: Tensor) -> Tensor:
        """Token indices [n, T]; the padding token, which gets no gradient, is -1."""
        idx = a.flatten(1)
        return idx if self.padding_idx is None else idx.masked_fill(idx == self.padding_idx % self.vocabulary, -1)

    def operand(self, a: Tensor) -> Tensor:  # noqa: D102
        idx = self.indices(a)
        hot = F.one_hot(idx.clamp_min(0), self.vocabulary) * (idx >= 0)[..., None]
        return hot.mT[:, None].to(torch.get_default_dtype())

    def cotangent(self, g: Tensor) -> Tensor:  # noqa: D102
        return g.reshape(g.shape[0], -1, g.shape[-1]).mT[:, None]

    def weight_rows(self, a: Tensor, g: Tensor) -> Tensor:  # noqa: D102
        idx = self.indices(a)
        G = g.reshape(g.shape[0], -1, g.shape[-1]) * (idx >= 0)[..., None]
        rows = G.new_zeros(G.shape[0], self.vocabulary, G.shape[-1])
        return rows.scatter_add_(1, idx.clamp_min(0)[..., None].expand_as(G), G).flatten(1)

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:  # noqa: D102
        return Sizes(1, self.vocabulary, g[-1], prod(a[1:]))

    def signature(self) -> tuple[object, ...]:  # noqa: D102
        return ("Embedding", self.padding_idx)


def rule_of(module: nn.Module) -> MatrixRule | str:
    """The rule of a module by itself, or the reason why it has none."""
    kind = type(module)
    for rule in MatrixRule.__subclasses__():
        for base in rule.modules:
            if isinstance(module, base):
                return rule.of(module) if kind.forward is base.forward else f"{kind.__name__} has a forward of its own"
    if f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D":  # of GPT-2
        return MatMul()
    return f"{kind.__name__} has no Kronecker factors"


class RowRule:
    """The gradient of a small parameter, formed at once."""

    kind = "rows"

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:
        """As of matrix rules."""
        raise AssertionError("a row rule knows where examples lie")

    def rows(self, role: str, a: Tensor | None, g: Tensor, dim: int) -> Tensor:
        """Per-example gradients [k, n, p] from a [n, m, ...] and g [k, n, m, ...].

        `role` says which parameter, `dim` where the model itself keeps the batch.
        """
        raise AssertionError("a row rule gives its rows")


@dataclass(frozen=True)
class Affine(RowRule):
    """xhat * w + b after a normalisation; `shape` is w's. Channels stand first (BatchNorm) or last (LayerNorm)."""

    shape: tuple[int, ...]
    channels_first: bool
    kind = "affine"

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:  # noqa: D102
        return g == 0 if self.channels_first else g < ndim - len(self.shape)

    def rows(self, role: str, a: Tensor | None, g: Tensor, dim: int) -> Tensor:  # noqa: D102
        t = g if role == "bias" or a is None else g * a
        if self.channels_first:  # [k, n, m, C, *spatial]
            return t.reshape(*t.shape[:4], -1).sum((2, 4))
        return t.reshape(*t.shape[:2], -1, prod(self.shape)).sum(2)


@dataclass(frozen=True)
class Broadcast(RowRule):
    """X + p, x - p, x * p, p.expand(...): sum the output's gradient back to the parameter's shape."""

    shape: tuple[int, ...]
    sign: float
    kind = "broadcast"

    def batch_fits(self, a: int | None, g: int, ndim: int) -> bool:
        """The parameter itself must not extend along the batch."""
        at = g - (ndim - len(self.shape))
        return at < 0 or self.shape[at] == 1

    def rows(self, role: str, a: Tensor | None, g: Tensor, dim: int) -> Tensor:  # noqa: D102
        t = g if a is None else g * a
        t = t.movedim(2, 2 + dim)  # put the batch back where the model had it, as the m entries of one example
        lead = t.dim() - 2 - len(self.shape)
        shape = (1,) * lead + self.shape
        dims = [d + 2 for d, s in enumerate(shape) if s == 1 and t.shape[d + 2] != 1]
        if dims:
            t = t.sum(dims, keepdim=True)
        return self.sign * t.reshape(*t.shape[:2], -1)
