"""The fingerprint of an architecture: a few small arrays that can be compared across kinds of input.

- Kernel: the eigenvalues of the tangent kernel at natural inputs.
- Learning: its spectrum on a circle of inputs, that is how fast each harmonic is learnt.
- Function: the spectrum of fresh networks on such circles.
- Geometry: to which frequencies of its input a fresh network responds; on how many directions its gradients g spread.
- Directions: the mean square of g along every Fourier mode and at every pixel of an image.

Every array is measured twice, on different networks and inputs. A few hundred gradients do not resolve single
eigenvectors of G = E[g g^T] in 3,072 dimensions (two halves agree by a few per cent), but they resolve its diagonal in
a fixed basis; the eigenvectors of convolutional networks are near Fourier modes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.atlas.probing import Kind, axes_of, circle, inputs, kind_of, radius
from biascope.kernels import ntk
from biascope.reports.panels.base import Subject, make_subject
from biascope.support.bars import progress
from biascope.support.seeds import derive, generator
from biascope.support.signatures import checked
from biascope.support.tables import facts

EXAMPLES = 64  # of a kernel
POINTS = 32  # of a circle
NETWORKS, FUNCTIONS, KERNELS = 32, 8, 2  # behind one half: for gradients, for functions on circles, for kernels
GRADIENTS, CALIBRATION = 4, 16  # inputs per network
RESOLVED = 1e-5  # share of the mean below which differences of float32 outputs are rounding
SMALLEST = 1e-6  # share of a kernel's trace below which its parts are rounding
SIDE = 32  # of the maps of images
EDGES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)  # upper ends of the bands, in units of Nyquist's frequency; corners are beyond


@dataclass(frozen=True)
class Fingerprint:
    """What an architecture is inclined to, in numbers; the first axis of each array is one of two independent halves.

    Attributes:
        name: of the network.
        kind: of its inputs.
        input_shape: of one input.
        parameters: how many.
        kernel: [2, 63] eigenvalues of the centred tangent kernel of 64 inputs as shares of the whole trace, descending.
        learning: [2, 17] shares of the kernel's trace on a circle of inputs by harmonic 0, ..., 16.
        function: [2, 17] shares of the outputs' power on such circles by harmonic; the mean is left out and is 0.
        bands: [2, 6] sensitivity to the mean of the input and to five bands of frequency, as log2 of its ratio to that
            of white gradients; [2, 0] where inputs have no frequencies.
        spread: [2] participation ratio of G's eigenvalues as a share of the input's dimension.
        modes: [2, 32, 32] sensitivity to every Fourier mode of an image, as log2 of its ratio to the mean, frequency 0
            in the middle; [2, 0, 0] where inputs are no images. Other sizes are resampled.
        places: [2, 32, 32] the same at every pixel.
        seconds: what it took.
        about: what else is known of it, such as where the network comes from.

    Example:
        >>> found = fingerprint(lambda: nn.Linear(6, 1), (6,))
        >>> found.kind, tuple(found.learning.shape)
        ('tabular', (2, 17))
    """

    name: str
    kind: Kind
    input_shape: tuple[int, ...]
    parameters: int
    kernel: Tensor = field(repr=False)
    learning: Tensor = field(repr=False)
    function: Tensor = field(repr=False)
    bands: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    modes: Tensor = field(repr=False)
    places: Tensor = field(repr=False)
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def constant(self) -> float:
        """Share of the kernel's trace that all inputs have in common."""
        return float(1 - self.kernel.mean(0).sum())

    @property
    def effective_rank(self) -> float:
        """exp(entropy) of the centred kernel's eigenvalues, at most 63; nan where all of them are rounding."""
        shares = self.kernel.mean(0).double()
        shares = shares[shares > SMALLEST] / shares[shares > SMALLEST].sum()
        return float(torch.exp(-(shares * shares.log()).sum())) if len(shares) else math.nan

    @property
    def mean_harmonic(self) -> float:
        """Mean harmonic of what the kernel learns on a circle, without the constant."""
        return _mean_harmonic(self.learning)

    @property
    def roughness(self) -> float:
        """Mean harmonic of fresh networks on a circle."""
        return _mean_harmonic(self.function)

    def _repr_html_(self) -> str:
        """Its numbers, for notebooks."""
        rows = {
            "inputs": f"{self.kind} {list(self.input_shape)}",
            "parameters": f"{self.parameters:,}",
            "effective rank of the kernel": f"{self.effective_rank:.3g} of {EXAMPLES - 1}",
            "share all inputs have in common": f"{self.constant:.2g}",
            "mean harmonic it learns": f"{self.mean_harmonic:.3g}",
            "mean harmonic of fresh networks": f"{self.roughness:.3g}",
            "spread of gradients": f"{float(self.spread.mean()):.2g} of all directions",
        }
        return facts(self.name, rows)


def _mean_harmonic(spectrum: Tensor) -> float:
    shares = spectrum.double().nanmean(0)[1:]
    shares = torch.where(shares > SMALLEST, shares, 0.0)
    return float((shares * torch.arange(1, len(shares) + 1, device="cpu")).sum() / shares.sum())


@checked
def fingerprint(
    spec: str | Callable[..., nn.Module],
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    kind: Kind | None = None,
) -> Fingerprint:
    """Measure an architecture's fingerprint.

    Args:
        spec: as for `make_card`: a registry name, "script.py:factory", "timm:NAME", or a function that builds one.
        input_shape: shape of one input; needed for your own factories.
        seed: of networks and inputs.
        device: where to compute.
        options: keyword arguments of the network.
        kind: of the inputs; by default their shape decides.

    Example:
        >>> fingerprint("siren").kind
        'coordinates'
    """
    begin = time.perf_counter()
    subject = make_subject(spec, input_shape, derive(seed, "atlas"), device, options=options)
    text = isinstance(spec, str) and spec.startswith("hf:") and len(subject.input_shape) == 2
    kind = kind or ("tokens" if text else kind_of(subject.input_shape))
    one_output = projection(subject)
    halves = [_half(subject, kind, seed, half, one_output) for half in progress(range(2), "fingerprint", leave=False)]
    kernel, learning, function, gradients = (torch.stack(part) for part in zip(*halves))
    flat = gradients.flatten(1, 2)  # networks and inputs
    bands = torch.stack([band_profile(g, kind) for g in flat])
    modes, places = (torch.stack(part) for part in zip(*(image_maps(g, kind) for g in flat)))
    return Fingerprint(
        subject.name,
        kind,
        subject.input_shape,
        sum(p.numel() for p in subject.network.parameters()),
        kernel.float(),
        learning.float(),
        function.float(),
        bands.float(),
        torch.stack([participation(g.flatten(2)) for g in gradients]).float(),
        modes.half(),
        places.half(),
        time.perf_counter() - begin,
    )


def projection(subject: Subject) -> Callable[[Tensor], Tensor]:
    """Outputs [n, ...] -> [n]: one random combination of all outputs, the same for all networks.

    The outputs of most networks have the same distribution; where they are places of an image, all of them count.
    """
    with torch.no_grad():
        c = subject.network(subject.inputs(1)).numel()
    drawn = torch.randn(c, generator=generator(0, "atlas output"), device="cpu") / math.sqrt(c)
    weights = drawn if c > 1 else torch.ones(1, device="cpu")
    there = weights.to(subject.device)

    def combine(y: Tensor) -> Tensor:
        return y.flatten(1) @ there.to(y.dtype)

    return combine


def _half(
    subject: Subject, kind: Kind, seed: int, half: int, one_output: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eigenvalue shares [63], harmonic shares of kernels and functions [17], gradients [networks, n, *input_shape]."""
    shape, device = subject.input_shape, subject.device
    eigenvalues, learning, functions, gradients = [], [], [], []
    for i in range(half * NETWORKS, (half + 1) * NETWORKS):
        net = normalised(subject.build(i), inputs(kind, shape, CALIBRATION, seed, "calibration", i).to(device))
        x = inputs(kind, shape, GRADIENTS, seed, "gradients", i).to(device).requires_grad_()
        gradients.append(torch.autograd.grad(one_output(net(x)).sum(), x)[0].double().cpu())
        if i >= half * NETWORKS + FUNCTIONS:
            continue
        ring = circle(kind, shape, POINTS, seed, i).to(device)
        with torch.no_grad():
            functions.append(power_shares(one_output(net(ring)).double().cpu()))
        if i < half * NETWORKS + KERNELS:
            x = torch.cat([inputs(kind, shape, EXAMPLES, seed, "kernel", i).to(device), ring])
            K = ntk(net, x, outputs="trace", output=lambda y: one_output(y)[:, None]).tensor.double().cpu()
            eigenvalues.append(centred_shares(K[:EXAMPLES, :EXAMPLES]))
            learning.append(harmonic_shares(K[EXAMPLES:, EXAMPLES:]))
    means = (torch.stack(part).mean(0) for part in (eigenvalues, learning))
    return *means, torch.stack(functions).nanmean(0), torch.stack(gradients)  # type: ignore[return-value]


def normalised(net: nn.Module, x: Tensor) -> nn.Module:
    """The network in eval mode, its BatchNorm layers with the statistics of x.

    Those of a fresh network, mean 0 and variance 1, normalise nothing: in a deep one the signal dies out or explodes,
    and what is left is no network that anybody trains.
    """
    layers = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain average
        layer.train()
    if layers:
        with torch.no_grad():
            net(x)
    for layer, momentum in zip(layers, momenta):
        layer.momentum = momentum
    return net.eval()


def centred_shares(K: Tensor) -> Tensor:
    """Eigenvalues [n - 1] of the centred kernel as shares of the trace of K, descending."""
    centred = K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()
    shares: Tensor = torch.linalg.eigvalsh(centred).flip(0)[:-1].clamp_min(0) / K.trace()
    return shares


def harmonic_shares(K: Tensor) -> Tensor:
    """Shares [n / 2 + 1] of the trace of K [n, n] on the harmonics of its n points on a circle.

    The mean over rotations of the circle is a circulant matrix, whose eigenvalues these are.
    """
    n = len(K)
    power = torch.fft.fft(torch.fft.ifft(K, dim=0), dim=1).diagonal().real.clamp_min(0)  # u_k^H K u_k, u_k of norm 1
    folded: Tensor = power[: n // 2 + 1].clone()
    folded[1 : n // 2] += power[n // 2 + 1 :].flip(0)  # sine and cosine of one harmonic
    return folded / folded.sum()


def power_shares(values: Tensor) -> Tensor:
    """Shares [n / 2 + 1] of the power of n values on a circle by harmonic, without the mean; nan if rounding."""
    power = torch.fft.rfft(values).abs().square()
    power[1:-1] *= 2
    mean, power[0] = power[0].clone(), 0
    if power.sum() <= RESOLVED**2 * mean:
        return torch.full_like(power, math.nan)
    shares: Tensor = power / power.sum()
    return shares


def band_profile(gradients: Tensor, kind: Kind) -> Tensor:
    """log2 of the share of gradients [T, *shape] in each band over that of white ones, [6] or [0]."""
    shape = tuple(gradients.shape[1:])
    axes = axes_of(kind, shape)
    if not axes:
        return torch.zeros(0, device="cpu")
    power = torch.fft.fftn(gradients, dim=[axis + 1 for axis in axes]).abs().square().mean(0)
    r = radius(shape, axes).expand(shape)
    band = torch.bucketize(r.contiguous(), torch.tensor(EDGES, device="cpu") + 1e-6)
    there = torch.bincount(band.flatten(), minlength=len(EDGES) + 1).double()
    share = torch.bincount(band.flatten(), power.flatten(), minlength=len(EDGES) + 1) / power.sum()
    ratio = share / (there / there.sum()).clamp_min(1e-12)
    return torch.where(there > 0, ratio.clamp_min(2**-20).log2(), 0.0)


def participation(gradients: Tensor) -> Tensor:
    """(tr G)^2 / tr G^2 as a share of D, from gradients [networks, n, D]; tr G^2 from pairs of networks, unbiased."""
    T, n, D = gradients.shape
    flat = gradients.flatten(0, 1)
    flat = flat / flat.norm() * math.sqrt(T * n)  # tr G = 1
    products = (flat @ flat.T).square().view(T, n, T, n).sum((1, 3))
    squared: Tensor = (products.sum() - products.diagonal().sum()) / (T * (T - 1) * n**2)  # tr G^2
    return 1 / squared.clamp_min(1e-300) / D


def image_maps(gradients: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """log2 of the mean square of gradients [T, c, h, w] along Fourier modes and at pixels over its mean, [32, 32]."""
    if kind != "image":
        return torch.zeros(0, 0, device="cpu"), torch.zeros(0, 0, device="cpu")
    modes = torch.fft.fftshift(torch.fft.fft2(gradients).abs().square().mean((0, 1)))
    maps = []
    for power in (modes, gradients.square().mean((0, 1))):
        resized = nn.functional.adaptive_avg_pool2d(power[None], SIDE)[0]
        maps.append((resized / resized.mean()).clamp_min(2**-12).log2())
    return maps[0], maps[1]
