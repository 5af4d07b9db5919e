"""Fig. 11: the same ordering at the edge of under-parameterisation: a small LeNet with as many examples as parameters.

(a) CIFAR images relabelled along the eigenvectors of GSG (as Fig. 4), (b) isotropic Gaussian data along those of G (as
Fig. 10), both with 50,000 examples for about 48,000 parameters. Verdict rule: in both parts the Spearman correlation of
index and test accuracy, averaged over the boundaries, is negative by 2 standard errors over repeats; fewer than four
directions test nothing.
"""

from typing import Annotated

from torch import Tensor

from biascope.arguments import check_count
from biascope.errors import InputError
from biascope.geometry import data_second_moment
from biascope.studies.estimates import below
from biascope.studies.invariance.boundary_sweep import (
    BOUNDARIES,
    Sweep,
    accuracy_chart,
    check_boundaries,
    enough,
    fall,
    mean_order,
    order,
    sweep_directions,
    too_few,
)
from biascope.studies.invariance.charts import decide, restricted, together
from biascope.studies.invariance.fig4 import subset
from biascope.studies.invariance.geometries import spread_indices
from biascope.studies.invariance.images import Source, said
from biascope.studies.invariance.networks import factory, shape_of
from biascope.studies.invariance.relabelled import Sine, said_sinusoid, sweep_labels
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "A small LeNet trained on as many samples as it has parameters still generalises along directions with a large "
    "eigenvalue and fails along the others: over-parameterisation is not what causes the geometric bias."
)
SWEEP = Sweep(chunk=26)


@study(
    "gih/fig11",
    paper="invariance",
    figure="11",
    claim=CLAIM,
    sizes={
        "smoke": {"source": "synthetic", "side": 16, "networks": 48, "heads": 32, "points": 3, "n_train": 256,
                  "n_test": 200, "epochs": 5, "boundaries": ("linear",), "noise": 0.0, "engine": "vmap"},
        "laptop": {"side": 16, "networks": 256, "heads": 64, "points": 4, "n_train": 12_000, "n_test": 2000,
                   "epochs": 5, "boundaries": ("linear",)},
        "paper": {},
    },
)  # fmt: skip
def fig11(
    run: Run,
    *,
    source: Annotated[Source, "cifar10, or a synthetic stand-in, for part (a)"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    points: Annotated[int, "directions tried, evenly spaced over the spectrum"] = 52,
    noise: Annotated[float, "variance of the label noise of part (a) over the channel variance"] = 0.2,
    n_train: Annotated[int, "training examples; at most 50,000 images are there"] = 50_000,
    n_test: Annotated[int, "test examples"] = 10_000,
    repeats: Annotated[int, "independent trainings per direction"] = 3,
    more_epochs: Annotated[float, "factor on the epochs for the sinusoidal boundary"] = 2.5,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.5,
    sinusoid: Sine = "projection",
    sweep: Sweep = SWEEP,
) -> StudyResult:
    """Accuracy by direction of a small LeNet with as many examples as parameters."""
    net, kinds, steps = "lenet-small", check_boundaries(sweep.boundaries), check_count(points, "points", least=2) - 1
    colour, grey = shape_of(3, side, [net]), shape_of(1, side, [net])
    weights = sum(p.numel() for p in factory(net, colour)().parameters())
    train, test = subset(run, source, side, n_train, n_test)
    if len(train) < n_train:  # part (b) has as many as are asked for, and both parts should have the same
        raise InputError(f"n_train={n_train}: there are {len(train)} training images for part (a)")
    S = data_second_moment(train.to(run.device), normalise=True).cpu()
    vectors = sweep.gsg_vectors(run, net, colour, S)
    numbers: dict[str, Estimate] = {}
    results: dict[str, dict[str, Tensor]] = {"CIFAR": {}, "isotropic": {}}
    sizes = {"CIFAR": len(S), "isotropic": side**2}
    places = {part: spread_indices(D, max(1, (D - 1) // steps)) for part, D in sizes.items()}
    grey_geometry = sweep.later(run, net, grey)
    for boundary in kinds:
        protocol = sweep.protocol(boundary, more_epochs, lr)
        _, accuracy, ceiling = sweep_labels(
            run, "relabel", net, train, test, [vectors[i] for i in places["CIFAR"]], boundary, protocol, noise=noise,
            repeats=repeats, chunk=sweep.chunk, sinusoid=sinusoid,
        )  # fmt: skip
        results["CIFAR"][boundary] = accuracy
        if noise > 0:
            results["CIFAR"][f"{boundary}, ceiling of the label noise"] = ceiling
        results["isotropic"][boundary] = sweep_directions(
            run, "sweep", net, grey_geometry, places["isotropic"], grey, boundary, protocol,
            n_train=n_train, n_test=n_test, repeats=repeats, chunk=sweep.chunk,
        )[1]  # fmt: skip
    right, charts = dict[str, bool | None](), list[Chart]()
    for part, tests in results.items():
        mean = numbers[f"{part}: Spearman, mean over boundaries"] = mean_order(places[part], [tests[b] for b in kinds])
        for b in kinds:
            numbers[f"{part}, {b}: Spearman(index, accuracy)"] = order(places[part], tests[b])
            numbers[f"{part}, {b}: first minus last direction, points"] = fall(tests[b])
        right[part] = below(mean) if enough(places[part]) else None
        chart = accuracy_chart(f"{net}-{part}", places[part], tests, f"{n_train} examples, {weights} parameters.",
                               "GSG" if part == "CIFAR" else "G")  # fmt: skip
        charts.append(chart)
    told = "; ".join(f"{part} {numbers[f'{part}: Spearman, mean over boundaries']}" for part in results)
    claim, untested = restricted(CLAIM, boundaries=(kinds, BOUNDARIES), images=([source], ["cifar10"]))
    return StudyResult(
        verdict=decide(together(right.values()), repeats),
        claim=claim,
        measured=f"Spearman(index, accuracy), mean over boundaries: {told}. {n_train} examples for {weights} "
        f"parameters; "
        f"part (a): {said(source, side)}, label noise {noise:g}, whose ceiling falls along the spectrum by itself."
        f"{too_few(*places.values())}{said_sinusoid(kinds, sinusoid)}{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )
