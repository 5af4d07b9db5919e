"""G of a network without sampling: the recursion of `linear_cnn` run backwards through the layers of a real module.

G = E[df/dx df/dx^T] at initialisation is exact for a network that is linear, or taken at x -> 0, where an activation is
a gain: weights are independent and of mean zero, so the covariance of df/d(input of a layer) follows from that of
df/d(its output). The layers must run one after another, which a call of the network shows.

A ReLU is a gain too, of 1/2, at every input and with biases, as long as no pooling behind it correlates df/d(its
outputs) (Thm A.2 of the GIH paper): -w and -b are as likely as w and b, turn a unit off that was on, and have the same
w w^T. Where they are correlated it matters which units are on together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from biascope.ensembles import Factory, Initialiser, record
from biascope.geometry.linear_cnn import tap_lines
from biascope.network.door import refuse_batch_dependence
from biascope.network.functional import as_rows, explained
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import check_shape
from biascope.support.memory import budget, readable
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked

# the same linear map of positions for every channel, without parameters: pooling and padding
FIXED = (
    *(nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.ZeroPad1d, nn.CircularPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, nn.CircularPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d),
)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
SHAPES = (nn.Flatten, nn.Unflatten)
PADS = {"reflect": "ReflectionPad", "replicate": "ReplicationPad"}


@checked
@without_autocast()
def analytic_geometry(
    factory: Factory | Initialiser, input_shape: Sequence[int], max_memory: str | int | None = None
) -> Tensor:
    """G [D, D] at initialisation, exact and in float64, of layers that run one after another; D = prod(input_shape).

    What `average_geometry` tends to as networks are added, for any input if the network is linear, and for
    `probe_std` -> 0 if it has smooth activations. One output is taken as it is, of two logits the difference.

    Known are nn.Linear, nn.Conv1d, nn.Conv2d (zero and circular padding), average poolings, paddings, nn.Flatten (and
    `x.flatten(1)` in a forward), batch normalisation as built, nn.Identity, nn.Dropout, and what acts on each entry
    alone, such as nn.GELU: its slope at 0. nn.ReLU and nn.LeakyReLU are known without pooling behind them, at any input
    that is not zero in a whole patch. Weights must be drawn independently with mean zero, as torch does. Biases shift
    the output of a linear network and do not matter, nor before a ReLU; before a smooth activation they must be zero,
    or its slope is random. Everything else (max pooling, sums of branches, orthogonal weights) is refused by name. For
    a residual sum put the steps of `geometry.linear_cnn` together by hand, with `through_sum`.

    Args:
        factory: builds a freshly initialised network; taken in eval mode.
        input_shape: of one input.
        max_memory: for example "4GB".

    Example:
        >>> def build():
        ...     return nn.Sequential(nn.Conv1d(1, 4, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 1))
        >>> (72 * analytic_geometry(build, (1, 3))).round(decimals=6)
        tensor([[1., 1., 0.],
                [1., 2., 1.],
                [0., 1., 1.]], dtype=torch.float64)
    """
    shape, initialiser = check_shape(input_shape), record(factory)
    refuse_batch_dependence(initialiser.template)
    with torch.inference_mode(False), torch.no_grad():
        links, outputs = _chain(initialiser.template, shape)
        largest = max([math.prod(shape), *(math.prod(link.before[1:]) for link in links)])
        need, room = 4 * 8 * largest**2, budget(max_memory, torch.device("cpu"))
        if need > room:
            raise _unknown(f"matrices of size {largest} need about {readable(need)} and {readable(room)} are there")
        slopes = [_slope(link) for link in links]
        if why := _random_slope(links, slopes, initialiser):
            raise _unknown(why)
        state = Covariance(1, _eye(1) if outputs == 1 else 2 * _eye(2) - 1)  # [[1, -1], [-1, 1]]: a difference
        for link, slope in zip(reversed(links), reversed(slopes), strict=True):
            state = _backward(link, slope, state, initialiser)
        return torch.kron(_eye(state.groups), state.each)


def _unknown(why: str) -> UnsupportedError:
    return UnsupportedError(f"{why}; average_geometry measures G of any network")


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64, device="cpu")


# ------------------------------------------------------------------------------------------ layers, as they are called


@dataclass(frozen=True)
class Link:
    """A layer without children, the shapes of one example before and after it, and if it is not 0 at x = 0."""

    name: str
    layer: nn.Module
    before: tuple[int, ...]
    after: tuple[int, ...]
    moved: bool

    def __str__(self) -> str:
        kind = type(self.layer).__name__
        return f"'{self.name}' ({kind})" if self.name else kind


def _chain(network: nn.Module, shape: tuple[int, ...]) -> tuple[list[Link], int]:
    """The layers in the order in which they run and the number of outputs, from a call at x = 0.

    Each must get what the one before gave: the tensor itself or another shape of the same memory, unchanged since
    (torch counts changes in `_version`). So nothing that a forward does between layers goes unseen.
    """
    kind = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())
    last = x = torch.zeros(2, *shape, dtype=kind, device="cpu")
    version, who, links = x._version, "the input", list[Link]()

    def follow(given: Any, where: str) -> None:
        if not (_same_memory(given, last) and len(given) == 2 and given._version == version):
            between = f"{type(network).__name__} does something between its layers; make it a layer, or use through_sum"
            raise _unknown(f"{where} is not {who} as it is: {between}")

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> None:
        follow(args[0] if len(args) == 1 else None, f"the input of {Link(names[layer], layer, (), (), False)}")
        if any(link.layer is layer for link in links) and any(True for _ in layer.parameters()):
            raise _unknown(f"layer '{names[layer]}' runs twice: its weights are not independent")

    def leave(layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        nonlocal last, version, who
        if not isinstance(out, Tensor) or len(out) != 2:
            raise _unknown(f"layer '{names[layer]}' ({type(layer).__name__}) gave no row per example")
        links.append(Link(names[layer], layer, tuple(args[0].shape[1:]), tuple(out.shape[1:]), bool(out.any())))
        last, version, who = out, out._version, f"the output of {links[-1]}"

    names = {m: name for name, m in network.named_modules() if not any(True for _ in m.children())}
    for name, m in network.named_modules():
        if m._forward_hooks or m._forward_pre_hooks:
            raise _unknown(f"layer '{name}' ({type(m).__name__}) has hooks, which can change anything")
    hooks = [m.register_forward_pre_hook(enter) for m in names] + [m.register_forward_hook(leave) for m in names]
    try:
        with explained(network, x):
            out = network(x)
    finally:
        for hook in hooks:
            hook.remove()
    follow(out, f"what {type(network).__name__} returns")
    outputs = as_rows(out, 2, None, network).shape[1]
    if outputs > 2:
        raise InputError(f"{type(network).__name__} has {outputs} outputs; build it with one or two")
    return links, outputs


def _same_memory(given: Any, last: Tensor) -> bool:
    """The tensor, or all of its entries in the same order as another shape."""
    if not isinstance(given, Tensor) or given is last:
        return given is last
    whole = given.is_contiguous() and last.is_contiguous() and given.numel() == last.numel()
    return whole and given.data_ptr() == last.data_ptr()


# ------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Slope:
    """Of a layer that acts on each entry alone: its derivative at 0, and if it is the same everywhere.

    Where it has two, one on each side of 0 (`kinked`), the root of their mean square.
    """

    gain: float
    constant: bool
    kinked: bool = False


def _slope(link: Link) -> Slope | None:
    """None if the layer is not one that acts on each entry alone; refused if the slope at 0 is not defined."""
    layer = link.layer
    known = isinstance(layer, (*FIXED, *SHAPES, *WEIGHTED, _BatchNorm))
    if known or link.before != link.after or not _acts_on_entries(link):
        return None
    far = [sign * 10.0**k for k in range(-4, 7) for sign in (-1, 1)]
    z = torch.tensor([0.0, -1e-9, 1e-9, *far], dtype=torch.float64, device="cpu").requires_grad_(True)
    with torch.enable_grad():
        out = layer(z.clone().view(-1, *[1] * len(link.before))).sum()
        slopes = torch.autograd.grad(out, z)[0] if out.requires_grad else torch.zeros_like(z)
    at, left, right = slopes[:3].tolist()
    smooth = max(abs(at - left), abs(at - right)) <= 1e-3 * abs(at)  # which NaN is not
    if not smooth and bool((slopes[z < 0] == left).all()) and bool((slopes[z > 0] == right).all()):
        return Slope(math.hypot(left, right) / math.sqrt(2), constant=False, kinked=True)
    if not smooth:
        raise _unknown(f"{link} has no slope at 0; use nn.GELU or another smooth activation")
    if at == 0:
        raise InputError(f"{link} has slope 0 at 0: all gradients are zero there, and so is G")
    return Slope(at, bool((slopes == at).all()))


def _acts_on_entries(link: Link) -> bool:
    """Is what the layer makes of an entry among others what it makes of an input that has that value everywhere?"""
    if any(True for _ in (*link.layer.parameters(), *link.layer.buffers())):
        return False
    rng = torch.Generator(device="cpu").manual_seed(0)
    z = torch.randn(1, *link.before, generator=rng, dtype=torch.float64, device="cpu")
    out, some = link.layer(z.clone()), torch.randperm(z.numel(), generator=rng, device="cpu")[:16]

    def agrees(value: Tensor, made: Tensor) -> bool:
        return torch.allclose(link.layer(torch.full_like(z, float(value))), made, 1e-10, 1e-14)

    return all(agrees(value, made) for value, made in zip(z.flatten()[some], out.flatten()[some], strict=True))


def _random_slope(links: Sequence[Link], slopes: Sequence[Slope | None], initialiser: Initialiser) -> str:
    """Why the slope of an activation is not known, or "".

    A smooth one is a gain act'(0) if its input is 0 at x = 0: nothing before it may shift it. Both sides of a kink must
    be equally likely whatever comes in: weights and biases before it have no sign.
    """
    moved: Link | None = None  # the first layer that is not 0 at x = 0
    last: Link | None = None  # the layer with weights; None where none is, or more than a linear map is behind it
    for link, slope in zip(links, slopes, strict=True):
        if slope is not None and slope.kinked and (last is None or not _even(last, initialiser)):
            return (
                f"{link} has no slope at 0, and is not on and off equally often: that needs a layer right before it "
                "whose weights and biases are drawn with mean zero"
            )
        if moved is not None and slope is not None and not (slope.constant or slope.kinked):
            biased = isinstance(getattr(moved.layer, "bias", None), Tensor)
            why, fix = ("bias", "bias=False or a bias of zeros") if biased else ("value at 0", "nn.GELU or nn.Tanh")
            return (
                f"{moved} does not give 0 at x = 0 because of its {why}, so {link} behind it is not taken at 0 and its "
                f"slope is random; use {fix}"
            )
        moved = moved or (link if link.moved else None)
        if type(link.layer) in WEIGHTED:
            last = link
        elif not (_keeps_sign(link, initialiser) if slope is None else slope.constant):
            last = None
    return ""


def _even(link: Link, initialiser: Initialiser) -> bool:
    """Whether the bias of a layer is zero, or as likely as its negative; its weights are asked about in any case."""
    bias, name = getattr(link.layer, "bias", None), _name(link, "bias")
    if bias is None:
        return True
    if initialiser.distribution(name) == "constant":
        return not bool(bias.any())
    return initialiser.variance_of(name) is not None and initialiser.drawn_apart(name)


def _keeps_sign(link: Link, initialiser: Initialiser) -> bool:
    """Whether a layer without a slope gives -y for -x: pooling, padding, reshaping, a norm that shifts nothing."""
    if type(link.layer) not in NORMS:
        return type(link.layer) in (*FIXED, *SHAPES)
    shifts = {_name(link, name): getattr(link.layer, name) for name in ("running_mean", "bias")}
    return all(s is None or (initialiser.distribution(n) == "constant" and not s.any()) for n, s in shifts.items())


# ---------------------------------------------------------------------------------------------------------- recursion


@dataclass(frozen=True)
class Covariance:
    """Of df/dh: `groups` of consecutive entries of h, uncorrelated and alike, `each` [k, k]; kron(I, each) in all."""

    groups: int
    each: Tensor

    def channels(self, shape: tuple[int, ...], link: Link) -> tuple[int, Tensor]:
        """(g, V): h as channels of positions, g channels in a group, V [g, positions, g, positions]."""
        channels, positions = shape[0], math.prod(shape[1:])
        each = self.each
        if self.groups % channels == 0:
            each = torch.kron(_eye(self.groups // channels), each)
        elif channels % self.groups:
            raise _unknown(f"the channels {list(shape)} behind {link} are put together to others")
        g = len(each) // positions
        return g, each.view(g, positions, g, positions)


def _backward(link: Link, slope: Slope | None, state: Covariance, initialiser: Initialiser) -> Covariance:
    """The covariance at the input of a layer from the one at its output."""
    layer = link.layer
    if slope is not None:
        if slope.kinked and bool((state.each - torch.diag(state.each.diagonal())).any()):
            raise _unknown(f"{link} has no slope at 0, and layers behind it (pooling?) correlate its outputs")
        return Covariance(state.groups, slope.gain**2 * state.each)
    if type(layer) in SHAPES:
        return state
    if type(layer) in NORMS:
        return Covariance(state.groups, _norm_gain(link, initialiser) ** 2 * state.each)
    if isinstance(layer, nn.Linear) and type(layer) in WEIGHTED and len(link.before) == 1:
        total = _variance(link, initialiser) * state.groups * state.each.trace()
        return Covariance(layer.in_features, total.view(1, 1))
    dims = 1 if type(layer).__name__.endswith("1d") else 2
    if len(link.before) == dims + 1:
        if type(layer) in FIXED:
            return _through_map(link, state)
        if isinstance(layer, nn.Conv1d | nn.Conv2d) and type(layer) in WEIGHTED:
            return _through_convolution(link, layer, state, _variance(link, initialiser))
    known = "linear layers and convolutions, average pooling, padding, batch normalisation, activations smooth at 0"
    raise _unknown(f"{link} with an input {['n', *link.before]} is not known in closed form: known are {known}")


def _through_map(link: Link, state: Covariance) -> Covariance:
    """P^T V P with P read off the layer: what it does to images of one pixel."""
    positions = math.prod(link.before[1:])
    pixels = _eye(positions).view(positions, 1, *link.before[1:])
    P = link.layer(pixels).flatten(1)  # [inputs, outputs]
    g, V = state.channels(link.after, link)
    each = torch.einsum("io,aobp,jp->aibj", P, V, P).reshape(g * positions, -1)
    return Covariance(link.after[0] // g, each)


def _through_convolution(link: Link, layer: nn.Conv1d | nn.Conv2d, state: Covariance, variance: float) -> Covariance:
    """c_out s^2 sum_taps T V T^T, dimension by dimension: taps of an image are Kronecker products of two."""
    if layer.padding_mode in PADS:
        pad = f"nn.{PADS[layer.padding_mode]}{len(layer.kernel_size)}d"
        raise UnsupportedError(f"{link} has padding_mode='{layer.padding_mode}': put {pad} before it instead")
    g, V = state.channels(link.after, link)
    if layer.groups > 1 and g > 1:
        raise _unknown(f"{link} has groups={layer.groups} over channels that are not alike")
    lines = tap_lines(
        link.before[1:],
        layer.kernel_size,
        stride=layer.stride,
        padding=0 if layer.padding == "valid" else layer.padding,  # type: ignore[arg-type]
        circular=layer.padding_mode == "circular",
        dilation=layer.dilation,
    )
    each = torch.einsum("aoap->op", V) / g
    sizes, axes = [line.shape[2] for line in lines], len(lines)
    each = each.reshape(*sizes, *sizes)
    for axis, line in enumerate(lines):
        each = each.movedim((axis, axes + axis), (0, 1))
        by_tap = (torch.einsum("io,op...,jp->ij...", T, each, T) for T in line)  # one at a time: they are large
        each = reduce(torch.add, by_tap)
        each = each.movedim((0, 1), (axis, axes + axis))
    each = each.reshape(math.prod(link.before[1:]), -1)
    return Covariance(layer.in_channels, layer.out_channels // layer.groups * variance * each)


def _norm_gain(link: Link, initialiser: Initialiser) -> float:
    """gamma / sqrt(var + eps) of a batch normalisation in eval mode; it must be one number."""
    layer: Any = link.layer
    gains: Tensor = (layer.running_var.double() + layer.eps).rsqrt()
    fixed = initialiser.distribution(_name(link, "running_var")) == "constant"
    if layer.weight is not None:
        gains = gains * layer.weight.double()
        fixed = fixed and initialiser.distribution(_name(link, "weight")) == "constant"
    if not fixed or bool((gains != gains[0]).any()):
        raise _unknown(f"{link}: its weights are random or differ between channels")
    return float(gains[0])


def _variance(link: Link, initialiser: Initialiser) -> float:
    name = _name(link, "weight")
    if name not in dict((*initialiser.template.named_parameters(), *initialiser.template.named_buffers())):
        raise _unknown(f"{link} shares its weights with another part of the network")
    variance, why = initialiser.variance_of(name), initialiser.distribution(name)
    if variance is not None and initialiser.drawn_apart(name):
        return variance
    why = why if variance is None else "others are made of them"
    why += "; let the factory leave its dtype as it is" if why.endswith("_to_copy()") else ""
    raise _unknown(f"{link}: its weights are not drawn independently with mean zero ({why})")


def _name(link: Link, parameter: str) -> str:
    return f"{link.name}.{parameter}" if link.name else parameter
