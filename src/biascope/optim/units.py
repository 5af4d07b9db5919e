"""Which parameters a Kronecker factor covers, and how a module's calls become the factor's sums.

A *unit* is one weight matrix with its bias (or, under SUA, the weight and the bias apart). Everything else is named
with the reason why no factor covers it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from biascope.curvature.accumulate import Chunk
from biascope.curvature.kronecker import Homogeneous
from biascope.curvature.plan import Unit
from biascope.curvature.space import ParameterSpace
from biascope.errors import InputError, UnsupportedError
from biascope.layers import Block, MatrixFactor
from biascope.layers.rules import Conv, Embedding, Linear, MatrixRule, Sizes
from biascope.optim.hooks import Call

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Offset(MatrixRule):
    """A bias by itself: one input that is always 1, one position per example."""

    kind = "bias"

    def __init__(self, rule: MatrixRule, groups: int) -> None:
        self.rule, self.groups = rule, groups

    def operand(self, a: Tensor) -> Tensor:  # noqa: D102
        return a.new_ones(a.shape[0], self.groups, 1, 1)

    def cotangent(self, g: Tensor) -> Tensor:  # noqa: D102
        return self.rule.cotangent(g).sum(-1, keepdim=True)

    def sizes(self, a: torch.Size, g: torch.Size) -> Sizes:  # noqa: D102
        z = self.rule.sizes(a, g)
        return Sizes(z.groups, 1, z.d_out, 1)


@dataclass(frozen=True)
class LayerUnit:
    """Parameters `names` of one module that share a pair of Kronecker factors."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    module: nn.Module
    rule: MatrixRule
    sharing: str
    sua: bool

    @cached_property
    def name(self) -> str:
        """The unit is called after its first parameter."""
        return self.names[0]

    @cached_property
    def layout(self) -> Homogeneous:
        """How the unit's parameters and the factors correspond."""
        return layout_of(self)

    @property
    def form(self) -> tuple[object, ...]:
        """Units of the same form are stepped together."""
        return (self.layout, *((p.shape, p.dtype, p.device) for p in self.parameters), self.sua, self.rule.kind)

    @property
    def space(self) -> ParameterSpace:
        """Shapes, device and the precision of the factors (float64 for a float64 weight, else float32)."""
        first = self.parameters[0]
        shapes = {name: tuple(p.shape) for name, p in zip(self.names, self.parameters)}
        return ParameterSpace(shapes, precision(first), first.device)

    def gradient(self) -> Tensor | None:
        """The `.grad`s, flat [p, 1] in the factors' precision; None where one is missing."""
        grads = [p.grad for p in self.parameters]
        if any(g is None for g in grads):
            return None
        dtype = precision(self.parameters[0])
        return torch.cat([g.detach().reshape(-1, 1).to(dtype) for g in grads if g is not None])

    def tensors(self, call: Call) -> tuple[Tensor, Tensor]:
        """Input (padded, where the module does that itself) and output gradient of a call in the factors' precision."""
        x, g, first = call.input, call.grad, self.parameters[0]
        assert x is not None
        assert g is not None
        flat = x.dim() < 2 and x.is_floating_point()
        if flat or (isinstance(self.module, CONVS) and x.dim() != self.module.weight.dim()):
            raise InputError(f"{self.name} got an input {list(x.shape)} without a batch dimension; add one")
        if x.device != first.device or g.device != first.device:
            raise InputError(f"{self.name} is on {first.device}, its input on {x.device}: move one of them")
        if call.second:
            x, g = x.transpose(0, 1), g.transpose(0, 1)
        dtype, x = precision(first), pad(self.module, x)
        return x.to(dtype) if x.is_floating_point() else x, g.to(dtype)

    def chunk(self, calls: list[Call]) -> tuple[Unit, Chunk]:
        """Calls of the same examples as what the curvature's sums add."""
        n = calls[0].examples
        inputs, grads, positions, sizes = [], [], 0, None
        for call in calls:
            x, g = self.tensors(call)
            a, g = x.reshape(n, -1, *x.shape[1:]), g.reshape(n, -1, *g.shape[1:])
            sizes = self.rule.sizes(a.shape, g.shape)
            positions += sizes.positions
            inputs.append(a)
            grads.append(g[None])
        assert sizes is not None
        joined = Sizes(sizes.groups, sizes.d_in, sizes.d_out, positions)
        block = Block("matrix", self.names, tuple(range(len(calls))), f"{self.rule.kind} rule", joined)
        factor = MatrixFactor(block, [self.rule] * len(calls), inputs, grads)
        unit = Unit(self.names, (block,), "kfac", block.reason, self.sharing, self.sua)
        return unit, Chunk({self.names: factor}, n, range(1), True)


def precision(parameter: Tensor) -> torch.dtype:
    """Of the factors: float64 for a float64 parameter, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def pad(module: nn.Module, x: Tensor) -> Tensor:
    """What a convolution with reflecting, circular or replicated borders does to its input first."""
    if isinstance(module, _ConvNd) and module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    return x


def rule_of(module: nn.Module) -> MatrixRule | str:
    """The rule of a module, or the reason why it has none."""
    kind = type(module)
    if isinstance(module, nn.Linear):
        return Linear() if kind.forward is nn.Linear.forward else f"{kind.__name__} has a forward of its own"
    if isinstance(module, CONVS):
        base = next(c for c in CONVS if isinstance(module, c))
        if kind.forward is not base.forward:
            return f"{kind.__name__} has a forward of its own"
        padding: str | tuple[int, ...] = 0 if module.padding_mode != "zeros" else module.padding  # type: ignore[assignment]
        return Conv.parse(module.weight, module.stride, padding, module.dilation, module.groups)
    if isinstance(module, nn.Embedding):
        if kind.forward is not nn.Embedding.forward or module.sparse or module.max_norm or module.scale_grad_by_freq:
            return "an embedding with sparse gradients, max_norm, scale_grad_by_freq or a forward of its own"
        return Embedding(module.num_embeddings, module.padding_idx)
    return f"{kind.__name__} has no Kronecker factors"


def find_units(
    model: nn.Module, wanted: Collection[nn.Parameter] | None, sharing: str, sua: bool
) -> tuple[list[LayerUnit], dict[str, str]]:
    """The units among the wanted parameters, and for every other wanted parameter the reason why it is in none."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UnsupportedError(
            f"{type(model).__name__}: every process would see factors of its own batch only and the copies would "
            "drift apart; train on one device"
        )
    if sharing not in ("expand", "reduce"):
        raise InputError(f"sharing={sharing!r}: expand or reduce")
    chosen = None if wanted is None else {id(p) for p in wanted}
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                if is_lazy(p) or p.is_meta:
                    raise InputError(
                        f"{prefix or type(module).__name__} has no values yet; run or load the model first"
                    )
                owners.setdefault(id(p), []).append(prefix)
    units: list[LayerUnit] = []
    left: dict[str, str] = {}
    for prefix, module in model.named_modules():
        mine = {
            role: p
            for role, p in module._parameters.items()
            if p is not None and p.requires_grad and (chosen is None or id(p) in chosen)
        }
        if not mine:
            continue
        rule = rule_of(module)
        shared = [p for p in mine.values() if len(owners[id(p)]) > 1]
        if isinstance(rule, MatrixRule) and shared:
            rule = f"{names[id(shared[0])]} is tied: {' and '.join(owners[id(shared[0])])} share it"
        if isinstance(rule, MatrixRule) and len({p.device for p in mine.values()}) > 1:
            raise InputError(
                f"{prefix}: weight and bias are on different devices ({[p.device for p in mine.values()]})"
            )
        if isinstance(rule, str):
            left |= {names[id(p)]: rule for p in mine.values()}
            continue
        groups = rule.groups if isinstance(rule, Conv) else 1
        apart = "weight" not in mine or (sua and isinstance(rule, Conv))
        together = [r for r in ("weight", "bias") if r in mine and not (apart and r == "bias")]
        if together:
            shares = "expand" if isinstance(rule, Embedding) else sharing
            units.append(_unit(names, mine, together, module, rule, shares, sua and isinstance(rule, Conv)))
        if apart and "bias" in mine:
            units.append(_unit(names, mine, ["bias"], module, Offset(rule, groups), "expand", False))
    return units, left


def _unit(
    names: dict[int, str],
    mine: dict[str, nn.Parameter],
    roles: list[str],
    module: nn.Module,
    rule: MatrixRule,
    sharing: str,
    sua: bool,
) -> LayerUnit:
    parameters = tuple(mine[role] for role in roles)
    return LayerUnit(tuple(names[id(p)] for p in parameters), parameters, module, rule, sharing, sua)


def layout_of(unit: LayerUnit) -> Homogeneous:
    """How the unit's parameters and the factors correspond."""
    shape, rule = unit.parameters[0].shape, unit.rule
    if rule.kind == "embedding":
        return Homogeneous(1, shape[1], shape[0], 1, False, True)
    groups = getattr(rule, "groups", 1)
    bias = len(unit.names) == 2
    if rule.kind == "bias":
        return Homogeneous(groups, shape[0] // groups, 1)
    offsets = math.prod(shape[2:])
    if unit.sua and offsets > 1:
        return Homogeneous(groups, shape[0] // groups, shape[1], offsets, bias)
    return Homogeneous(groups, shape[0] // groups, shape[1] * offsets, 1, bias)
