"""Directions as pictures: pixels above, energy in Fourier space (DC in the centre) below."""

from collections.abc import Sequence

import torch
from torch import Tensor

from biascope.studies.runs import Run


def direction_picture(run: Run, name: str, directions: Tensor, titles: Sequence[str], columns: int = 10) -> None:
    """Save directions [k, side, side] as figures/<name>.png; without matplotlib nothing is drawn."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    columns = min(columns, len(directions))
    rows = -(-len(directions) // columns)
    figure, axes = plt.subplots(2 * rows, columns, figsize=(1.1 * columns, 2.45 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for i, (direction, title) in enumerate(zip(directions.double(), titles)):
        top, low = axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]
        limit = float(direction.abs().max())
        top.imshow(direction.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        energy = torch.fft.fftshift(torch.fft.fft2(direction).abs().square())
        low.imshow(energy.numpy(), cmap="magma")
        top.set_title(title, fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(run.path / "figures" / f"{name}.png", dpi=130)
    plt.close(figure)
