"""Pictures that no chart can say: boundaries, directions, eigenfunctions. In the style and formats of all figures.

Without matplotlib nothing is drawn: a study never fails for want of a picture.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.studies.drawing import new_figure, save, style
from biascope.studies.runs import Run
from biascope.support import files
from biascope.support.errors import UnsupportedError


def picture(
    run: Run,
    name: str,
    rows: int,
    columns: int,
    draw: Callable[[Any], None],
    size: tuple[float, float] = (2.6, 2.4),
    dpi: int = 130,
    *,
    caption: str,
) -> None:
    """Save figures/<name>.png, .svg and .pdf, drawn on a grid of axes [rows, columns] of `size` inches each.

    The caption, which is also what a reader without eyes gets, goes into figures/<name>.txt.
    """
    try:
        with style():
            figure, axes = new_figure(size[0] * columns, size[1] * rows, rows, columns)
            draw(np.asarray(axes, dtype=object).reshape(rows, columns))
    except UnsupportedError:
        return
    keep_picture(run, name, figure, caption, dpi)


def keep_picture(run: Run, name: str, figure: Any, caption: str, dpi: int = 150) -> None:
    """A figure in the formats of all figures, and its caption."""
    save(figure, run.path / "figures", name, dpi=dpi)
    files.write_text(run.path / "figures" / f"{name}.txt", caption + "\n")


def direction_picture(
    run: Run, name: str, subject: str, directions: Tensor, titles: Sequence[str], columns: int = 10
) -> None:
    """Directions [k, side, side]: pixels above, energy in Fourier space (DC in the centre) below."""
    columns = min(columns, len(directions))
    rows = -(-len(directions) // columns)

    def draw(axes: Any) -> None:
        for axis in axes.flat:
            axis.axis("off")
        for i, (direction, title) in enumerate(zip(directions.double(), titles)):
            top, low = axes[2 * (i // columns)][i % columns], axes[2 * (i // columns) + 1][i % columns]
            signed(top, direction)
            low.imshow(torch.fft.fftshift(torch.fft.fft2(direction).abs().square()).numpy(), cmap="magma")
            top.set_title(title, fontsize=8)

    caption = (
        f"{subject}: pixels above (red positive, blue negative), energy in Fourier space (DC in the centre) below."
    )
    picture(run, name, 2 * rows, columns, draw, (1.1, 1.2), caption=caption)


def signed(axis: Any, image: Tensor, **options: Any) -> None:
    """An image [h, w] with white at zero, without ticks."""
    limit = float(image.abs().max()) or 1.0
    axis.imshow(image.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, **options)
    axis.set_xticks([])
    axis.set_yticks([])
