"""Frequencies under changes of the parameters: robustness to noise, and the volume of high-frequency parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import vmap

from biascope.network.door import refuse_batch_dependence
from biascope.network.swapped import functional_call
from biascope.spectral.spectrum import amplitude_spectrum
from biascope.support.arguments import check_tensor, device_of
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.limits import Count, Finite, NonNegative, Positive
from biascope.support.precision import arithmetic
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import grid, number, one_line

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
def sphere_directions(params: dict[str, Tensor], draws: Count, rng: torch.Generator) -> dict[str, Tensor]:
    """Directions {name: [draws, *shape]}, uniform on the unit sphere of all parameters together.

    Example:
        >>> u = sphere_directions({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, 5, torch.Generator().manual_seed(0))
        >>> sum(v.flatten(1).square().sum(1) for v in u.values()).allclose(torch.ones(5))
        True
    """
    raw = {n: torch.randn(draws, *p.shape, dtype=p.dtype, device=rng.device, generator=rng) for n, p in params.items()}
    norm = torch.stack([v.reshape(draws, -1).square().sum(1) for v in raw.values()]).sum(0).sqrt()
    return {n: v / norm.reshape(-1, *[1] * (v.dim() - 1)) for n, v in raw.items()}


@checked
@arithmetic("float32")  # cuDNN would convolve in tf32
def perturbation_robustness(
    model: nn.Module,
    x: Tensor,
    frequencies: Sequence[int],
    deltas: Sequence[Finite],
    draws: Count = 100,
    seed: int = 0,
    chunk: Count = 32,
) -> Robustness:
    """How much of each frequency is left at theta + delta u, u uniform on the sphere of parameter space.

    x [n, d]: inputs along which the model's one output is a function of z = j/n. Each u is used for every delta.
    A frequency whose amplitude is below `ROUNDING` units of rounding of the largest output holds nothing to compare
    with, and is refused; so are layers whose output depends on the batch or is random (call `model.eval()` first).

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
    if not all(0 <= k <= len(x) // 2 for k in frequencies):
        raise InputError(f"frequencies {tuple(frequencies)} must lie in 0..{len(x) // 2} for {len(x)} samples")
    x = check_tensor(x, "x", floating=True).to(next(iter(params.values())))
    picks, rng = list(frequencies), generator(seed, "sphere", device=x.device)

    def outputs(values: dict[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(model, values, (x,))
        return out.reshape(len(x))

    def spectrum(values: dict[str, Tensor]) -> Tensor:
        return amplitude_spectrum(outputs(values))[picks]

    with torch.no_grad():
        out = outputs(params)
        before = amplitude_spectrum(out)[picks]
        floor = ROUNDING * torch.finfo(out.dtype).eps * float(out.abs().max())
        if gone := [k for k, size in zip(picks, before.tolist()) if not size > floor]:  # NaN neither
            raise InputError(f"the model has nothing at frequencies {gone} to compare with; leave them out")
        sums = torch.zeros(len(deltas), len(picks), dtype=torch.float64, device=x.device)
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
    widths: Sequence[Count],
    clip: Positive,
    eps: NonNegative,
    cutoffs: Sequence[int],
    samples: Count = 4096,
    grid: Count = 2048,
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
    if len(widths) < 2 or widths[0] != 1 or widths[-1] != 1:
        raise InputError(f"widths {tuple(widths)} must begin and end with 1")
    if not all(0 <= k < grid // 2 - 1 for k in cutoffs):  # a wave number above the last one is below grid / 2
        raise InputError(f"cut-offs {tuple(cutoffs)} lie from 0 to grid / 2 - 2 = {grid // 2 - 2} cycles")
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
        counts += torch.stack([(above[:, k] > eps).sum() for k in cutoffs]).double().cpu()  # index k is k + 1 cycles
    volume = counts / samples
    return HighFrequencyVolume(
        torch.tensor(list(cutoffs), device="cpu"), volume, (volume * (1 - volume) / samples).sqrt(), samples, seed
    )
