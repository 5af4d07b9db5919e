"""Fig. 4.2 and B.8 (also 6.2): spectrum of the centred tangent kernel of VGG-19 on CIFAR-10 while it trains.

Errors are over seeds, or with one seed over its probe batches of training images, which the text says.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from torch import Tensor

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, spearman
from biascope.support import progress
from biascope_papers.alignment.tracking import (
    PROBING,
    VGG,
    Probing,
    Task,
    by_repeat,
    column,
    iterations,
    mean_curve,
    repeats,
)

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "dataset": "digits", "net": "mlp", "width": 40, "n_train": 300, "n_test": 100, "batch": 50, "lr": 0.05,
        "epochs": 40, "probes": 4, "probe_size": 20, "probe_sets": 2,
    },
    "laptop": {"epochs": 60},
    "paper": {
        "width": 64, "n_train": 50_000, "n_test": 10_000, "epochs": 60, "probes": 30, "probe_size": 100,
        "probe_sets": 2, "seeds": 5,
    },
}  # fmt: skip
FEWER = Probing(probes=8)
GROWN = {
    "growth of the largest eigenvalue": "largest",
    "growth of the mean eigenvalue": "mean",
    "effective rank relative to the first": "rank",
}


@study("alignment/fig4.2", sizes=SIZES)
def fig4_2(
    run: Run,
    *,
    task: Task = VGG,
    lr: Annotated[float, "learning rate"] = 0.01,
    epochs: Annotated[float, "passes over the training images"] = 40,
    probing: Probing = PROBING,
    reuse: Annotated[str, "run folder of alignment/fig4.3 with the same settings, to read its trainings from"] = "",
) -> StudyResult:
    """Spectrum of the tangent kernel at the first probe with at least 99 % training accuracy, clean and noisy.

    What a training that does not get there has at its last probe is given without an error, and decides nothing.
    """
    numbers: dict[str, Estimate] = {}
    charts, parts = list[Chart](), []
    for noise in progress(task.noises, "label noise"):
        found = probing.trainings(run, task.setting(noise, lr, epochs), reuse)
        name = f"{noise:.0%} random labels"
        here = end_of_training(found)
        reached = None not in here

        def at(values: list[float], reached: bool = reached) -> Estimate:
            return Estimate.of(values) if reached else replace(Estimate.of(values), standard_error=None)

        largest, mean, rank = (at(at_end(found, here, lambda v, i: v[:, i] / v[:, 0], s)) for s in GROWN.values())
        ratio = at(at_end(found, here, lambda v, i: v[:, i], "T1"))
        numbers |= {f"{label}, {name}": value for label, value in zip(GROWN, (largest, mean, rank))}
        numbers[f"trace in 4 % of the eigenvalues, {name}"] = ratio
        for which, label in (("train", "training"), ("test", "test")):
            ends = [float(f[f"{which}_accuracy"][-1 if i is None else i]) for f, i in zip(found, here)]
            numbers[f"{label} accuracy, {name}"] = Estimate.of(ends)
        ranked = by_repeat([column(f, "train", "rank") for f in found])  # [repeats, probes]
        numbers[f"lowest effective rank relative to the first, {name}"] = Estimate.of(ranked.amin(1) / ranked[:, 0])
        for share, statistic in (("4 %", "T1"), ("8 %", "T2"), ("16 %", "T3")):
            most = by_repeat([column(f, "train", statistic) for f in found]).amax(1)
            numbers[f"largest trace in {share} of the eigenvalues, {name}"] = Estimate.of(most)
        alike = [_correlation(column(f, "train", "rank"), column(f, "test", "rank")) for f in found]
        numbers[f"correlation of train and test effective rank, {name}"] = Estimate.of(by_repeat(alike))
        ranks = [column(f, "train", "rank").mean(0) for f in found]
        follows = [spearman(row.tolist(), f["test_accuracy"].tolist()) for row, f in zip(ranks, found)]
        numbers[f"rank correlation of effective rank and test accuracy, {name}"] = Estimate.of(follows)
        parts.append(
            f"{name}: largest x {largest}, mean x {mean}, effective rank x {rank}, T_4% {ratio}"
            + ("" if reached else " (did not reach 99 % training accuracy, so not tested)")
        )
        charts += _charts(found, name, round(100 * noise))
    stand_in = f" (here {task.stand_in})" if task.stand_in else ""
    return StudyResult(
        measured=f"At the end of training{stand_in}, {probing.n_train} images, {probing}: {'; '.join(parts)}.",
        numbers=numbers,
        figures=tuple(charts),
    )


@study(
    "alignment/figB.8",
    sizes={
        "smoke": SIZES["smoke"] | {"noises": "0", "epochs": 15}, "laptop": {}, "paper": SIZES["paper"] | {"epochs": 30},
    },
)  # fmt: skip
def fig_b8(
    run: Run,
    *,
    task: Task = VGG,
    lr: Annotated[float, "the larger learning rate"] = 0.01,
    rate: Annotated[float, "the smaller learning rate, relative to the larger one"] = 0.3,
    epochs: Annotated[float, "passes over the training images with the larger rate"] = 20,
    probing: Probing = FEWER,
) -> StudyResult:
    """Effective rank of the tangent kernel with two learning rates, on clean labels and with half of them random.

    Trainings with the smaller rate get proportionally more epochs: the product of rate and iterations is the same.
    """
    numbers: dict[str, Estimate] = {}
    charts, parts, learnt = [], [], []
    for noise in progress(task.noises, "label noise"):
        name, floors, series = f"{noise:.0%} random labels", [], []
        for factor in (1.0, rate):
            found = probing.trainings(run, task.setting(noise, lr * factor, epochs / factor))
            rows = repeats(found, "train", "rank")
            floors.append(rows.min(1).values)
            series.append(curve(f"learning rate {lr * factor:g}", iterations(found), rows))
            learnt += [float(f["train_accuracy"].max()) for f in found]
        ratio = Estimate.of(floors[1] / floors[0])
        numbers[f"ratio of the lowest effective ranks, {name}"] = ratio
        parts.append(f"{name}: lowest effective rank higher by a factor {ratio}")
        alt = "Effective rank of the training kernel over iterations for two learning rates."
        charts.append(
            Chart(f"rank-{round(100 * noise)}", f"Effective rank, {name}", "iteration", "effective rank",
                  tuple(series), alt=alt, caption="Iteration 0 is drawn at 1.", log_x=True)
        )  # fmt: skip
    numbers["training accuracy that every training reached"] = Estimate(min(learnt))
    stand_in = f" ({task.stand_in})" if task.stand_in else ""
    return StudyResult(
        measured=f"With {rate:g} times the learning rate{stand_in}: {'; '.join(parts)}. {probing.n_train} images, "
        f"{probing}.{'' if min(learnt) >= 0.9 else ' Not every training reached 90 % accuracy.'}",
        numbers=numbers,
        figures=tuple(charts),
    )


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of the rows of a and b [probe sets, p]: [probe sets]."""
    a, b = (v - v.mean(1, keepdim=True) for v in (a, b))
    found: Tensor = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    return found.clamp(-1, 1)


def end_of_training(found: list[dict[str, Any]], level: float = 0.99) -> list[int | None]:
    """For each training the first probe with this training accuracy, None if there is none."""
    reached = [(f["train_accuracy"] >= level).nonzero().flatten().tolist() for f in found]
    return [each[0] if each else None for each in reached]


def at_end(
    found: list[dict[str, Any]], here: list[int | None], of: Callable[[Tensor, int], Tensor], statistic: str
) -> list[float]:
    """A function of a statistic [probe sets, p] at the end (or at the last probe): a value per repeat (`repeats`)."""
    values = [of(column(f, "train", statistic), -1 if i is None else i) for f, i in zip(found, here)]
    return list(by_repeat(values).tolist())


def _charts(found: list[dict[str, Any]], name: str, tag: int) -> list[Chart]:
    """Eigenvalues, effective rank and trace ratios over iterations, for training (lines) and test batches (dashed)."""
    steps = iterations(found)

    def curves(labels: dict[str, str]) -> tuple[Series, ...]:
        return tuple(
            curve(f"{label}, {which}", steps, repeats(found, which, name), "line" if which == "train" else "dashed")
            for label, name in labels.items()
            for which in ("train", "test")
        )

    accuracy = [
        Series.of(f"{which} accuracy", steps, mean_curve(found, f"{which}_accuracy")) for which in ("train", "test")
    ]
    about = f"{name}; the first probe (iteration 0) is drawn at iteration 1."
    shared: dict[str, Any] = {"x_label": "iteration", "log_x": True, "caption": about}
    return [
        Chart(
            f"eigenvalues-{tag}", f"Eigenvalues of the centred kernel, {name}", y_label="eigenvalue",
            series=curves({"largest": "largest", "mean": "mean", "median": "median"}), log_y=True,
            alt="Largest, mean and median eigenvalue over iterations, on training and test images.", **shared,
        ),
        Chart(
            f"rank-{tag}", f"Effective rank, {name}", y_label="effective rank",
            series=curves({"effective rank": "rank"}),
            alt="Effective rank of the kernel over iterations, on training and test images.", **shared,
        ),
        Chart(
            f"ratios-{tag}", f"Trace in the first eigenvalues, and accuracy, {name}", y_label="share",
            series=(*curves({"T 4 %": "T1", "T 8 %": "T2", "T 16 %": "T3"}), *accuracy),
            alt="Shares of the trace in the first 4, 8 and 16 % of the eigenvalues over iterations, and accuracies.",
            **shared,
        ),
    ]  # fmt: skip
