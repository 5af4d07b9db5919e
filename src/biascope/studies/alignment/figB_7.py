"""Fig. B.7: depth and the order in which easy and difficult examples are aligned with.

As Fig. 4.4 with random labels, for MLPs of several depths (width 60, learning rate 0.01) and several seeds.

Verdict: confirmed if the rank correlation of depth with the ratio CKA(easy) / CKA(difficult), each averaged over the
probes after the first, is positive by two standard errors over seeds. One seed tests nothing. (Changed after the first
run: it had been the largest ratio over the probes, which noise alone raises; it is still reported.) Whether deeper
networks also rise later, and higher, is reported and not judged.
"""

from typing import Annotated

from biascope.progress import progress
from biascope.studies.alignment.difficulty import Mixture, follow, half_rise, largest_ratio, mean_ratio
from biascope.studies.alignment.fig4_4 import chart
from biascope.studies.estimates import above, curve, decide, spearman
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "The deeper the network, the larger the ratio of its tangent kernel's alignment with easy to that with difficult "
    "examples. (That deeper networks align later, and more, is shown, not judged.)"
)


@study(
    "alignment/figB.7",
    paper="alignment",
    figure="B.7",
    claim=CLAIM,
    sizes={
        "smoke": {
            "dataset": "digits",
            "depths": "1,5",
            "n_easy": 400,
            "n_difficult": 80,
            "width": 40,
            "epochs": 15,
            "batch": 40,
            "probes": 5,
            "probe_size": 30,
            "seeds": 2,
        },
        "laptop": {"epochs": 30, "probes": 16, "depths": "1,3,6"},
        "paper": {"seeds": 8},
    },
)
def fig_b7(
    run: Run,
    *,
    dataset: Annotated[str, "mnist, or digits as a stand-in"] = "mnist",
    depths: Annotated[tuple[int, ...], "numbers of hidden layers"] = (1, 2, 4, 6, 9),
    n_easy: Annotated[int, "easy training images"] = 10_000,
    n_difficult: Annotated[int, "training images with random labels"] = 1000,
    width: Annotated[int, "units per hidden layer"] = 60,
    lr: Annotated[float, "learning rate; momentum is 0.9"] = 0.01,
    batch: Annotated[int, "images per step"] = 100,
    epochs: Annotated[float, "passes over the training images"] = 60,
    probes: Annotated[int, "measurements, evenly spaced in log iterations"] = 25,
    probe_size: Annotated[int, "images per kernel"] = 100,
    seeds: Annotated[int, "initialisations and draws of the images"] = 3,
) -> StudyResult:
    """Alignment with easy and difficult examples for networks of several depths."""
    ratios: list[list[float]] = [[] for _ in range(seeds)]
    largest: list[list[float]] = [[] for _ in range(seeds)]
    delays: list[list[float]] = [[] for _ in range(seeds)]
    tops: list[list[float]] = [[] for _ in range(seeds)]
    charts: list[Chart] = []
    for depth in progress(depths, "depths"):
        m = Mixture(dataset, "random", n_easy, n_difficult, depth, width, lr, batch, epochs, probes, probe_size)
        found = [follow(run, m, seed) for seed in range(seeds)]
        for seed, f in enumerate(found):
            ratios[seed].append(mean_ratio(f))
            largest[seed].append(largest_ratio(f))
            delays[seed].append(half_rise(f["steps"], f["easy"]))
            tops[seed].append(float(f["easy"].max()))
        charts.append(chart(found, f"{depth}", f"Alignment of a network with {depth} hidden layers"))
    numbers = {
        f"rank correlation of depth and the {name}": Estimate.of([spearman(list(depths), row) for row in rows])
        for name, rows in (
            ("ratio of mean CKAs", ratios),
            ("largest ratio", largest),
            ("iteration of half of the rise", delays),
            ("largest CKA", tops),
        )
    }
    growth = next(iter(numbers.values()))
    by_depth = {d: Estimate.of([row[i] for row in ratios]) for i, d in enumerate(depths)}
    numbers |= {f"ratio of mean CKAs with {d} hidden layers": value for d, value in by_depth.items()}
    numbers |= {
        f"largest ratio with {d} hidden layers": Estimate.of([row[i] for row in largest]) for i, d in enumerate(depths)
    }
    charts.insert(
        0,
        Chart(
            "ratio",
            "Ratio of the alignments, easy over difficult",
            "hidden layers",
            "ratio",
            (
                curve("of means over training", depths, ratios),
                curve("largest over training", depths, largest, "dashed"),
            ),
            alt="The ratio of alignments against depth, of means over training and the largest.",
        ),
    )
    stand_in = "" if dataset == "mnist" else f" The digits are {dataset}, a stand-in for MNIST."
    return StudyResult(
        decide(above(growth), [growth]),
        CLAIM,
        f"Ratio of mean CKAs by depth: {', '.join(f'{d}: {value}' for d, value in by_depth.items())}; rank correlation "
        f"with depth {growth}. {n_easy} + {n_difficult} images, {epochs:g} epochs, {seeds} seeds.{stand_in}",
        numbers,
        tuple(charts),
    )
