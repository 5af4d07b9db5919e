"""Pictures of kernels (matplotlib, imported only when a picture is asked for)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from biascope.support.figures import axes_or_new, draw_eigenvalues, once, pyplot

if TYPE_CHECKING:
    from biascope.kernels.kernel import Kernel
    from biascope.kernels.spectrum import Spectrum


def plot_kernel(K: Kernel, ax: Any = None) -> Any:
    """Heat map (and, beside it, the spectrum of a symmetric kernel)."""
    plt = pyplot()
    M = (K.values.sum(0) if K.mode == "diagonal" else K.matrix()).detach().cpu().float()
    if ax is None:
        both = K.symmetric and K.mode != "diagonal"
        figure, axes = plt.subplots(1, 2 if both else 1, figsize=(6.6 if both else 3.4, 3), squeeze=False)
        ax, second = axes[0][0], axes[0][1] if both else None
    else:
        figure, second = ax.figure, None
    span = (-0.5, K.n[1] - 0.5, K.n[0] - 0.5, -0.5)  # axes count examples, whose outputs lie side by side
    image = ax.imshow(M, cmap="viridis", interpolation="antialiased", extent=span)
    ax.set_xlabel("example (outputs side by side)" if K.mode == "full" else "example")
    ax.set_ylabel(ax.get_xlabel())
    ax.set_title(f"tangent kernel ({K.outputs})")
    figure.colorbar(image, ax=ax, fraction=0.046, pad=0.04)
    if second is not None:
        plot_spectrum(K.eigh(), second)
        figure.tight_layout()
    return once(figure)


def plot_spectrum(s: Spectrum, ax: Any = None) -> Any:
    """Eigenvalues above rounding against index, log-log."""
    ax = axes_or_new(ax)
    rounding = max(torch.finfo(s.values.dtype).eps * float(s.values[0]), 0.0 if math.isnan(s.negative) else -s.negative)
    zeros = draw_eigenvalues(ax, s.values.tolist(), floor=rounding, log_index=True)
    ax.set_xlabel("index $j$")
    ax.set_ylabel(r"eigenvalue $\lambda_j$")
    title = f"effective rank {s.effective_rank():.1f}" if s.whole else f"the first {len(s.values)} of {len(s.vectors)}"
    ax.set_title(title + (f", {zeros} zeros" if zeros else ""))
    return once(ax.figure)
