"""A network as a dictionary: its atoms are the eigenfunctions of the tangent kernel on a grid (section 5.4).

What has its energy in the leading atoms is learned in few steps and from few samples. The energy of signals f_nu in
atoms whose eigenvalue is at least lam times the largest is

    E(lam) = 1/n sum_nu  sum_{rho: lambda_rho >= lam lambda_1} <phi_rho, f_nu>^2 / ||f_nu||^2.

Errata: Eq. 5.14 prints |<f, f>|^2, the fourth power of the norm, in the denominator; with the squared norm E tends
to 1. And complexity falls with the alignment alpha (the text says that it grows).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope.fields.fitting import Coordinates
from biascope.kernels import ntk
from biascope.linalg import effective_rank
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.figures import axes_or_new, log_scale, once, pyplot
from biascope.support.limits import FiniteTensor
from biascope.support.precision import Precision, without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts, grid, number, one_line, several

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # for the colour-blind too
THRESHOLDS = tuple(10.0**-k for k in range(11))  # the axis of Fig. 5.5, 1 down to 1e-10


@dataclass(frozen=True)
class Energy:
    """E(lam) of signals: thresholds [q], shares [n, q] per signal; standard errors are over signals."""

    thresholds: Tensor
    shares: Tensor
    __repr__ = one_line

    @property
    def mean(self) -> Tensor:
        """E(lam) [q]."""
        return self.shares.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, [q]; NaN for one signal."""
        n = len(self.shares)
        return self.shares.std(0) / math.sqrt(n) if n > 1 else torch.full_like(self.thresholds, math.nan)

    @property
    def area(self) -> float:
        """Area under E over log10 lam, as a share of the whole: 1 if all energy is in the first atoms."""
        lam, order = self.thresholds.sort()
        x = lam.log10()
        if len(x) < 2 or not bool(x.isfinite().all()) or lam[0] == lam[-1]:
            raise InputError(f"an area needs at least two different thresholds above 0, not {self.thresholds.tolist()}")
        return float(torch.trapezoid(self.mean[order], x) / (x[-1] - x[0]))

    @checked
    def plot(self, ax: Any = None) -> Any:
        """E against lam on a logarithmic axis; returns the figure."""
        return plot_energy({"": self}, ax)

    def _repr_html_(self) -> str:
        """E at every threshold, for notebooks."""
        cells = zip(self.thresholds.tolist(), self.mean.tolist(), self.standard_error.tolist())
        return grid(
            f"Energy of {len(self.shares)} signals", ["lambda / largest", "E"], [(t, number(m, s)) for t, m, s in cells]
        )


@dataclass(frozen=True)
class Dictionary:
    """Atoms of a network on a grid: values [k], largest first; atoms [N, k], orthonormal columns; grid, N = prod."""

    values: Tensor
    atoms: Tensor
    grid: tuple[int, ...]
    __repr__ = one_line

    def images(self) -> Tensor:
        """The atoms as signals [k, *grid] (unit sum of squares; signs are arbitrary)."""
        return self.atoms.T.reshape(-1, *self.grid)

    def coefficients(self, signals: Tensor) -> Tensor:
        """<phi_rho, f_nu>, sums over the grid: [n, k] for signals [n, *grid] (or one [*grid], then n = 1)."""
        return self.rows(signals) @ self.atoms

    @checked
    def energy(
        self, signals: Tensor, thresholds: Sequence[float] | Tensor = THRESHOLDS, *, centered: bool = True
    ) -> Energy:
        """E(lam) of signals [n, *grid] (or one [*grid]); less their means if `centered`, as in the paper.

        Thresholds are relative to the largest eigenvalue; 0 takes all atoms, E(0) = 1. With some of the atoms only,
        thresholds below the smallest eigenvalue held are refused: the energy beyond would be missing.
        """
        rows = self.rows(signals)
        if centered:
            rows = rows - rows.mean(1, keepdim=True)
        total = rows.square().sum(1)
        if not bool((total > 0).all()):
            raise InputError(f"signal {int((total <= 0).nonzero()[0])} is constant: it has no energy")
        lam = torch.as_tensor(thresholds, dtype=torch.float64, device="cpu").flatten()
        if len(self.values) < len(self.atoms) and bool((lam * self.values[0] < self.values[-1]).any()):
            held = f"{len(self.values)} of {len(self.atoms)} atoms are held"
            raise UnsupportedError(f"{held}: E is not known at small thresholds; make the dictionary without k")
        inside = (self.values >= lam[:, None] * self.values[0]).double()  # [q, k]
        shares = (rows @ self.atoms).square() @ inside.T / total[:, None]
        return Energy(lam, shares)

    def centroids(self) -> Tensor:
        """Mean frequency [k] of every atom, |frequency| weighted by power, in cycles over the grid."""
        axes = tuple(range(1, len(self.grid) + 1))
        power = torch.fft.fftn(self.images(), dim=axes).abs().square()
        radius = torch.zeros(self.grid, dtype=torch.float64, device="cpu")
        for axis, n in enumerate(self.grid):
            f = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
            radius = radius + f.square().reshape([-1 if a == axis else 1 for a in range(len(self.grid))])
        moment: Tensor = (power * radius.sqrt()).flatten(1).sum(1)
        centroids: Tensor = moment / power.flatten(1).sum(1)
        return centroids

    def effective_rank(self) -> float:
        """How many atoms share the kernel's trace: exp(entropy of all eigenvalues)."""
        if len(self.values) < len(self.atoms):
            held = f"all {len(self.atoms)} eigenvalues and there are {len(self.values)}"
            raise UnsupportedError(f"effective_rank needs {held}: make the dictionary without k")
        return effective_rank(self.values)

    @checked
    def plot(self, count: int = 8) -> Any:
        """The first atoms as curves or images, with their eigenvalues; returns the figure."""
        if len(self.grid) > 2:
            raise InputError(f"atoms on a grid {list(self.grid)} have no picture: plot slices of self.images()")
        count = min(count, len(self.values))
        columns = min(4, count)
        rows = math.ceil(count / columns)
        figure, axes = pyplot().subplots(
            rows, columns, figsize=(1.3 * columns, 1.45 * rows), layout="constrained", squeeze=False
        )
        for k, ax in enumerate(axes.flat):
            ax.axis("off")
            if k < count:
                image = self.images()[k].numpy()
                if len(self.grid) == 1:
                    ax.plot(image, color=COLOURS[0], linewidth=0.9)
                else:
                    top = abs(image).max()
                    ax.imshow(image, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
                ax.set_title(f"{k + 1}: {float(self.values[k] / self.values[0]):.2g}", fontsize="small")
        return once(figure)

    def _repr_html_(self) -> str:
        """Size and head of the spectrum, for notebooks."""
        rows = {"atoms": f"{len(self.values)} of {len(self.atoms)}", "grid": " x ".join(map(str, self.grid))}
        return facts("Dictionary", {**rows, "leading eigenvalues": several(self.values)})

    @checked
    def rows(self, signals: FiniteTensor) -> Tensor:
        """Signals [n, *grid], or one [*grid], as rows [n, N] in float64."""
        one = tuple(signals.shape) == self.grid
        if not one and tuple(signals.shape[1:]) != self.grid:
            raise InputError(f"signals have shape {list(signals.shape)}; give [n, *grid] with grid {list(self.grid)}")
        return signals.detach().double().cpu().reshape(1 if one else len(signals), -1)


@checked
@without_autocast()
def dictionary(
    model: nn.Module,
    r: Coordinates,
    k: int | None = None,
    *,
    output: int = 0,
    precision: Precision = "float64",
    **options: Any,
) -> Dictionary:
    """Eigenfunctions of a network's tangent kernel on a grid, as atoms.

    Args:
        model: [..., d] -> [..., c].
        r: coordinates [*grid, d]. The kernel is a matrix of all pairs: 64 x 64 points are 134 MB in float64.
        k: how many atoms; None for all. (The paper keeps 2,000 of 4,096; E then ends at the last eigenvalue held.)
        output: which output, for a network with several; one at a time, as in the paper.
        precision: of `bs.ntk`; the tail of the spectrum below 1e-7 needs float64.
        options: of `bs.ntk`, such as params or max_memory.

    Example:
        >>> from biascope.fields import coordinates
        >>> from biascope.nets import build
        >>> found = dictionary(build("siren", seed=0, hidden=(16, 16)), coordinates((4, 4)))
        >>> found.images().shape, bool(found.energy(torch.rand(3, 4, 4), [0.0]).mean > 0.999)
        (torch.Size([16, 4, 4]), True)
    """
    shape = tuple(r.shape[:-1])
    K = ntk(model, r.reshape(-1, r.shape[-1]), outputs=output, precision=precision, **options)
    found = K.eigh(k)
    return Dictionary(found.values.double().cpu(), found.vectors.double().cpu(), shape)


@checked
def plot_energy(curves: Mapping[str, Energy], ax: Any = None) -> Any:
    """E(lam) of several dictionaries, {name: energy}, with bands of one standard error; returns the figure.

    Example:
        >>> import torch
        >>> lam = torch.tensor([1.0, 0.1, 0.01])
        >>> curves = {"w0 = 5": Energy(lam, torch.rand(3, 3)), "w0 = 30": Energy(lam, torch.rand(3, 3))}
        >>> len(plot_energy(curves).axes[0].lines)
        2
    """
    ax = axes_or_new(ax, (3.6, 2.8))
    for k, (name, energy) in enumerate(curves.items()):
        x, y, error = energy.thresholds.numpy(), energy.mean.numpy(), energy.standard_error.numpy()
        ax.plot(x, y, color=COLOURS[k % len(COLOURS)], label=name or None)
        if len(energy.shares) > 1:
            ax.fill_between(x, y - error, y + error, color=COLOURS[k % len(COLOURS)], alpha=0.2, linewidth=0)
    log_scale(ax, "x")
    ax.invert_xaxis()
    ax.set_ylim(0, 1.02)
    ax.set_xlabel(r"eigenvalue $\lambda / \lambda_1$, at least")
    ax.set_ylabel(r"energy $E(\lambda)$")
    if any(curves):
        ax.legend(frameon=False, fontsize="small")
    return once(ax.figure)
