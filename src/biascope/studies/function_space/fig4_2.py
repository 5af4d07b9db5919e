"""Fig. 4.2 and 4.3 (and B.1 to B.4): networks and their linearisations learn eigenfunctions of the initial kernel.

The tangent kernel of a network with one output is computed on n images at its initial weights; sign(phi_rho) are the
labels of the images, for a sweep of rho. The network f and its tangent f_lin start from the same weights and are
trained in the same way on five sixths of the images. Fig. 4.3 plots iterations to a training loss of 0.01 (mean over
one epoch; runs that do not get there count with all their iterations), ||theta - theta_0|| and 1 - cos(theta, theta_0).
Fig. B.1: `optimiser=adam` (with `lr=0.001`). Fig. B.2: `dataset=mnist`. Fig. B.3, B.4: the charts of `nets=mlp,lenet`.

Verdict: confirmed if for every network (a) the rank correlation of rho with the validation accuracy is negative for f
and for f_lin; (b) that with iterations and with distance is positive for f; (c) f_lin is more accurate than f, averaged
over rho; each by two standard errors over seeds. With one seed the errors are over rho (of a correlation: leaving one
out), which the text says. (Changed after the first runs: correlations had been judged by their sign alone, and errors
had pooled rho and seeds.)
"""

import copy
from functools import partial
from typing import Annotated, Any, Literal

import torch

from biascope.kernels import binarization_overlap
from biascope.linearize import linearize
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.estimates import above, below, curve, decide, errors_over, over_seeds, rank_correlations
from biascope.studies.function_space.eigentasks import Benchmark, benchmark, learn
from biascope.studies.function_space.setting import title
from biascope.studies.function_space.training import Recipe, steps_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run

CLAIM = (
    "Eigenfunctions of the kernel are harder to learn the smaller their eigenvalue: the accuracy of the network and of "
    "its linearisation falls, the network's iterations and distance from initialisation grow; on these tasks the "
    "linearised network generalises better. (The cosine distance, and iterations and distance of the linearisation, "
    "are not judged.)"
)
KINDS = {"f": "network", "lin": "linearised"}
FOLLOWED = (("f", "accuracy"), ("lin", "accuracy"), ("f", "iterations"), ("f", "distance"), ("f", "turn"))
RHOS = (0, 3, 10, 30, 100, 300)


@study(
    "ntk/fig4.2",
    paper="function-space",
    figure="4.2",
    claim=CLAIM,
    sizes={
        "smoke": {"dataset": "digits", "n": 300, "rhos": "0,10,80", "epochs": 12, "batch": 32},
        "laptop": {},
        "paper": {"nets": "mlp,lenet", "n": 60_000, "rhos": "0,1,3,10,30,100,300,500,700,999", "epochs": 100},
    },
)
def fig4_2(
    run: Run,
    *,
    dataset: Annotated[str, "cifar10, mnist, or digits as a stand-in"] = "cifar10",
    nets: Annotated[tuple[str, ...], "mlp, lenet, resnet18 or resnet18-narrow"] = ("mlp",),
    n: Annotated[int, "images on which the kernel is computed (training and test images together)"] = 3000,
    rhos: Annotated[tuple[int, ...], "eigenfunctions to learn; 0 has the largest eigenvalue"] = RHOS,
    epochs: Annotated[float, "passes over the training images"] = 60,
    batch: Annotated[int, "images per step"] = 128,
    lr: Annotated[float, "first learning rate; it falls linearly to zero"] = 0.05,
    optimiser: Annotated[Literal["sgd", "adam"], "sgd has momentum 0.9"] = "sgd",
    seeds: Annotated[int, "initialisations"] = 1,
    ridge: Annotated[float, "of kernel regression, relative to the largest eigenvalue"] = 1e-6,
    precision: Annotated[str, "float32, tf32 or bf16 while training on a GPU"] = "tf32",
) -> StudyResult:
    """Learning eigenfunctions of the initial tangent kernel, by the network and by its linearisation."""
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    holds, said, judged = [], [], list[Estimate]()
    for name in progress(nets, "networks"):
        tables: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
        overlaps: list[float] = []
        errors: list[float] = []
        regressions = []
        for seed in range(seeds):
            bench = benchmark(run, dataset, name, n, max(rhos) + 1, seed, ridge)
            recipe = Recipe(steps_of(epochs, bench.n_train, batch), batch, lr, optimiser=optimiser, precision=precision)
            for kind in KINDS:
                tables[kind].append(
                    [
                        run.cached(f"{name} {kind} {rho} {seed}", partial(_learn, run, bench, kind, rho, recipe, seed))
                        for rho in progress(rhos, f"{name}, {KINDS[kind]}", leave=False)
                    ]
                )
            overlaps += binarization_overlap(bench.spectrum.vectors[:, list(rhos)].double()).tolist()
            regressions.append(_regression(bench, rhos))
            errors += (bench.spectrum.residuals / bench.spectrum.values)[list(rhos)].tolist()
            del bench

        def table(kind: str, what: str) -> torch.Tensor:
            return torch.tensor([[float(r[what]) for r in row] for row in tables[kind]], dtype=torch.float64)  # noqa: B023

        advantage = over_seeds(table("lin", "accuracy") - table("f", "accuracy"))
        numbers[f"accuracy of f_lin minus f, {title(name)}"] = advantage
        numbers[f"overlap of phi with its signs, {title(name)}"] = Estimate.of(overlaps)
        numbers[f"largest residual of an eigenfunction relative to its eigenvalue, {title(name)}"] = Estimate(
            max(errors)
        )
        found = {}
        for kind, what in FOLLOWED:
            found[kind, what] = rank_correlations(rhos, table(kind, what).tolist())
            numbers[f"rank correlation of rho and {what} of {kind}, {title(name)}"] = found[kind, what]
        numbers[f"rank correlation of rho and accuracy of kernel regression, {title(name)}"] = rank_correlations(
            rhos, regressions
        )
        falls = [found[kind, "accuracy"] for kind in KINDS]
        grows = [found["f", "iterations"], found["f", "distance"], advantage]
        holds.append(all(map(below, falls)) and all(map(above, grows)))
        judged += [*falls, *grows]
        said.append(
            f"{title(name)}: f_lin minus f {advantage}, rank correlations with rho: accuracy {falls[0]} (f) and "
            f"{falls[1]} (f_lin), iterations {grows[0]}, distance {grows[1]}"
        )
        charts += _charts(name, rhos, table, regressions)
    stand_in = "" if dataset == "cifar10" else f" Images: {dataset}."
    return StudyResult(
        decide(all(holds), judged),
        CLAIM,
        f"{'; '.join(said)}. {n} images, {epochs:g} epochs of {optimiser}; "
        f"{errors_over(seeds, len(rhos), 'eigenfunctions')}.{stand_in}",
        numbers,
        tuple(charts),
    )


def _learn(run: Run, bench: Benchmark, kind: str, rho: int, recipe: Recipe, seed: int) -> dict[str, Any]:
    model = copy.deepcopy(bench.net) if kind == "f" else linearize(bench.net)
    found = learn(model, bench.net, bench, rho, recipe, derive(run.seed, "order", seed))
    run.log(kind=kind, rho=rho, seed=seed, **{k: v for k, v in found.items() if k != "losses"})
    return found


def _regression(bench: Benchmark, rhos: tuple[int, ...]) -> list[float]:
    """Share of the validation images whose sign kernel regression predicts, for each rho."""
    assert bench.held_out is not None
    guess = (bench.held_out[:, list(rhos)] >= 0).long()
    truth = torch.stack([bench.labels(rho)[bench.n_train :].cpu() for rho in rhos], 1)
    return [float(v) for v in (guess == truth).double().mean(0)]


def _charts(name: str, rhos: tuple[int, ...], table: Any, regressions: list[list[float]]) -> list[Chart]:
    places = [rho + 1 for rho in rhos]
    about = "Eigenfunctions are counted from 1. Mean and standard error over seeds."
    parts = [("accuracy", "validation accuracy"), ("iterations", "iterations to a training loss of 0.01")]
    parts += [("distance", "||theta - theta_0||"), ("turn", "1 - cos(theta, theta_0)")]
    charts = []
    for what, label in parts:
        series = [curve(KINDS[k], places, table(k, what)) for k in KINDS]
        if what == "accuracy":
            series.append(curve("kernel regression", places, regressions, "dashed"))
        charts.append(
            Chart(
                f"{what}-{name}",
                f"Learning the eigenfunctions of the kernel of {title(name)}",
                "eigenfunction",
                label,
                tuple(series),
                alt=f"{label} against the index of the eigenfunction, for the network and its linearisation.",
                caption=about,
                log_x=True,
            )
        )
    return charts
