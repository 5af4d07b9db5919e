"""Pictures of disentanglement (matplotlib, imported only when a picture is asked for)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from biascope.errors import InputError
from biascope.figures import once, pyplot

if TYPE_CHECKING:
    from biascope.editing.disentanglement import Disentanglement


def plot_disentanglement(found: Disentanglement, ax: Any = None) -> Any:
    """Heat map of xi over two coefficients, or its curve over one."""
    xi, alphas = found.xi.numpy(), found.alphas.numpy()
    if xi.ndim > 2:
        raise InputError(f"xi has {xi.ndim} axes: plot it with along='line', or two tasks at a time")
    if ax is None:
        _, ax = pyplot().subplots(figsize=(3.6, 3.0), layout="constrained")
    if xi.ndim == 1:
        ax.errorbar(alphas, xi, found.standard_error.numpy(), color="#0072B2", capsize=2)
        ax.set_xlabel(r"coefficient $\alpha$ of all tasks" if found.along == "line" else rf"$\alpha$, {found.tasks[0]}")
        ax.set_ylabel(r"disentanglement error $\xi$")
        return once(ax.figure)
    # a_1 (rows of xi) goes right, as in the paper
    image = ax.pcolormesh(alphas, alphas, xi.T, shading="nearest", cmap="viridis", vmin=0)
    ax.plot([0, 1, 1, 0, 0], [0, 0, 1, 1, 0], color="red", linewidth=1.2)  # where coefficients are searched
    ax.set_xlabel(rf"$\alpha_1$, {found.tasks[0]}")
    ax.set_ylabel(rf"$\alpha_2$, {found.tasks[1]}")
    ax.set_aspect("equal")
    ax.figure.colorbar(image, ax=ax, label=r"$\xi(\alpha_1, \alpha_2)$")
    return once(ax.figure)
