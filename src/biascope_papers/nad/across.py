"""Figs. 1, 5 and 6, compared between networks: patterns and directions of their own, accuracy that falls with decay.

Fig. 1: how far the map of one network agrees with its own transposed map is what chance leaves of a pattern; another
network with the same pattern would agree with it as well as the geometric mean of their correlations with themselves.
Fig. 6: decay is measured by the effective rank of the spectrum, how soon the accuracy falls by the number of directions
that are learnt, the sum of 2 accuracy - 1 over all indices. `--runs` takes the folders of finished runs of `nad/fig1`,
`nad/fig5` or `nad/fig6`; without it networks are trained.
"""

import math
from collections.abc import Sequence, Sized
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from biascope import InputError
from biascope.linalg import effective_rank, subspace_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, load_result, study
from biascope.studies.estimates import above, below, difference, jackknife_error
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d
from biascope_papers.nad import frequencies as f

Runs = Annotated[tuple[str, ...], "folders of finished runs, one for each network, in place of training"]
Trained = Annotated[tuple[str, ...], "convolutional networks, where networks are trained"]
NETS = ("lenet", "vgg11", "resnet18", "densenet121")
Map = dict[tuple[int, int], float]  # accuracy by frequency
Pairs = list[tuple[tuple[int, int], tuple[int, int]]]  # of transposed bins


def finished_runs(
    folders: Sequence[str], study: str, array: str, alike: Sequence[str]
) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """By network, options and one of the arrays of finished runs of `study`.

    Refused unless they are of different networks with the same `alike`.
    """
    found: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
    for folder in folders:
        run, _, _ = load_result(folder)
        if run.config["study"] != study:
            raise InputError(f"{folder} holds a run of {run.config['study']}; runs of {study} are compared here")
        options = run.config["options"]
        if options["net"] in found:
            raise InputError(f"two runs of {options['net']}: give one for each network")
        found[options["net"]] = options, run.load_arrays(array)
    for name in alike:
        values = [options.get(name) for options, _ in found.values()]
        if any(value != values[0] for value in values):
            raise InputError(f"the runs differ in {name} ({', '.join(map(str, values))}): they cannot be compared")
    return found


def _check_two(networks: Sized) -> None:
    if len(networks) < 2:
        raise InputError(f"{len(networks)} network: two or more are compared; give their --runs, or more --nets")


@study(
    "nad/fig1-patterns",
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
    nets: Trained = NETS,
    width: d.Width = 0,
    grid: f.Grid = f.GRID,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Correlations of the accuracy maps of several networks, beside those of each with itself."""
    maps, side = dict[str, Map](), grid.image_size
    for net, (options, kept) in finished_runs(
        runs, "nad/fig1", "map", ("image_size", "n", "sigma", "eps", "gap", "epochs")
    ).items():
        maps[net], side = as_map(kept["frequencies"], kept["test"]), int(options["image_size"])
    for net in () if runs else nets:
        basis = grid.basis(run.seed)
        factory = d.architecture(net, side, width=0 if net.startswith("lenet") else width)
        trained = d.train_directions(run, net, factory, basis.vectors, protocol)
        maps[net] = as_map(basis.frequencies, torch.as_tensor(trained.test))
    _check_two(maps)
    numbers: dict[str, Estimate] = {}
    findings, names = list[str](), list[str]()
    for one, other in combinations(maps, 2):
        pairs, name = transposed(maps[one], maps[other], side), f"{one} and {other}"
        between, within, apart = compared(maps[one], maps[other], pairs)
        numbers |= {name: between, f"{name}: with themselves": within, f"{name}: difference": apart}
        numbers[f"{name}: transposed pairs"] = Estimate(len(pairs))
        numbers |= {f"{name}: {net} with itself": self_correlation(maps[net], pairs) for net in (one, other)}
        names.append(name)
        findings.append(f"{name} {between} ({within} with themselves, {len(pairs)} transposed pairs)")
    lines = {"of the two networks": names, "of each with itself": [f"{name}: with themselves" for name in names]}
    chart = Chart(
        "correlations",
        "Correlation of accuracy maps",
        "pair of networks",
        "correlation at transposed bins",
        tuple(
            Series.of(label, range(1, len(names) + 1), *_values_errors([numbers[key] for key in keys]), "points")
            for label, keys in lines.items()
        ),
        alt="Correlations between the maps of two networks, beside those of each map with its own transpose.",
        caption="Error bars: one standard error, from leaving out one transposed pair at a time.",
        x_names=tuple(name.replace(" and ", ", ") for name in names),
    )
    return StudyResult(
        measured=f"Correlation of accuracies at transposed bins of {side} x {side} images: {'; '.join(findings)}.",
        numbers=numbers,
        figures=(chart,),
    )


def _values_errors(estimates: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    return [each.value for each in estimates], [each.standard_error or 0.0 for each in estimates]


def as_map(frequencies: Tensor, test: Tensor) -> Map:
    """Accuracies by frequency."""
    return {(int(y), int(x)): float(value) for (y, x), value in zip(frequencies.tolist(), test.tolist())}


def transposed(one: Map, other: Map, side: int) -> Pairs:
    """Pairs of bins (a, b), (b, a) that both maps have, each pair once; (b, a) may stand as its conjugate."""
    found, taken = [], set[tuple[int, int]]()
    common = {tuple(k % side for k in key): key for key in one if key in other}
    for (row, column), key in common.items():
        twin = common.get((column, row), common.get((-column % side, -row % side)))
        if twin is not None and twin != key and key not in taken and twin not in taken:
            found.append((key, twin))
            taken |= {key, twin}
    return found


def compared(one: Map, other: Map, pairs: Pairs) -> tuple[Estimate, Estimate, Estimate]:
    """Correlation between the maps, geometric mean of those within, their difference; errors by leaving out pairs."""

    def all_three(use: Pairs) -> tuple[float, float, float]:
        own = [max(0.0, correlation(each, each, use)) for each in (one, other)]
        between, within = correlation(one, other, use), math.sqrt(own[0] * own[1])
        return between, within, within - between

    n = len(pairs)
    if n < 4:
        return Estimate(math.nan, None, n), Estimate(math.nan, None, n), Estimate(math.nan, None, n)
    left = np.array([all_three(pairs[:i] + pairs[i + 1 :]) for i in range(n)])
    between, within, apart = (
        Estimate(value, jackknife_error(column), n) for value, column in zip(all_three(pairs), left.T)
    )
    return between, within, apart


def self_correlation(one: Map, pairs: Pairs) -> Estimate:
    """How far the map of a network agrees with its own transpose."""
    return compared(one, one, pairs)[0]


def correlation(one: Map, other: Map, pairs: Pairs) -> float:
    """Correlation of `one` at each bin with `other` at the transposed one; 0 where one of them is constant."""
    x = np.array([one[bin] for pair in pairs for bin in pair])
    y = np.array([other[bin] for pair in pairs for bin in pair[::-1]])
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return round(float(np.corrcoef(x, y)[0, 1]), 12)


@study(
    "nad/fig5-signature",
    sizes={
        "smoke": {"nets": ("lenet", "lenet-avg"), "image_size": 16, "networks": 64},
        "laptop": {"nets": ("lenet", "vgg11"), "networks": 64},
        "paper": {},
    },
)
def fig5_signature(
    run: Run,
    *,
    runs: Runs = (),
    nets: Trained = NETS,
    image_size: d.Side = 32,
    networks: a.Networks = 10_000,
    head: a.Head = "marginal",
    first: Annotated[int, "leading directions whose spans are compared"] = 10,
    reference: a.Reference = "",
) -> StudyResult:
    """Overlap of the first directions of different networks, beside that of each with its published ones."""
    found = {net: kept["directions"] for net, (_, kept) in finished_runs(runs, "nad/fig5", "nads", ()).items()}
    for net in () if runs else nets:
        source = a.Source(net, image_size, 0, networks, head)
        found[net] = a.directions_of(run, source, "auto")[0]
    _check_two(found)
    spans = {net: torch.as_tensor(U)[:first].flatten(1).double().T for net, U in found.items()}
    pairs = {
        f"{one} and {other}: overlap of the first {first}": subspace_overlap(spans[one], spans[other])
        for one, other in combinations(spans, 2)
    }
    own = dict[str, float]()
    for net, span in spans.items():
        published = a.published_directions(net, reference, len(span))
        if published is not None:
            own[f"{net}: overlap of the first {first} with the published ones"] = subspace_overlap(
                span, published[:first].T
            )
    numbers = {name: Estimate(value) for name, value in {**pairs, **own}.items()}
    numbers[f"largest overlap of the first {first} of two networks"] = Estimate(max(pairs.values()))
    least = min(own.values(), default=math.nan)
    if own:
        name = f"smallest overlap of the first {first} of a network with its published ones"
        numbers[name] = Estimate(least)
    chart = Chart(
        "overlaps",
        f"Overlap of the spans of the first {first} directions",
        "pair",
        "mean squared cosine of the principal angles",
        (Series.of("overlap", range(1, len(pairs) + 1), list(pairs.values()), style="points"),),
        alt="; ".join(f"{name.split(':')[0]} {value:.2f}" for name, value in pairs.items()) + ".",
        x_names=tuple(name.split(":")[0].replace(" and ", ", ") for name in pairs),
    )
    return StudyResult(
        measured=f"Spans of the first {first} directions of two networks overlap by at most {max(pairs.values()):.3f} "
        f"({', '.join(spans)}), those of one with the published ones by at least {least:.3f}.",
        numbers=numbers,
        figures=(chart,),
    )


@study(
    "nad/fig6-decay",
    sizes={
        "smoke": {**d.SMOKE, "nets": ("lenet", "mlp"), "networks": 32, "count": 6, "epochs": 8},
        "laptop": {**d.LAPTOP, "nets": ("lenet", "mlp"), "image_size": 16, "networks": 256, "count": 16},
        "paper": {},
    },
)
def fig6_decay(
    run: Run,
    *,
    runs: Runs = (),
    nets: Trained = NETS,
    image_size: d.Side = 32,
    networks: a.Networks = 10_000,
    head: a.Head = "marginal",
    count: a.Count = 64,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Effective rank of the spectrum against the number of directions that are learnt, one point per network."""
    ranks, learnt = dict[str, float](), dict[str, Estimate]()

    def add(net: str, at: d.Array, test: d.Array, values: Tensor) -> None:
        ranks[net], learnt[net] = effective_rank(values.clamp(min=0)), directions_learnt(at, test, len(values))

    alike = ("image_size", "head", "step", "n", "sigma", "eps", "gap", "epochs")
    for net, (_, kept) in finished_runs(runs, "nad/fig6", "sweep", alike).items():
        add(net, kept["indices"].double().numpy(), kept["test"].double().numpy(), kept["eigenvalues"].double())
    for net in () if runs else nets:
        U, values = a.directions_of(run, a.Source(net, image_size, 0, networks, head), protocol.precision)
        indices = a.spread_indices(count, image_size**2)
        trained = d.train_directions(run, net, d.architecture(net, image_size), U[indices], protocol)
        add(net, np.array(indices, dtype=float), trained.test, values)
    _check_two(ranks)
    ordered = sorted(ranks, key=ranks.__getitem__, reverse=True)
    gaps = {(slow, fast): difference(learnt[slow], learnt[fast]) for slow, fast in combinations(ordered, 2)}
    numbers = {f"{net}: directions learnt": learnt[net] for net in ranks}
    numbers |= {f"{net}: effective rank of the spectrum": Estimate(ranks[net]) for net in ranks}
    numbers |= {f"directions learnt, {slow} minus {fast} of faster decay": gap for (slow, fast), gap in gaps.items()}
    findings = "; ".join(f"{net} effective rank {ranks[net]:.3g}, {learnt[net]} directions learnt" for net in ranks)
    chart = Chart(
        "decay",
        "Directions learnt and the decay of the spectrum",
        "effective rank of the spectrum",
        "directions learnt",
        tuple(Series.of(net, [ranks[net]], *_values_errors([learnt[net]]), "points") for net in ranks),
        alt="One point per network; as claimed, networks further to the right lie higher.",
        caption="The sum of 2 accuracy - 1 over all indices; bars: one standard error.",
        log_x=True,
        log_y=True,
    )
    return StudyResult(
        measured=f"{findings}. Pairs of networks: {len(gaps)}, of which {sum(map(above, gaps.values()))} surely in the "
        f"claimed order and {sum(map(below, gaps.values()))} surely in the other.",
        numbers=numbers,
        figures=(chart,),
    )


def directions_learnt(at: d.Array, accuracy: d.Array, total: int) -> Estimate:
    """The sum of 2 accuracy - 1 over `total` indices, from those trained on, `at` [k], rising."""

    def total_of(at: d.Array, accuracy: d.Array) -> float:
        weight = np.diff([-0.5, *(at[1:] + at[:-1]) / 2, total - 0.5])
        return float(weight @ (2 * accuracy - 1))

    n = len(at)
    left = [total_of(np.delete(at, i), np.delete(accuracy, i)) for i in range(n)] if n > 3 else []
    return Estimate(total_of(at, accuracy), jackknife_error(left) if left else None, n)
