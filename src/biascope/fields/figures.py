"""Pictures of dictionaries (matplotlib, imported only when a picture is asked for)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from biascope.errors import InputError
from biascope.figures import log_scale, once, pyplot
from biascope.signatures import checked

if TYPE_CHECKING:
    from biascope.fields.dictionary import Dictionary, Energy

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # told apart by everybody


@checked
def plot_energy(curves: Mapping[str, Energy], ax: Any = None) -> Any:
    """E(lam) of several dictionaries, {name: energy}, with bands of one standard error; returns the figure.

    Example:
        >>> import torch
        >>> from biascope.fields import Energy
        >>> lam = torch.tensor([1.0, 0.1, 0.01])
        >>> curves = {"w0 = 5": Energy(lam, torch.rand(3, 3)), "w0 = 30": Energy(lam, torch.rand(3, 3))}
        >>> len(plot_energy(curves).axes[0].lines)
        2
    """
    if not isinstance(curves, Mapping) or not all(hasattr(energy, "thresholds") for energy in curves.values()):
        raise InputError("curves must be a dict {name: Energy}, e.g. {'before': dictionary.energy(signals)}")
    if ax is None:
        _, ax = pyplot().subplots(figsize=(3.6, 2.8), layout="constrained")
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


def plot_atoms(found: Dictionary, count: int = 8) -> Any:
    """The first atoms of a dictionary of curves or images, with their eigenvalues."""
    if len(found.grid) > 2:
        raise InputError(f"atoms on a grid {list(found.grid)} have no picture: plot slices of found.images()")
    count = min(count, len(found.values))
    columns = min(4, count)
    rows = math.ceil(count / columns)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(1.3 * columns, 1.45 * rows), layout="constrained", squeeze=False
    )
    for k, ax in enumerate(axes.flat):
        ax.axis("off")
        if k < count:
            image = found.images()[k].numpy()
            if len(found.grid) == 1:
                ax.plot(image, color=COLOURS[0], linewidth=0.9)
            else:
                top = abs(image).max()
                ax.imshow(image, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
            ax.set_title(f"{k + 1}: {float(found.values[k] / found.values[0]):.2g}", fontsize="small")
    return once(figure)
