"""Which parameters a Kronecker factor covers, and how a module's calls become the factor's sums.

A *unit* is one weight matrix with its bias (or, under SUA, the weight and the bias apart). Everything else is named
with the reason why no factor covers it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from biascope.curvature.kronecker import Homogeneous, Sharing
from biascope.curvature.passes import Chunk
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.plan import Unit
from biascope.network.layers.blocks import Block, MatrixFactor
from biascope.network.layers.rules import Conv, Embedding, MatrixRule, Sizes, rule_of
from biascope.network.shards import local
from biascope.optim.hooks import Call
from biascope.support.errors import InputError, UnsupportedError


class Offset(MatrixRule):
    """A bias by itself: one input that is always 1, one position per example."""

    kind = "bias"

    def __init__(self, rule: MatrixRule) -> None:
        self.rule, self.groups = rule, getattr(rule, "groups", 1)

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
    sharing: Sharing
    sua: bool
    diagonal: bool = False  # whether A is a diagonal: of an embedding, or of a layer too wide for more

    @cached_property
    def name(self) -> str:
        """The unit is called after its first parameter."""
        return self.names[0]

    @cached_property
    def layout(self) -> Homogeneous:
        """How the unit's parameters and the factors correspond."""
        shape, groups = self.parameters[0].shape, getattr(self.rule, "groups", 1)
        offsets = math.prod(shape[2:]) if self.sua else 1
        d_out, d_in = shape[0] // groups, math.prod(shape[1:]) // offsets  # of a bias: one input
        if self.rule.input_major:
            d_out, d_in = d_in, d_out
        return Homogeneous(groups, d_out, d_in, offsets, len(self.names) == 2, self.rule.input_major)

    @property
    def form(self) -> tuple[object, ...]:
        """Units of the same form are stepped together."""
        return (
            self.layout,
            *((p.shape, p.dtype, p.device) for p in self.parameters),
            self.sua,
            self.diagonal,
            self.rule.kind,
        )

    @property
    def space(self) -> ParameterSpace:
        """Shapes, device and the precision of the factors (float64 for a float64 weight, else float32)."""
        first = self.parameters[0]
        shapes = {name: tuple(p.shape) for name, p in zip(self.names, self.parameters)}
        return ParameterSpace(shapes, precision(first), first.device)

    def gradient(self) -> Tensor:
        """The `.grad`s, flat [p, 1] in the factors' precision."""
        grads = [local(p.grad.detach()).reshape(-1, 1) for p in self.parameters if p.grad is not None]
        return torch.cat(grads).to(precision(self.parameters[0]))

    def tensors(self, call: Call) -> tuple[Tensor, Tensor]:
        """Input (padded, where the module does that itself) and output gradient of a call, [n, m, ...] each."""
        x, g, first = call.input, call.grad, self.parameters[0]
        least = self.module.weight.dim() if isinstance(self.module, _ConvNd) else 2
        if x is None or g is None or (x.dim() < least and x.is_floating_point()):
            raise InputError(f"{self.name} got an input without a batch dimension; add one")
        if x.device != first.device or g.device != first.device:
            raise InputError(f"{self.name} is on {first.device}, its input on {x.device}: move one of them")
        dtype, x = precision(first), pad(self.module, x)
        x = x.to(dtype) if x.is_floating_point() else x
        return call.layout.example_major(x, call.examples), call.layout.example_major(g.to(dtype), call.examples)

    def chunk(self, calls: list[Call]) -> tuple[Unit, Chunk]:
        """Calls of the same examples as what the curvature's sums add."""
        pairs = [self.tensors(call) for call in calls]
        inputs, grads = [a for a, _ in pairs], [g[None] for _, g in pairs]
        each = [self.rule.sizes(a.shape, g.shape) for a, g in pairs]
        joined = replace(each[0], positions=sum(sizes.positions for sizes in each))
        block = Block("matrix", self.names, tuple(range(len(calls))), f"{self.rule.kind} rule", joined, rule=self.rule)
        factor = MatrixFactor(block, [self.rule] * len(calls), inputs, grads)
        unit = Unit(self.names, (block,), "kfac", block.reason, self.sharing, self.sua)
        return unit, Chunk({self.names: factor}, calls[0].examples, range(1), True)


def precision(parameter: Tensor) -> torch.dtype:
    """Of the factors: float64 for a float64 parameter, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def pad(module: nn.Module, x: Tensor) -> Tensor:
    """What a convolution with reflecting, circular or replicated borders does to its input first."""
    if isinstance(module, _ConvNd) and module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    return x


def find_units(
    model: nn.Module, wanted: Collection[nn.Parameter] | None, sharing: Sharing, sua: bool, widest: float = math.inf
) -> tuple[list[LayerUnit], dict[str, str]]:
    """The units among the wanted parameters, and for every other wanted parameter the reason why it is in none.

    Convolutions with more than `widest` inputs (channels times offsets) get SUA, other layers a diagonal A.
    """
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError("DataParallel copies the network for every call: use DistributedDataParallel")
    chosen = None if wanted is None else {id(p) for p in wanted}
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                if is_lazy(p) or p.is_meta:
                    raise InputError(
                        f"{prefix or type(module).__name__} has no values yet: "
                        + ("load its weights" if p.is_meta else "run a batch through the network first, net(x[:2])")
                    )
                owners.setdefault(id(p), []).append(prefix)
    units: list[LayerUnit] = []
    left: dict[str, str] = {}
    for module in model.modules():
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
        if isinstance(rule, str):
            left |= {names[id(p)]: rule for p in mine.values()}
            continue
        extents = mine["weight"].shape if "weight" in mine else (0,)
        inputs = extents[0] if rule.input_major else math.prod(extents[1:])
        wide = "weight" in mine and not isinstance(rule, Embedding) and inputs > widest
        offsets = isinstance(rule, Conv) and (sua or wide)
        apart = "weight" not in mine or offsets
        together = [r for r in ("weight", "bias") if r in mine and not (apart and r == "bias")]
        if together:
            shares: Sharing = "expand" if isinstance(rule, Embedding) else sharing
            own = tuple(mine[role] for role in together)
            called = tuple(names[id(p)] for p in own)
            diagonal = isinstance(rule, Embedding) or (wide and not offsets)
            units.append(LayerUnit(called, own, module, rule, shares, offsets, diagonal))
        if apart and "bias" in mine:
            bias = mine["bias"]
            units.append(LayerUnit((names[id(bias)],), (bias,), module, Offset(rule), "expand", False))
    return units, left
