"""Pictures of the input space (matplotlib, imported only when one is asked for)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from biascope.support.figures import BLUE, axes_or_new, draw_eigenvalues, once, pyplot

if TYPE_CHECKING:
    from biascope.geometry.average import AverageGeometry
    from biascope.geometry.nad_result import NADs

GREY = "#999999"


def plot_nads(found: NADs, first: int = 3) -> Any:
    """Directions in pixels (top), in Fourier space (below, when they are images), and the spectrum (right).

    In pixels of their strongest channel: another one may be empty.
    """
    plt = pyplot()
    first = min(first, len(found.directions))
    images = len(found.input_shape) >= 2
    figure = plt.figure(figsize=(1.7 * first + 3.2, 3.4 if images else 2.4), layout="constrained")
    places = figure.add_gridspec(2 if images else 1, first + 1, width_ratios=[1.0] * first + [1.7])
    energy = found.fourier_energy().float() if images else None
    for i in range(first):
        direction = found.directions[i].float()
        top = figure.add_subplot(places[0, i])
        top.set_title(f"$u_{{{i + 1}}}$")
        if energy is None:
            top.plot(direction.flatten().numpy(), color=BLUE)
        else:
            channels = direction.reshape(-1, *found.input_shape[-2:])
            strongest = int(channels.flatten(1).norm(dim=1).argmax())
            channel = channels[strongest]
            if len(channels) > 1:
                top.set_title(f"$u_{{{i + 1}}}$, channel {strongest + 1} of {len(channels)}", fontsize="small")
            limit = float(channel.abs().max())
            top.imshow(channel.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            below = figure.add_subplot(places[1, i])
            below.imshow(energy[i].reshape(-1, *found.input_shape[-2:]).sum(0).numpy(), cmap="magma")
            for axis, shown in ((top, "pixels"), (below, "Fourier energy")):
                axis.set_xticks([])
                axis.set_yticks([])
                axis.set_ylabel(shown if i == 0 else "", fontsize="small")
    plot_spectrum(found, figure.add_subplot(places[:, first]))
    return once(figure)


def plot_spectrum(found: NADs, ax: Any = None) -> Any:
    """Eigenvalues over their index with their standard errors, log scale; the band of an isotropic network in grey."""
    ax = axes_or_new(ax)
    values = found.eigenvalues.tolist()
    zeros = draw_eigenvalues(ax, values, errors=found.standard_errors.tolist())
    if zeros:
        why = f": {found.n_networks} networks" if found.n_networks < found.dimension else ""
        ax.set_title(f"{zeros} of {len(values)} are zero{why}", fontsize="small")
    if found.head == "sampled" and found.method in ("finite-difference", "autograd"):
        band = found.marchenko_pastur()
        lowest = ax.get_ylim()[0]  # a band from zero goes down to the axis
        ax.axhspan(max(band.lower, lowest), band.upper, color=GREY, alpha=0.3, linewidth=0, label="isotropic network")
        ax.set_ylim(bottom=min(lowest, band.lower) if band.lower > 0 else lowest)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", framealpha=1)  # on white, or the grey is not seen
    return once(ax.figure)


def plot_geometry(found: AverageGeometry) -> Any:
    """Heat map of the matrix and its spectrum."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3), layout="constrained")
    matrix = found.matrix.float()
    limit = float(matrix.abs().max())
    image = left.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    bar = figure.colorbar(image, ax=left, fraction=0.046, pad=0.04)
    bar.ax.yaxis.set_offset_position("left")  # "1e-5" stands over the bar, whose numbers are beside it
    left.set_title("average geometry" if found.kind == "geometry" else f"{found.kind} of the geometry", pad=16)
    left.set(xlabel="input coordinate", ylabel="input coordinate")
    values = found.eigh().values.abs().sort(descending=True).values.tolist()
    zeros = draw_eigenvalues(right, values)
    if found.kind != "geometry":
        right.set_ylabel("magnitude of the eigenvalue")
    if zeros:
        right.set_title(f"{zeros} of {len(values)} are zero")
    return once(figure)
