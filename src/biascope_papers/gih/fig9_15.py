"""Figs 9 and 15: the average geometry G at initialisation, of the architectures and of the smallest example (A.10).

The traceless parts of the estimates of independent groups of networks agree only in what is no sampling noise. The
example is one filter of two taps on three pixels, average pooled: the paper prints the factor s^2/2; with its own
definition (the mean of two patches) it is s^2/4.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from biascope import InputError, average_geometry
from biascope.ensembles import record
from biascope.geometry.linear_cnn import (
    GELU_GAIN,
    dense_head,
    pool_matrix,
    pooled_cnn_geometry,
    tap_matrices,
    through_average_pool,
    through_convolution,
)
from biascope.linalg import psd_eigh
from biascope.studies import Chart, Estimate, HeatMap, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, jackknife_error
from biascope.studies.pictures import picture
from biascope.support import derive
from biascope_papers.gih.geometries import Geometry, initial_geometry
from biascope_papers.gih.networks import at_least, named, scope, shape_of
from biascope_papers.gih.training import mean_of

CAPTION = "The average geometry G, one row and one column for each pixel: red positive, blue negative, white zero."
NETS = ("mlp", "lenet", "resnet18", "vit")
SPREAD, SPAN = (
    "spread of the true eigenvalues / mean",
    "orders of magnitude from the first to the lowest tenth of the eigenvalues",
)
EXACT = torch.tensor([[1.0, 2.0, 1.0], [-1.0, 0.0, 1.0], [1.0, -1.0, 1.0]], dtype=torch.float64)
EXACT = EXACT / EXACT.norm(dim=1, keepdim=True)  # eigenvectors of the example


@study(
    "gih/fig9",
    sizes={
        "smoke": {"nets": ("mlp", "lenet"), "side": 16, "networks": 512},
        "laptop": {"nets": ("mlp", "lenet", "resnet18-narrow", "vit-small"), "networks": 4096},
        "paper": {"networks": 10_000},
    },
)
def fig9(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures; or your own as module:factory"] = NETS,
    side: Annotated[int, "side of the grey input image"] = 32,
    networks: Annotated[int, "networks drawn for G"] = 10_000,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 4,
    probe_std: Annotated[float, "standard deviation of the probes"] = 1e-3,
    corner: Annotated[int, "rows and columns of G shown as data (the pictures show all)"] = 64,
) -> StudyResult:
    """Average geometry of the architectures at initialisation: maps and spectra."""
    at_least(9, side=side)  # entries 8 pixels apart are compared
    at_least(1, corner=corner)
    nets, several = named(nets), max(groups, 2)
    shape = shape_of(1, side, nets)
    exact = lenet_geometry(side) if "lenet" in nets else None  # first: not every side has one
    found = {net: initial_geometry(run, net, shape, networks=networks, groups=several, probe_std=probe_std)
             for net in nets}  # fmt: skip
    profiles = {
        net: torch.stack([displacement_profile(each, side) for each in G.groups]) for net, G in found.items()
    }  # [groups, side]
    numbers: dict[str, Estimate] = {}
    for net, G in found.items():
        rows, entries = profiles[net], f"{net}: mean entry at distance"
        numbers[f"{net}: {SPREAD}"], numbers[f"{net}: {SPAN}"] = true_spread(G), span(G)
        numbers[f"{entries} 1-3 minus 8 and more"] = mean_of(rows[:, 1:4].mean(1) - rows[:, 8:].mean(1))
        numbers[f"{entries} 8 minus 4"] = mean_of(rows[:, 8] - rows[:, 4])
        run.log(net=net, relative_error=G.error)
    if exact is not None:
        numbers["lenet: correlation with the covariance recursion, noise removed"] = agreement(found["lenet"], exact)
    run.save_arrays("spectra", **{net: G.values for net, G in found.items()})
    _maps(run, found)
    text = "; ".join(f"{net} {numbers[f'{net}: {SPREAD}']}" for net in nets)
    profile = Chart(
        "profile", "Entries of G by the distance of two pixels in a row", "distance, pixels",
        "mean entry / mean diagonal entry", tuple(curve(net, range(side), rows) for net, rows in profiles.items()),
        "Zero off the diagonal for the MLP, a band for LeNet, peaks at multiples of 8 for ResNet18 and ViT.",
    )  # fmt: skip
    return StudyResult(
        measured=f"Spread of the true eigenvalues over their mean, sampling noise removed: {text}."
        f"{scope(networks=(nets, NETS))}",
        numbers=numbers,
        figures=(_spectra(found), profile, *(_corner(net, G, corner) for net, G in found.items())),
    )


@study("gih/fig15", sizes={"smoke": {"networks": 4000}, "laptop": {}, "paper": {}})
def fig15(
    run: Run,
    *,
    networks: Annotated[int, "networks sampled"] = 100_000,
    groups: Annotated[int, "independent groups of networks, for the error bars"] = 10,
    s: Annotated[float, "standard deviation of the filter"] = 1.0,
) -> StudyResult:
    """Eigenvalues and eigenvectors of the smallest convolutional example."""
    at_least(2, groups=groups)  # one has no error
    at_least(groups, networks=networks)
    at_least(1e-12, s=s)
    made = record(lambda: example(s))
    parts = [
        average_geometry(
            made, (1, 3), networks // groups, seed=derive(run.seed, i), device=run.device, probes=torch.ones(1, 1, 3)
        ).matrix  # a linear network: any probe will do
        for i in range(groups)
    ]
    total, exact = torch.stack(parts).mean(0), pooled_cnn_geometry(tap_matrices((3,), 2), 1, sp=s)
    values = torch.stack([4 * ((EXACT @ part) * EXACT).sum(1) / s**2 for part in parts])
    estimates = [Estimate.of(column) for column in values.T]
    vectors = psd_eigh(total).vectors
    overlap, off = abs(float(vectors[:, 2] @ EXACT[2])), float((total - exact).abs().max()) / s**2
    names = [f"eigenvalue {k + 1} of 4 G / s^2 (exact: {want})" for k, want in enumerate((3, 1, 0))]
    chart = Chart(
        "eigenvectors", "Eigenvectors of the example", "pixel", "entry",
        tuple(
            Series.of(f"eigenvalue {value.value:.2f}", (1, 2, 3), vectors[:, k], None, "dashed" if k == 2 else "line")
            for k, value in enumerate(estimates)
        ),
        "Three eigenvectors over three pixels; the one with eigenvalue zero alternates in sign.",
        "Dashed: the direction that is never learnt.",
    )  # fmt: skip
    return StudyResult(
        measured=f"4 G / s^2 of {networks} networks has the eigenvalues {estimates[0]}, {estimates[1]} and "
        f"{estimates[2].value:.1g}; the last eigenvector is (1, -1, 1) up to {1 - overlap:.1g}. The printed factor "
        "s^2/2 should be s^2/4.",
        numbers={
            **dict(zip(names, estimates)),
            "overlap of the third eigenvector with (1, -1, 1)": Estimate(overlap, None, networks),
            "largest difference of G from the closed form / s^2": Estimate(off, None, networks),
        },
        figures=(chart,),
    )


def example(s: float) -> nn.Module:
    """f(x) = mean over the two patches of phi.patch, phi ~ N(0, s^2 I): [n, 1, 3] -> [n, 1]."""
    convolution = nn.Conv1d(1, 1, 2, bias=False)
    nn.init.normal_(convolution.weight, std=s)
    return nn.Sequential(convolution, nn.AdaptiveAvgPool1d(1), nn.Flatten())


# ---- structure without sampling noise ----


def true_spread(G: Geometry) -> Estimate:
    """Standard deviation of the eigenvalues of the true G over their mean, from pairs of independent groups.

    <A_0, B_0> of the traceless parts of two independent estimates has the expectation ||G_0||^2. Where noise makes the
    square negative, the spread is 0; two errors still reach the root of what the square is two of its own errors up.
    """
    D = len(G.matrix)
    eye = torch.eye(D, dtype=torch.float64)
    traceless = [g / (g.trace() / D) - eye for g in G.groups]
    squares = [float((a * b).sum()) / D for a, b in combinations(traceless, 2)]
    square = max(float(np.mean(squares)), 0.0)
    value, n = square**0.5, len(G.groups)
    if n < 3:
        return Estimate(value, None, G.rows)
    pairs = list(combinations(range(n), 2))  # they share groups: leave one group out at a time
    left = [np.mean([s for s, pair in zip(squares, pairs) if out not in pair]) for out in range(n)]
    # four left-out means can agree by chance; the square is no surer than as many independent products
    doubt = max(jackknife_error(left), float(np.std(squares, ddof=1)) / len(squares) ** 0.5)
    up = ((square + 2 * doubt) ** 0.5 - value) / 2
    return Estimate(value, max(jackknife_error(np.clip(left, 0.0, None) ** 0.5), up), G.rows)


def span(G: Geometry) -> Estimate:
    """log10 of v^T G v along the leading eigenvector over its mean along the lowest tenth, error over groups.

    The eigenvectors come from the other groups of networks, so sampling noise does not spread the values; what is mixed
    by imprecise eigenvectors makes the number smaller, never larger on average.
    """
    found = []
    for i, own in enumerate(G.groups):
        others = torch.stack([g for j, g in enumerate(G.groups) if j != i]).mean(0)
        V = psd_eigh(others).vectors
        values = ((own @ V) * V).sum(0)
        low = values[-max(1, len(values) // 10) :].mean().clamp_min(1e-12 * float(values[0]))
        found.append(float(torch.log10(values[0] / low)))
    return mean_of(found)


def agreement(G: Geometry, exact: Tensor) -> Estimate:
    """Corr(true G, exact): the true G's length comes from pairs of independent groups, so noise does not dilute it.

    That length is an estimate itself, so the ratio may pass 1, which no correlation does: it is then 1.
    """

    def number(groups: Sequence[Tensor]) -> float:
        squares = [float((a * b).sum()) for a, b in combinations(groups, 2)]
        mean = torch.stack(list(groups)).mean(0)
        return float((mean * exact).sum() / exact.norm()) / math.sqrt(max(float(np.mean(squares)), 1e-300))

    n = len(G.groups)
    left = [number([g for j, g in enumerate(G.groups) if j != i]) for i in range(n)] if n > 2 else []
    return Estimate(min(max(number(G.groups), -1.0), 1.0), jackknife_error(left) if left else None, G.rows)


def displacement_profile(matrix: Tensor, side: int) -> Tensor:
    """Mean entry of G between pixels d columns apart in a row, over the mean diagonal entry, d = 0, ..., side - 1."""
    G = matrix.reshape(-1, side, side, matrix.shape[0] // side**2, side, side)[0, :, :, 0]  # first channel
    rows = torch.einsum("abac->abc", G)  # pixels of the same row
    means = [torch.stack([r.diagonal(d) for r in rows]).mean() for d in range(side)]
    return torch.stack(means) / means[0]


def lenet_geometry(side: int, channels: int = 1) -> Tensor:
    """G [channels side^2, channels side^2] of LeNet without sampling, trace 1: conv5(6)-avg2-conv5(16)-avg2-dense.

    The covariance recursion, exact for the linearised network without biases (GELU at x -> 0), whose channels are
    uncorrelated. Biases multiply channels by random gains, which hardly changes the shape of G.
    """
    sizes = [side, side - 4, (side - 4) // 2, (side - 4) // 2 - 4]
    if (side - 4) % 2 or sizes[3] < 2 or sizes[3] % 2:
        raise InputError(f"LeNet's poolings must divide evenly: side={side} gives {sizes}; use 16, 20, 24, 28 or 32")
    covariance = dense_head((sizes[3] // 2) ** 2, [1.0])
    for outer, inner, filters in ((sizes[2], sizes[3], 16), (sizes[0], sizes[1], 6)):
        covariance = through_average_pool(covariance, pool_matrix((inner, inner), 2)) * GELU_GAIN
        covariance = _convolution(covariance, outer, inner, filters)
    return torch.kron(torch.eye(channels, dtype=torch.float64), covariance) / (channels * covariance.trace())


def _convolution(covariance: Tensor, outer: int, inner: int, filters: int) -> Tensor:
    if inner * outer <= 100:
        return through_convolution(covariance, tap_matrices((outer, outer), 5), filters, 1.0)
    # sum over taps of shifted copies: the same without matrices of zeros and ones
    C = covariance.view(inner, inner, inner, inner)
    total = torch.zeros(outer, outer, outer, outer, dtype=C.dtype)
    for a in range(5):
        for b in range(5):
            total[a : a + inner, b : b + inner, a : a + inner, b : b + inner] += C
    return filters * total.view(outer**2, outer**2)


# ---- charts ----


def _spectra(found: dict[str, Geometry]) -> Chart:
    series = []
    for net, G in found.items():
        shown = {int(i) for i in np.geomspace(1, len(G.values), 60).round()}
        kept = [i for i in sorted(shown) if float(G.values[i - 1]) > 1e-12 * float(G.values[0])]
        series.append(Series.of(f"{net}, {G.rows} gradients", kept, [G.values[i - 1] / G.values[0] for i in kept]))
    return Chart(
        "spectra", "Eigenvalues of the average geometry", "index", "eigenvalue / largest", tuple(series),
        "The MLP's spectrum is flat up to sampling; those of the other networks fall over orders of magnitude.",
        "A finite number of gradients spreads even a flat spectrum (Marchenko-Pastur).", log_x=True, log_y=True,
    )  # fmt: skip


def _corner(net: str, G: Geometry, size: int) -> HeatMap:
    size = min(size, len(G.matrix))
    block = G.matrix[:size, :size] / G.matrix.diagonal().mean()
    return HeatMap.of(
        f"map-{net}", f"Average geometry of {net}, first {size} pixels", x=range(size), y=range(size), z=block.tolist(),
        x_label="pixel", y_label="pixel", z_label="entry / mean diagonal entry",
        alt=f"Upper left block of the average geometry of {net}.", diverging=True, low=-1.0, high=1.0,
    )  # fmt: skip


def _maps(run: Run, found: dict[str, Geometry]) -> None:
    def draw(axes: Any) -> None:
        for axis, (net, G) in zip(axes[0], found.items()):
            limit = float(G.matrix.abs().max()) / 2
            levels = (7 * G.matrix / limit).clamp(-7, 7).round()  # few levels: small noise is flat, the file small
            axis.imshow(levels.to(torch.int8).numpy(), cmap="RdBu_r", vmin=-7, vmax=7, interpolation="nearest")
            axis.set(title=net, xticks=[], yticks=[])

    dpi = 280  # about one dot per entry
    picture(run, "average-geometry", 1, len(found), draw, (4.0, 4.2), dpi=dpi, caption=CAPTION)
