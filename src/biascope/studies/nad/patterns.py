"""Fig. 1, compared between networks: is the pattern of directions that a network cannot learn its own?

Accuracies of transposed bins, (a, b) and (b, a), are two measurements of one quantity (see `frequencies`). How far the
map of one network agrees with its own transposed map is what chance leaves of a pattern; another network with the same
pattern would agree with it as well as that.

`--runs` takes the folders of finished runs of `nad/fig1`, as they are kept in `reproductions`; without it maps are
trained.

Rule: for every pair of networks the correlation between the one's accuracies and the other's at the transposed bin, on
the bins that both have, lies below the geometric mean of their correlations with themselves by two standard errors
(leaving out one transposed pair at a time). A pair with a network whose own correlation is not positive by two standard
errors has no pattern to compare, one with fewer than eight transposed pairs too few bins: not tested. (Written when the
four maps of the paper's size were known one by one, before any two were compared.)
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Annotated

import numpy as np
import torch

from biascope.errors import InputError
from biascope.studies.estimates import above, jackknife_error
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.nad.finished import Runs, finished_runs
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "Every convolutional network has a pattern of its own of Fourier directions that it cannot learn."
NETS = ("lenet", "vgg11", "resnet18", "densenet121")
FEWEST = 8  # transposed pairs
Map = dict[tuple[int, int], float]  # accuracy by frequency


@study(
    "nad/fig1-patterns",
    paper="nad",
    figure="1",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "nets": ("lenet", "lenet-avg"), "window": 6, "epochs": 6},
        "laptop": {**d.LAPTOP, "nets": ("lenet", "resnet18"), "width": 8, "image_size": 16, "stride": 1, "sample": 40},
        "paper": {},
    },
)
def fig1_patterns(
    run: Run,
    *,
    runs: Runs = (),
    nets: Annotated[tuple[str, ...], "convolutional networks, where maps are trained"] = NETS,
    image_size: d.Side = 32,
    width: d.Width = 0,
    stride: f.Stride = 2,
    window: f.Window = 0,
    sample: f.Sample = 0,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Correlations of the accuracy maps of several networks, beside those of each with itself."""
    if runs:
        alike = ("image_size", "n", "sigma", "eps", "gap", "epochs")
        found = finished_runs(runs, "nad/fig1", "map", alike)
        maps = {each.net: as_map(each.arrays["frequencies"], each.arrays["test"]) for each in found}
        side = int(found[0].options["image_size"])
    else:
        basis, side = f.bins(image_size, "re", stride, window, sample, run.seed), image_size
        maps = {}
        for net in nets:
            factory = d.architecture(net, image_size, width=0 if net.startswith("lenet") else width)
            trained = d.train_directions(run, net, factory, basis.vectors, protocol)
            maps[net] = as_map(basis.frequencies, torch.as_tensor(trained.test))
    if len(maps) < 2:
        raise InputError(f"{len(maps)} network: two or more are compared; give their --runs, or more --nets")
    numbers: dict[str, Estimate] = {}
    said, right, names = list[str](), list[bool | None](), list[str]()
    for one, other in combinations(maps, 2):
        pairs = transposed(maps[one], maps[other], side)
        names.append(f"{one}, {other}")
        between, within, gap = compared(maps[one], maps[other], pairs)
        numbers |= {f"{one} and {other}": between, f"{one} and {other}: with themselves": within}
        numbers[f"{one} and {other}: difference"] = gap
        selves = [self_correlation(maps[net], pairs) for net in (one, other)]
        enough = len(pairs) >= FEWEST and all(above(each) for each in selves)
        right.append(above(gap) if enough else None)
        said.append(f"{one} and {other} {between} ({within} with themselves, {len(pairs)} transposed pairs)")
    verdict = "not tested" if None in right else "confirmed" if all(right) else "not confirmed"
    x = range(1, len(names) + 1)
    chart = Chart(
        name="correlations",
        title="Correlation of accuracy maps",
        x_label="pair of networks",
        y_label="correlation at transposed bins",
        series=tuple(
            Series.of(
                label,
                x,
                [numbers[key].value for key in keys],
                [numbers[key].standard_error or 0.0 for key in keys],
                "points",
            )
            for label, keys in (
                ("of the two networks", [name.replace(", ", " and ") for name in names]),
                ("of each with itself", [f"{name.replace(', ', ' and ')}: with themselves" for name in names]),
            )
        ),
        alt="Correlations between the maps of two networks, beside those of each map with its own transpose.",
        caption="Error bars: one standard error, from leaving out one transposed pair at a time.",
        x_names=tuple(names),
    )
    return StudyResult(
        verdict,  # type: ignore[arg-type]
        CLAIM,
        f"Correlation of accuracies at transposed bins of {side} x {side} images: {'; '.join(said)}.",
        numbers,
        (chart,),
    )


def as_map(frequencies: torch.Tensor, test: torch.Tensor) -> Map:
    """Accuracies by frequency.

    Example:
        >>> as_map(torch.tensor([[0, 2]]), torch.tensor([0.5]))
        {(0, 2): 0.5}
    """
    return {(int(a), int(b)): float(value) for (a, b), value in zip(frequencies.tolist(), test.tolist())}


def transposed(one: Map, other: Map, side: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of bins (a, b), (b, a) that both maps have, each pair once; (b, a) may stand as its conjugate.

    Example:
        >>> transposed({(0, 2): 0.5, (2, 0): 0.6, (2, 2): 0.7}, {(0, 2): 1.0, (2, 0): 1.0}, 8)
        [((0, 2), (2, 0))]
    """
    found, taken = [], set[tuple[int, int]]()
    common = {tuple(k % side for k in key): key for key in one if key in other}
    for (a, b), key in common.items():
        twin = common.get((b, a), common.get((-b % side, -a % side)))
        if twin is not None and twin != key and key not in taken and twin not in taken:
            found.append((key, twin))
            taken |= {key, twin}
    return found


def compared(
    one: Map, other: Map, pairs: list[tuple[tuple[int, int], tuple[int, int]]]
) -> tuple[Estimate, Estimate, Estimate]:
    """Correlation between the maps, geometric mean of those within, their difference; errors by leaving out pairs."""

    def both(kept: list[int]) -> tuple[float, float]:
        use = [pairs[i] for i in kept]
        own = [max(0.0, correlation(each, each, use)) for each in (one, other)]
        return correlation(one, other, use), math.sqrt(own[0] * own[1])

    n = len(pairs)
    if n < 4:
        return Estimate(math.nan, None, n), Estimate(math.nan, None, n), Estimate(math.nan, None, n)
    between, within = both(list(range(n)))
    left = np.array([both([j for j in range(n) if j != i]) for i in range(n)])
    errors = [jackknife_error(column) for column in (left[:, 0], left[:, 1], left[:, 1] - left[:, 0])]
    return (
        Estimate(between, errors[0], n),
        Estimate(within, errors[1], n),
        Estimate(within - between, errors[2], n),
    )


def self_correlation(one: Map, pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> Estimate:
    """How far the map of a network agrees with its own transpose."""
    n = len(pairs)
    if n < 4:
        return Estimate(math.nan, None, n)
    left = [correlation(one, one, pairs[:i] + pairs[i + 1 :]) for i in range(n)]
    return Estimate(correlation(one, one, pairs), jackknife_error(left), n)


def correlation(one: Map, other: Map, pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Correlation of `one` at each bin with `other` at the transposed one; 0 where one of them is constant.

    Example:
        >>> same = {(0, 1): 0.5, (1, 0): 0.5, (0, 2): 0.9, (2, 0): 0.9}
        >>> correlation(same, same, [((0, 1), (1, 0)), ((0, 2), (2, 0))])
        1.0
    """
    x = np.array([one[bin] for pair in pairs for bin in pair])
    y = np.array([other[bin] for pair in pairs for bin in pair[::-1]])
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return round(float(np.corrcoef(x, y)[0, 1]), 12)
