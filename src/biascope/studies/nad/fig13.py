"""Figs. 13 to 16: more anisotropy directions by Algorithm 1, the first twenty and then every fiftieth.

The figures are pictures without a claim in words; what they show is put as one here. Rule for the verdict, set before
any run: the strongest 5 % of frequencies hold more than 0.4 of the energy of the first twenty directions (0.2 for
random ones) even two standard errors down, errors over the directions.

A second part of the rule, that the order of the directions is not that of their frequencies (rank correlation below
0.95), was dropped after a first smoke run of LeNet had just met it (0.93): the paper says this of DenseNet-121 alone.
The correlation is still measured.
"""

from typing import Annotated

import numpy as np
import torch

from biascope.linalg import subspace_overlap
from biascope.studies.estimates import above, rank_correlation
from biascope.studies.nad import anisotropy as a
from biascope.studies.nad import directional as d
from biascope.studies.nad.fig5 import concentration, energy
from biascope.studies.pictures import direction_picture
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "Not only the first three but the first twenty directions are concentrated on few Fourier frequencies."
FIRST, EVERY = 20, 50
RANDOM = 0.05 * (1 + np.log(20))  # expected energy of noise in its strongest 5 % of frequencies


@study(
    "nad/fig13",
    paper="nad",
    figure="13",
    claim=CLAIM,
    sizes={
        "smoke": {"image_size": 16, "networks": 32},
        "laptop": {"networks": 256},
        "paper": {},
    },
)
def fig13(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    precision: d.Arithmetic = "auto",
    columns: Annotated[int, "directions side by side in the picture"] = 10,
    reference: a.Reference = "",
) -> StudyResult:
    """More anisotropy directions of an architecture, in pixels and in Fourier space."""
    net, image_size, networks = source.net, source.image_size, source.networks
    U, values = a.directions_of(run, source, precision)
    indices = [*range(min(FIRST, len(U))), *range(EVERY, len(U), EVERY)]
    direction_picture(
        run, "directions", f"Anisotropy directions of {net}", U[indices], [f"$u_{{{i + 1}}}$" for i in indices], columns
    )
    shares = np.array([concentration(u[None]) for u in U])
    frequency = mean_frequency(U)
    first = Estimate.of(shares[:FIRST])
    order = rank_correlation(np.arange(100.0)[: len(U)], frequency[:100])
    numbers = {
        "energy of the first 20 in their strongest 5 % of frequencies": first,
        "the same for random directions": Estimate(float(RANDOM)),
        "Spearman(index, mean frequency), first 100": order,
        "energy of u_1 at DC": Estimate(float(energy(U[:1])[0, 0, 0])),
    }
    said = ""
    if image_size == 32:
        comb = energy(U)[:, ::4, ::4].sum((1, 2)).numpy()
        for low, high in ((0, 4), (0, 64), (64, 128)):
            numbers[f"energy at multiples of 4, index {low} to {high - 1}"] = Estimate.of(comb[low:high])
        if net == "resnet18":
            numbers["published energy at multiples of 4, index 0 to 3"] = Estimate(0.995)
            numbers["published energy at multiples of 4, index 64 to 127"] = Estimate(0.05)
            said = f" On the comb of multiples of 4 the first four have {comb[:4].mean():.3f} of their energy (0.995)."
    published = a.published_directions(net, reference, image_size**2)
    if published is not None:
        for k in (1, 10, 50):
            numbers[f"overlap with the published first {k}"] = Estimate(
                subspace_overlap(U[:k].flatten(1).double().T, published[:k].T)
            )
    shown = np.unique(np.geomspace(1, len(U), 80).round().astype(int)) - 1
    chart = Chart(
        name="structure",
        title=f"Structure of the directions of {net}",
        x_label="index",
        y_label="share of energy; mean frequency over the largest",
        series=(
            Series.of("energy in the strongest 5 % of frequencies", shown + 1, shares[shown]),
            Series.of("the same for random directions", [1, len(U)], [RANDOM, RANDOM], style="dashed"),
            Series.of(
                "mean frequency / largest frequency", shown + 1, frequency[shown] / frequency.max(), None, "points"
            ),
        ),
        alt=f"The share of energy goes from {shares[0]:.2f} at the first to {shares[-1]:.2f} at the last direction.",
        log_x=True,
    )
    return StudyResult(
        "confirmed" if above(first, 0.4) else "not confirmed",
        CLAIM,
        f"{net}, {networks} networks: the first twenty directions have {first} of their energy in their strongest 5 % "
        f"of frequencies ({RANDOM:.2f} for random ones); rank correlation of index and mean frequency over the first "
        f"100: {order}; eigenvalue 20 is {float(values[19] / values[0]):.3f} of the first.{said}",
        numbers,
        (chart,),
    )


def mean_frequency(directions: torch.Tensor) -> d.Array:
    """Mean distance from DC [k] of directions [k, side, side], weighted by energy, in cycles per image.

    Example:
        >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(16) / 16).expand(16, 16)
        >>> round(float(mean_frequency(wave[None])[0]), 6)
        3.0
    """
    side = directions.shape[-1]
    k = torch.fft.fftfreq(side, 1 / side, dtype=torch.float64)
    radius = (k[:, None] ** 2 + k[None, :] ** 2).sqrt()
    found: d.Array = (energy(directions) * radius).sum((1, 2)).numpy()
    return found
