"""Fig. 4.2 and 4.3 (and B.1 to B.4): networks and their linearisations learn eigenfunctions of the initial kernel.

sign(phi_rho) are the labels, for a sweep of rho; five sixths of the images are for training. Fig. 4.3: iterations to a
training loss of 0.01 (mean over one epoch; runs that do not get there count with all their iterations). Fig. B.1:
`optimiser=adam` (with `lr=0.001`). Fig. B.2: `dataset=mnist`. Fig. B.3, B.4: the charts of `nets=mlp,lenet`. The dashed
line of Fig. 4.2 is the network's accuracy on CIFAR2, which is trained for twice as many epochs (App. B.1).
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from biascope import Spectrum, data, eigenfunction_targets, ntk
from biascope.data import Dataset
from biascope.kernels import binarization_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, errors_over, over_seeds, rank_correlations
from biascope.support import derive, progress
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t
from biascope_papers.ntk.initial import Init

LEVEL = 0.01  # the training loss that counts as learnt
FOLLOWED = (("f", "accuracy"), ("lin", "accuracy"), ("f", "iterations"), ("f", "distance"), ("f", "turn"))
RHOS = (0, 3, 10, 30, 100, 300)
LABELS = {
    "accuracy": "validation accuracy",
    "iterations": "iterations to a training loss of 0.01",
    "distance": "||theta - theta_0||",
    "turn": "1 - cos(theta, theta_0)",
}


class Benchmark:
    """A network at its initial weights, n images, and the `top` leading eigenpairs of its kernel on them.

    The first five sixths are for training. Everything is made when it is first used. With `ridge`, kernel regression
    with the initial kernel predicts the eigenfunctions on the rest, `held_out`: a check without SGD.
    """

    def __init__(
        self,
        run: Run,
        dataset: str,
        name: str,
        n: int,
        top: int,
        seed: int = 0,
        ridge: float | None = None,
        init: Init = "torch",
    ) -> None:
        self.run, self.dataset, self.name, self.top, self.seed, self.ridge = run, dataset, name, top, seed, ridge
        self.init = init
        self.size = min(n, data.info(dataset).n_train + data.info(dataset).n_test)
        self.n_train = round(self.size * 5 / 6)

    @cached_property
    def images(self) -> Dataset:
        """The images with their own classes."""
        return s.images(self.dataset, None, self.size, derive(self.run.seed, "images"), self.run.device)

    @property
    def x(self) -> Tensor:
        """The images [n, ...]."""
        return self.images.x

    @cached_property
    def net(self) -> nn.Module:
        """The network."""
        seed = derive(self.run.seed, "init", self.name, self.seed)
        return s.network(self.name, self.x.shape[1:], seed, self.run.device, self.init)

    @cached_property
    def _solved(self) -> dict[str, Any]:
        key = f"eigenfunctions {self.name} {self.dataset} {self.size} {self.top} {self.seed}"
        return self.run.cached(key, self._solve)

    def _solve(self) -> dict[str, Any]:
        K, cut = ntk(self.net, self.x, outputs=0), self.n_train
        pairs = K.eigh(min(self.top, self.size))
        found = {"values": pairs.values, "vectors": pairs.vectors.float(), "residuals": pairs.residuals}
        if self.ridge is not None:
            M, phi = K.matrix(), pairs.vectors.to(K.values.dtype)
            A = M[:cut, :cut].clone()
            A.diagonal().add_(self.ridge * float(pairs.values[0]))
            found["held_out"] = M[cut:, :cut] @ torch.cholesky_solve(phi[:cut], torch.linalg.cholesky(A))
        return found

    @cached_property
    def spectrum(self) -> Spectrum:
        """The eigenpairs, on the device."""
        return Spectrum(*(self._solved[key].to(self.run.device) for key in ("values", "vectors", "residuals")))

    @property
    def held_out(self) -> Tensor:
        """Predictions [n_test, k] of kernel regression for the eigenfunctions."""
        return self._solved["held_out"]  # type: ignore[no-any-return]

    def labels(self, index: int) -> Tensor:
        """sign(phi_index) as classes 0 and 1, [n]."""
        return (eigenfunction_targets(self.spectrum, index) > 0).long().to(self.x.device)

    def task(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and validation inputs and labels."""
        return self.split(self.labels(index))

    def cifar2(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The same images labelled by what they show: the first five classes against the others."""
        return self.split(data.cifar2(self.images, "first-five").y)

    def split(self, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and validation inputs with their labels."""
        cut = self.n_train
        return (self.x[:cut], y[:cut]), (self.x[cut:], y[cut:])


def learn(model: nn.Module, bench: Benchmark, index: int, recipe: t.Recipe, seed: int) -> dict[str, Any]:
    """Train a copy of the network on an eigenfunction: accuracy, iterations to the level, distances, and the losses."""
    (x, y), (test_x, test_y) = bench.task(index)
    losses, each = t.fit(model, x, y, recipe, seed), t.per_epoch(len(x), recipe.batch)
    distance, turn = t.displacement(model, bench.net)
    return {
        "accuracy": t.evaluate(model, test_x, test_y)[1],
        "iterations": min(t.iterations_to(losses, LEVEL, each), float(len(losses))),
        "distance": distance,
        "turn": turn,
        "loss": float(losses[-each:].mean()),
        "losses": losses,
    }


@study(
    "ntk/fig4.2",
    sizes={
        "smoke": {"dataset": "digits", "n": 300, "rhos": "0,10,80", "epochs": 12, "batch": 32, "baseline": True,
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "mlp,lenet,resnet18", "n": 60_000, "rhos": "0,1,3,10,30,100,300,500,700,999", "epochs": 100,
                  "baseline": True, **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_2(
    run: Run,
    *,
    dataset: s.Images = "cifar10",
    nets: s.Nets = ("mlp",),
    n: Annotated[int, "images on which the kernel is computed (training and test images together)"] = 3000,
    rhos: Annotated[tuple[int, ...], "eigenfunctions to learn; 0: of the largest eigenvalue"] = RHOS,
    training: t.Training = t.LONG,
    optimiser: Annotated[Literal["sgd", "adam"], "sgd has momentum 0.9"] = "sgd",
    ridge: Annotated[float, "of kernel regression, relative to the largest eigenvalue"] = 1e-6,
    baseline: Annotated[bool, "the network's accuracy on CIFAR2 beside those on the eigenfunctions"] = False,
) -> StudyResult:
    """Learning eigenfunctions of the initial tangent kernel, by the network and by its linearisation."""
    numbers: dict[str, Estimate] = {}
    charts, findings, seeds = list[Chart](), list[str](), training.seeds
    for name in progress(nets, "networks"):
        found: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in t.KINDS}  # by seed and rho
        overlaps, errors, regressions = list[float](), list[float](), list[list[float]]()
        beside = list[dict[str, Any]]()
        for seed in range(seeds):
            bench = Benchmark(run, dataset, name, n, max(rhos) + 1, seed, ridge, training.init)
            work = partial(_learn, bench, training, training.recipe(bench.n_train, optimiser=optimiser))
            for kind in t.KINDS:
                shown = progress(rhos, f"{name}, {t.KINDS[kind]}", leave=False)
                found[kind].append(
                    [run.cached(f"{name} {kind} {rho} {seed}", partial(work, kind, rho)) for rho in shown]
                )
            overlaps += binarization_overlap(bench.spectrum.vectors[:, list(rhos)].double()).tolist()
            regressions.append(_regression(bench, rhos))
            if baseline:
                beside.append(run.cached(f"{name} cifar2 {seed}", partial(_cifar2, bench, training, optimiser)))
            errors += (bench.spectrum.residuals / bench.spectrum.values)[list(rhos)].tolist()
            del bench
        tables = {
            (kind, what): torch.tensor([[row[what] for row in rows] for rows in found[kind]], dtype=torch.float64)
            for kind in t.KINDS
            for what in LABELS
        }
        last = {kind: max(float(row["loss"]) for rows in found[kind] for row in rows) for kind in t.KINDS}
        order = {key: rank_correlations(rhos, tables[key].tolist()) for key in FOLLOWED}
        apart = tables["lin", "accuracy"] - tables["f", "accuracy"]
        advantage = over_seeds(apart)
        largest = "largest residual of an eigenfunction relative to its eigenvalue"
        own = {"accuracy of f_lin minus f": advantage, "overlap of phi with its signs": Estimate.of(overlaps)}
        own |= {largest: Estimate(max(errors))}
        own |= {f"rank correlation of rho and {what} of {kind}": value for (kind, what), value in order.items()}
        own |= {f"largest last training loss of {kind}": Estimate(loss) for kind, loss in last.items()}
        where = torch.tensor(rhos)
        for side, mask in (("below", where < 500), ("above", where > 500)):
            if bool(mask.any()):
                own[f"accuracy of f_lin minus f, rho {side} 500"] = over_seeds(apart[:, mask])
        own["rank correlation of rho and accuracy of kernel regression"] = rank_correlations(rhos, regressions)
        if baseline:
            own["accuracy on CIFAR2"] = Estimate.of([float(row["accuracy"]) for row in beside])
            own["last training loss on CIFAR2"] = Estimate.of([float(row["loss"]) for row in beside])
        numbers |= {f"{key}, {name}": value for key, value in own.items()}
        findings.append(f"{s.title(name)} {advantage}")
        charts += _charts(name, rhos, tables, regressions, [float(row["accuracy"]) for row in beside])
    return StudyResult(
        measured=f"Accuracy of f_lin minus f: {'; '.join(findings)}. {n} images, {training.epochs:g} epochs; "
        f"{errors_over(seeds, len(rhos), 'eigenfunctions')}.{s.noted(dataset)}",
        numbers=numbers,
        figures=tuple(charts),
    )


def _learn(bench: Benchmark, training: t.Training, recipe: t.Recipe, kind: str, rho: int) -> dict[str, Any]:
    seed = derive(bench.run.seed, "order", bench.seed)
    found = learn(training.copy_of(bench.net, kind), bench, rho, recipe, seed)
    bench.run.log(kind=kind, rho=rho, seed=bench.seed, **{k: v for k, v in found.items() if k != "losses"})
    return found


def _cifar2(bench: Benchmark, training: t.Training, optimiser: Literal["sgd", "adam"]) -> dict[str, Any]:
    (x, y), (test_x, test_y) = bench.cifar2()
    recipe = replace(training, epochs=2 * training.epochs).recipe(len(x), optimiser=optimiser)
    net = training.copy_of(bench.net, "f")
    losses = t.fit(net, x, y, recipe, derive(bench.run.seed, "order", bench.seed))
    found = {"accuracy": t.evaluate(net, test_x, test_y)[1]}
    bench.run.log(kind="f", task="cifar2", seed=bench.seed, **found)
    return {**found, "loss": float(losses[-t.per_epoch(len(x), recipe.batch) :].mean())}


def _regression(bench: Benchmark, rhos: tuple[int, ...]) -> list[float]:
    """Share of the validation images whose sign kernel regression predicts, for each rho."""
    guess = (bench.held_out[:, list(rhos)] >= 0).long()
    truth = torch.stack([bench.labels(rho)[bench.n_train :].cpu() for rho in rhos], 1)
    return [float(v) for v in (guess == truth).double().mean(0)]


def _charts(
    name: str,
    rhos: tuple[int, ...],
    tables: dict[tuple[str, str], Tensor],
    regressions: list[list[float]],
    cifar2: list[float],
) -> list[Chart]:
    places, charts = [rho + 1 for rho in rhos], []
    for what, label in LABELS.items():
        series = [curve(t.KINDS[kind], places, tables[kind, what]) for kind in t.KINDS]
        if what == "accuracy":
            series.append(curve("kernel regression", places, regressions, "dashed"))
            if cifar2:
                line = [sum(cifar2) / len(cifar2)] * len(places)
                series.append(Series.of("network on CIFAR2", places, line, style="dashed"))
        charts.append(
            Chart(
                f"{what}-{name}",
                f"Learning the eigenfunctions of the kernel of {s.title(name)}",
                "eigenfunction",
                label,
                tuple(series),
                alt=f"{label} against the index of the eigenfunction, for the network and its linearisation.",
                caption="Eigenfunctions are counted from 1. Mean and standard error over seeds.",
                log_x=True,
            )
        )
    return charts
