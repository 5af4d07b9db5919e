"""Pictures of the input space (matplotlib, imported only when one is asked for)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from biascope.kernels.figures import pyplot

if TYPE_CHECKING:
    from biascope.geometry.average import AverageGeometry
    from biascope.geometry.nad_result import NADs

BLUE, GREY = "#0072B2", "#999999"


def plot_nads(found: NADs, first: int = 3) -> Any:
    """Directions in pixels (top), in Fourier space (middle, when they are images), and the spectrum (right)."""
    plt = pyplot()
    first = min(first, len(found.directions))
    images = len(found.input_shape) >= 2
    figure, axes = plt.subplots(2, first + 1, figsize=(1.7 * first + 2.8, 3.4), squeeze=False)
    energy = found.fourier_energy().float() if images else None
    for i in range(first):
        direction = found.directions[i].float()
        if energy is None:
            axes[0][i].plot(direction.flatten().numpy(), color=BLUE)
            axes[1][i].axis("off")
        else:
            channel = direction.reshape(-1, *found.input_shape[-2:])[0]
            limit = float(channel.abs().max())
            axes[0][i].imshow(channel.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes[1][i].imshow(energy[i].reshape(-1, *found.input_shape[-2:]).sum(0).numpy(), cmap="magma")
            for axis in (axes[0][i], axes[1][i]):
                axis.set_xticks([])
                axis.set_yticks([])
        axes[0][i].set_title(f"$u_{{{i + 1}}}$")
    plot_spectrum(found, axes[0][first])
    axes[1][first].axis("off")
    figure.tight_layout()
    return figure


def plot_spectrum(found: NADs, ax: Any = None) -> Any:
    """Eigenvalues over their index, log scale; the band of an isotropic network in grey."""
    plt = pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(3.4, 2.6))
    values = found.eigenvalues.float()
    ax.semilogy(range(1, len(values) + 1), values.clamp_min(float(values[0]) * 1e-14).numpy(), color=BLUE)
    if found.head == "sampled" and found.method in ("finite-difference", "autograd"):
        band = found.marchenko_pastur()
        ax.axhspan(max(band.lower, float(values[0]) * 1e-14), band.upper, color=GREY, alpha=0.3, linewidth=0)
    ax.set_xlabel("index")
    ax.set_ylabel("eigenvalue")
    return ax.figure


def plot_geometry(found: AverageGeometry) -> Any:
    """Heat map of the matrix and its spectrum."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3))
    matrix = found.matrix.float()
    limit = float(matrix.abs().max())
    image = left.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    figure.colorbar(image, ax=left, fraction=0.046, pad=0.04)
    left.set_title("average geometry")
    values = found.eigh().values.float()
    right.semilogy(range(1, len(values) + 1), values.clamp_min(float(values[0]) * 1e-14).numpy(), color=BLUE)
    right.set_xlabel("index")
    right.set_ylabel("eigenvalue")
    figure.tight_layout()
    return figure
