"""Frequencies under changes of the parameters: robustness to noise, and the volume of high-frequency parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from biascope.errors import InputError
from biascope.functional import device_of
from biascope.precision import arithmetic
from biascope.progress import progress
from biascope.refusals import refuse_batch_dependence
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.spectral.spectrum import amplitude_spectrum
from biascope.tables import grid, number, one_line

ROUNDING = 10  # units of rounding of the largest output: an amplitude below is that of rounding errors


@dataclass(frozen=True)
class Robustness:
    """Amplitudes [deltas, frequencies] after a random step of length delta in parameter space, over those before it.

    The mean is over draws of the direction, of magnitudes (not of complex values); errors are standard errors of it,
    NaN for a single draw, which has none.
    """

    deltas: Tensor = field(repr=False)
    frequencies: tuple[int, ...]
    mean: Tensor = field(repr=False)
    standard_error: Tensor = field(repr=False)
    draws: int
    seed: int

    def _repr_html_(self) -> str:
        """Amplitudes left, by length of the step and frequency, for notebooks."""
        cells = zip(self.deltas.tolist(), self.mean.tolist(), self.standard_error.tolist())
        rows = [(delta, *map(number, means, errors)) for delta, means, errors in cells]
        return grid(f"Amplitude after / before, {self.draws} draws", ["delta", *map(str, self.frequencies)], rows)


@checked
def sphere_directions(params: dict[str, Tensor], draws: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Directions {name: [draws, *shape]}, uniform on the unit sphere of all parameters together.

    Example:
        >>> u = sphere_directions({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, 5, torch.Generator().manual_seed(0))
        >>> sum(v.flatten(1).square().sum(1) for v in u.values()).allclose(torch.ones(5))
        True
    """
    if draws < 1:
        raise InputError(f"need draws >= 1, got {draws}")
    if not params or not all(isinstance(p, Tensor) and p.is_floating_point() for p in params.values()):
        raise InputError("params must be a dict of floating-point tensors by name, e.g. dict(model.named_parameters())")
    raw = {n: torch.randn(draws, *p.shape, dtype=p.dtype, device=rng.device, generator=rng) for n, p in params.items()}
    norm = torch.stack([v.reshape(draws, -1).square().sum(1) for v in raw.values()]).sum(0).sqrt()
    return {n: v / norm.reshape(-1, *[1] * (v.dim() - 1)) for n, v in raw.items()}


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def perturbation_robustness(
    model: nn.Module,
    x: Tensor,
    frequencies: Sequence[int],
    deltas: Sequence[float],
    draws: int = 100,
    seed: int = 0,
    chunk: int = 32,
) -> Robustness:
    """How much of each frequency is left at theta + delta u, u uniform on the sphere of parameter space.

    x [n, d]: inputs along which the model's one output is a function of z = j/n. Each u is used for every delta.
    A frequency whose amplitude is below `ROUNDING` units of rounding of the largest output holds nothing to compare
    with, and is refused; so are layers whose output depends on the batch or on chance (call `model.eval()` first).

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> found = perturbation_robustness(net, torch.arange(20)[:, None] / 20, [1, 2], [0.0, 0.1], draws=4)
        >>> found.mean[0].numpy().round(4)
        array([1., 1.])
    """
    params = {name: value.detach() for name, value in model.named_parameters()}
    if not params:
        raise InputError(f"{type(model).__name__} has no parameters to perturb")
    refuse_batch_dependence(model)  # before the first evaluation, which would already move running statistics
    if draws < 1 or chunk < 1:
        raise InputError(f"need draws >= 1 and chunk >= 1, got {draws} and {chunk}")
    if not len(frequencies) or not len(deltas) or not all(map(math.isfinite, deltas)):
        raise InputError(f"need a frequency and finite deltas, got {tuple(frequencies)} and {tuple(deltas)}")
    if max(frequencies) > len(x) // 2 or min(frequencies) < 0:
        raise InputError(f"frequencies {tuple(frequencies)} must lie in 0..{len(x) // 2} for {len(x)} samples")
    first = next(iter(params.values()))
    if x.dtype != first.dtype:
        raise InputError(f"x is {x.dtype}, the network {first.dtype}: pass x.to({first.dtype})")
    device = first.device
    picks, rng = list(frequencies), generator(seed, "sphere", device=device)

    def outputs(values: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(model, values, (x.to(device),))
        return out.reshape(len(x))

    def spectrum(values: dict[str, Tensor]) -> Tensor:
        return amplitude_spectrum(outputs(values))[picks]

    with torch.no_grad():
        out = outputs(params)
        if not bool(out.isfinite().all()):
            raise InputError(f"{type(model).__name__} gives NaN or infinite outputs at x: there is no spectrum")
        before = amplitude_spectrum(out)[picks]
        floor = ROUNDING * torch.finfo(out.dtype).eps * float(out.abs().max())
        if gone := [k for k, size in zip(picks, before.tolist()) if size <= floor]:
            raise InputError(f"the model has nothing at frequencies {gone} to compare with; leave them out")
        sums = torch.zeros(len(deltas), len(picks), dtype=torch.float64, device=device)
        squares = torch.zeros_like(sums)
        for start in range(0, draws, chunk):
            u = sphere_directions(params, min(chunk, draws - start), rng)
            for i, delta in enumerate(deltas):
                moved = {name: params[name] + delta * u[name] for name in params}
                ratio = (vmap(spectrum)(moved) / before).double()
                sums[i] += ratio.sum(0)
                squares[i] += ratio.square().sum(0)
    mean = sums / draws
    variance = (squares / draws - mean.square()).clamp(min=0) * draws / (draws - 1 if draws > 1 else math.nan)
    error = (variance / draws).sqrt()
    grid = torch.tensor(list(deltas), dtype=torch.float64, device="cpu")
    return Robustness(grid, tuple(picks), mean.cpu(), error.cpu(), draws, seed)


@dataclass(frozen=True)
class HighFrequencyVolume:
    """Share of the parameters in [-clip, clip]^P whose |f~(k')| exceeds eps for some k' > k, at each cut-off k."""

    cutoffs: Tensor
    volume: Tensor
    standard_error: Tensor
    samples: int
    seed: int
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """The share at every cut-off, for notebooks."""
        shares = map(number, self.volume.tolist(), self.standard_error.tolist())
        return grid(f"Volume of {self.samples} samples", ["cut-off", "share"], zip(self.cutoffs.tolist(), shares))


@checked
@arithmetic("float32")  # the products of layers may be asked for in tf32
def high_frequency_volume(
    widths: Sequence[int],
    clip: float,
    eps: float,
    cutoffs: Sequence[int],
    samples: int = 4096,
    grid: int = 2048,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> HighFrequencyVolume:
    """Monte Carlo for the relative volume of Xi_eps(k) (appendix A.4), for ReLU networks of one input on [0, 1].

    widths: (1, d_1, ..., d_L, 1). Wave numbers and cut-offs are in cycles (k' = 2 pi times them in radians), below
    `grid` / 2. f~ is the sum of Lemma 3.1 over [0, 1] for f interpolated on `grid` pieces: without the jump
    that cutting f off at 0 and 1 would add.

    Example:
        >>> found = high_frequency_volume((1, 8, 1), clip=2.0, eps=0.01, cutoffs=(1, 4, 16), samples=64)
        >>> bool((found.volume.diff() <= 0).all())
        True
    """
    if not len(widths) or widths[0] != 1 or widths[-1] != 1:
        raise InputError(f"widths {tuple(widths)} must begin and end with 1")
    if len(widths) < 2 or min(widths) < 1 or samples < 1:
        raise InputError(f"need two widths >= 1 or more and samples >= 1, got {tuple(widths)} and {samples}")
    if not 0 < clip < math.inf or not 0 <= eps < math.inf:
        raise InputError(f"need clip > 0 and eps >= 0, got {clip} and {eps}")
    if not len(cutoffs) or min(cutoffs) < 0 or any(k != int(k) for k in cutoffs):
        raise InputError(f"cut-offs are whole numbers of cycles >= 0, got {tuple(cutoffs)}")
    if max(cutoffs) + 1 >= grid // 2:  # there must be a wave number above the last cut-off and below grid / 2
        raise InputError(f"cut-offs up to {max(cutoffs)} need a grid of at least {2 * int(max(cutoffs)) + 4} pieces")
    device = device_of(device)
    rng = generator(seed, "volume", device=device)
    x = torch.linspace(0, 1, grid + 1, device=device)[None, :, None]
    cycles = torch.arange(1, grid // 2, device=device)
    # ∫ over one piece of a constant slope: sinc(pi m / grid) times the difference of f across it
    factor = torch.sinc(cycles / grid) / (2 * math.pi * cycles)
    counts = torch.zeros(len(cutoffs), dtype=torch.float64, device="cpu")
    chunk = max(1, 2**24 // (grid * max(widths)))
    for start in progress(range(0, samples, chunk), "high-frequency volume", leave=False):
        size = min(chunk, samples - start)
        h = x.expand(size, -1, -1)
        for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
            w = (torch.rand(size, fan_in, fan_out, generator=rng, device=device) * 2 - 1) * clip
            b = (torch.rand(size, 1, fan_out, generator=rng, device=device) * 2 - 1) * clip
            h = torch.baddbmm(b, h.clamp(min=0) if i else h, w)
        spectrum = torch.fft.rfft(h[..., 0].diff(dim=1)).abs()[:, 1 : grid // 2] * factor
        above = spectrum.flip(1).cummax(1).values.flip(1)  # the largest |f~| at this wave number or beyond
        counts += (
            torch.stack([(above[:, k] > eps).sum() for k in map(int, cutoffs)]).double().cpu()
        )  # index k is k + 1 cycles
    volume = counts / samples
    return HighFrequencyVolume(
        torch.tensor(list(cutoffs), device="cpu"), volume, (volume * (1 - volume) / samples).sqrt(), samples, seed
    )
