"""Pictures of kernels (matplotlib, imported only when a picture is asked for)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from biascope.kernels.kernel import Kernel
    from biascope.kernels.spectrum import Spectrum


def pyplot() -> Any:
    """matplotlib's pyplot, or an error that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "biascope[plot]"') from error
    return plt


def plot_kernel(K: Kernel, ax: Any = None) -> Any:
    """Heat map (and, beside it, the spectrum of a symmetric kernel)."""
    plt = pyplot()
    M = (K.values.sum(0) if K.mode == "diagonal" else K.matrix()).detach().cpu().float()
    if ax is None:
        figure, axes = plt.subplots(1, 2 if K.symmetric else 1, figsize=(6.6 if K.symmetric else 3.4, 3), squeeze=False)
        ax, second = axes[0][0], axes[0][1] if K.symmetric else None
    else:
        figure, second = ax.figure, None
    image = ax.imshow(M, cmap="viridis", interpolation="nearest")
    ax.set_xlabel("example (outputs inside)" if K.mode == "full" else "example")
    ax.set_ylabel(ax.get_xlabel())
    ax.set_title(f"tangent kernel ({K.outputs})")
    figure.colorbar(image, ax=ax, fraction=0.046, pad=0.04)
    if second is not None and K.mode != "diagonal":
        plot_spectrum(K.eigh(), second)
    if second is not None:
        figure.tight_layout()
    return figure


def plot_spectrum(s: Spectrum, ax: Any = None) -> Any:
    """Eigenvalues against index, log-log."""
    plt = pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 2.6))
    values = s.values.detach().cpu().float()
    ax.loglog(range(1, len(values) + 1), values.clamp_min(float(values[0]) * 1e-12), color="#0072B2")
    ax.set_xlabel("index $j$")
    ax.set_ylabel(r"eigenvalue $\lambda_j$")
    ax.set_title(f"effective rank {s.effective_rank():.1f}")
    return ax.figure
