"""Fig. 4.8 to 4.12: training on one eigenfunction turns the tangent kernel towards it, and what that kernel learns.

Fig. 4.8 (`targets=500`) to 4.10: the alignments ||J^T phi_rho||^2 / ||phi_rho||^2 of the first eigenfunctions of the
initial kernel are measured again after training on sign(phi_k). The relative gain g_rho is the ratio of the two,
divided by its median over rho.

Fig. 4.11 and 4.12: on sign(phi_k) are trained the network and the linear models J(x; theta_t) (theta - theta_0) of the
kernels at epochs t of its training, centred and starting at zero. (The printed formula reads as if theta_0 set the
kernel.)
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import linearize, ntk
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import errors_over, mean_error, mean_of_ranks, over_seeds, spearman
from biascope.support import derive, progress
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t
from biascope_papers.ntk.eigenfunctions import LEVEL, Benchmark, learn

Size = Annotated[int, "images on which the kernel is computed"]
FIFTY = t.Training(epochs=50)


@study(
    "ntk/fig4.8",
    sizes={
        "smoke": {"dataset": "digits", "n": 240, "top": 40, "targets": "5,30", "epochs": 25, "batch": 32,
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "mlp,lenet", "n": 60_000, "top": 1000, "targets": "50,200,500,900", "epochs": 100,
                  **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_8(
    run: Run,
    *,
    dataset: s.Images = "cifar10",
    nets: s.Nets = ("mlp",),
    n: Size = 2000,
    top: Annotated[int, "eigenfunctions that are followed"] = 300,
    targets: Annotated[tuple[int, ...], "eigenfunctions to train on"] = (20, 100, 250),
    training: t.Training = t.LONG,
) -> StudyResult:
    """How training on an eigenfunction changes the kernel's alignment with all of them."""
    numbers: dict[str, Estimate] = {}
    charts, findings = list[Chart](), list[str]()
    for name in progress(nets, "networks"):
        rows: list[dict[str, Any]] = []
        for seed in range(training.seeds):
            bench = Benchmark(run, dataset, name, n, max(top, max(targets) + 1), seed, init=training.init)
            work = partial(_turn, bench, top, training)
            rows += [run.cached(f"{name} {k} {seed}", partial(work, k)) for k in progress(targets, name, leave=False)]
            del bench
        places = list(targets) * training.seeds

        def by_seed(values: list[float]) -> Tensor:  # [seeds, targets]; the targets of the first seed come first
            return torch.tensor(values, dtype=torch.float64).view(training.seeds, -1)

        own = [float(row["gains"][k]) for row, k in zip(rows, places)]
        lead = [float((row["gains"][k] / _without(row["gains"], k).max()).log()) for row, k in zip(rows, places)]
        first = [rank_of(row["gains"], k) == 1 for row, k in zip(rows, places)]
        others = [(_without(row["before"], k), _without(row["after"], k)) for row, k in zip(rows, places)]
        gain, table = over_seeds(by_seed(own)), by_seed(own)
        order = over_seeds(by_seed([spearman(before.tolist(), after.tolist()) for before, after in others]))
        own_numbers = {
            "gain of the target": gain,
            "lead of the target's gain over the largest other (log)": over_seeds(by_seed(lead)),
            "share of trainings where the target gains most": Estimate(sum(first) / len(first)),
            "general growth": over_seeds(by_seed([float(row["growth"]) for row in rows])),
            "share of alignments that grow": over_seeds(
                by_seed([float((row["after"] > row["before"]).double().mean()) for row in rows])
            ),
            "rank correlation of alignments before and after": order,
            "last training loss": over_seeds(by_seed([float(row["loss"]) for row in rows])),
        }
        if len(targets) > 1:
            rising = mean_of_ranks([spearman(targets, row) for row in table.tolist()], len(targets))
            own_numbers["rank correlation of k and the target's gain"] = rising
            own_numbers["log gain of the last target minus the first"] = Estimate.of((table[:, -1] / table[:, 0]).log())
        for j, k in enumerate(targets):  # the worst seed
            ranks = [rank_of(row["gains"], k) for row in rows[j :: len(targets)]]
            own_numbers[f"rank of the gain of target {k}"] = Estimate(max(ranks))
        numbers |= {f"{key}, {name}": value for key, value in own_numbers.items()}
        findings.append(f"{s.title(name)}: the target gains {gain}, the most in {sum(first)} of {len(first)} trainings")
        charts += [_alignment_chart(name, k, row) for k, row in zip(targets, rows)]
    return StudyResult(
        measured=f"{'; '.join(findings)}. {n} images, {training.epochs:g} epochs; "
        f"{errors_over(training.seeds, len(targets), 'targets')}.{s.noted(dataset)}",
        numbers=numbers,
        figures=tuple(charts),
    )


def rank_of(gains: Tensor, k: int) -> int:
    """1 if gains[k] is the largest, 2 if one is larger, and so on."""
    return 1 + int((gains > gains[k]).sum())


def _without(values: Tensor, k: int) -> Tensor:
    """All entries but the k-th."""
    return torch.cat([values[:k], values[k + 1 :]])


def alignments(net: nn.Module, x: Tensor, vectors: Tensor) -> Tensor:
    """phi^T K phi for unit vectors, columns of [n, k]: what `target_alignments` gives, by way of the kernel.

    With hundreds of eigenfunctions one kernel costs less than a backward pass for each of them.
    """
    K = ntk(net, x, outputs=0).matrix()
    V = vectors.to(K)
    return (V * (K @ V)).double().sum(0) / V.double().square().sum(0)


def _turn(bench: Benchmark, top: int, training: t.Training, k: int) -> dict[str, Any]:
    net, keep = training.copy_of(bench.net, "f"), max(top, k + 1)
    found = learn(net, bench, k, training.recipe(bench.n_train), derive(bench.run.seed, "order", bench.seed))
    after = alignments(t.expanded(net, bench.net), bench.x, bench.spectrum.vectors)
    before = bench.spectrum.values.double()
    before, after = before[:keep].cpu(), after[:keep].cpu()
    growth = (after / before).quantile(0.5)
    result = {"loss": found["loss"], "accuracy": found["accuracy"]}
    gains = after / before / growth
    bench.run.log(target=k, seed=bench.seed, gain=float(gains[k]), **result)
    return {"gains": gains, "before": before, "after": after, "growth": float(growth), **result}


def _alignment_chart(name: str, k: int, row: dict[str, Any]) -> Chart:
    places = range(1, 1 + len(row["before"]))
    return Chart(
        f"alignment-{name}-{k}",
        f"Alignment with the initial eigenfunctions, {s.title(name)} trained on number {k + 1}",
        "eigenfunction",
        "alignment",
        (
            Series.of("before training", places, row["before"]),
            Series.of("after training", places, row["after"], style="points"),
            Series.of("the target, after", [k + 1], [row["after"][k]], style="points"),
        ),
        alt="Alignments fall with the index; after training they are higher, with a spike at the target.",
        log_x=True,
        log_y=True,
    )


@study(
    "ntk/fig4.11",
    sizes={
        "smoke": {"dataset": "digits", "n": 240, "targets": "30", "epochs": 40, "batch": 32, "swaps": "0,40",
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"net": "resnet18", "n": 60_000, "targets": "400", "epochs": 100, "swaps": "0,1,2,5,10,100",
                  **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_11(
    run: Run,
    *,
    dataset: s.Images = "cifar10",
    net: s.Net = "mlp",  # published: resnet18
    n: Size = 2000,
    targets: Annotated[tuple[int, ...], "eigenfunctions to learn"] = (50, 150),
    swaps: Annotated[tuple[int, ...], "epochs of the network's training whose kernels are tried"] = (0, 1, 5, 50),
    training: t.Training = FIFTY,
) -> StudyResult:
    """Training speed and accuracy of linear models with kernels from before, during and after training."""
    tried = sorted({0, *(min(epoch, int(training.epochs)) for epoch in swaps)})
    rows, n_train = list[dict[str, Any]](), 0
    for seed in range(training.seeds):
        bench = Benchmark(run, dataset, net, n, max(targets) + 1, seed, init=training.init)
        n_train = bench.n_train
        work = partial(_swap, bench, training, tried)
        rows += [run.cached(f"{k} {seed}", partial(work, k)) for k in progress(targets, "targets")]
        del bench

    def mean(values: Tensor) -> Estimate:
        return over_seeds(values.view(training.seeds, -1))

    # [trainings, models]: f, then the kernels
    speed, accuracy = (torch.stack([row[key].double() for row in rows]) for key in ("iterations", "accuracy"))
    names = ["the network", *(f"kernel of epoch {epoch}" for epoch in tried)]
    numbers = {f"iterations to {LEVEL:g}, {name}": mean(c) for name, c in zip(names, speed.T)}
    numbers |= {f"validation accuracy, {name}": mean(c) for name, c in zip(names, accuracy.T)}
    reached = speed[:, [1, -1]].min(1).values < training.recipe(n_train).steps
    numbers |= {
        "iterations saved by the trained kernel": mean(speed[:, 1] - speed[:, -1]),
        "accuracy of the initial kernel minus the trained one": mean(accuracy[:, 1] - accuracy[:, -1]),
        "accuracy of the trained kernel minus the network": mean(accuracy[:, -1] - accuracy[:, 0]),
        "iterations saved by the network": mean(speed[:, 1] - speed[:, 0]),
        "share of trainings where one of the two kernels reaches the loss": Estimate(float(reached.double().mean())),
    }
    last = torch.stack([row["losses"][:, -t.per_epoch(n_train, training.batch) :].double().mean(1) for row in rows])
    numbers |= {f"last training loss, {name}": mean(c) for name, c in zip(names, last.T)}
    for epoch, column in zip(tried[1:], accuracy.T[2:]):  # paired: trainings of one network on one task
        numbers[f"accuracy, kernel of epoch {epoch} minus the network"] = mean(column - accuracy[:, 0])
        numbers[f"accuracy, initial kernel minus kernel of epoch {epoch}"] = mean(accuracy[:, 1] - column)
    return StudyResult(
        measured=f"{s.title(net)} on eigenfunctions {', '.join(map(str, targets))}: the kernel of epoch {tried[-1]} "
        f"needs {numbers['iterations saved by the trained kernel']} fewer iterations than the initial one; "
        f"{errors_over(training.seeds, len(targets), 'targets')}.{s.noted(dataset)}",
        numbers=numbers,
        figures=(
            _losses(rows[0], names, t.per_epoch(n_train, training.batch), targets[0]),
            _accuracies(accuracy, tried),
        ),
    )


def _swap(bench: Benchmark, training: t.Training, epochs: list[int], k: int) -> dict[str, Any]:
    (x, y), (test_x, test_y) = bench.task(k)
    net, recipe = training.copy_of(bench.net, "f"), training.recipe(len(x))
    each, order = t.per_epoch(len(x), recipe.batch), derive(bench.run.seed, "order", bench.seed)
    kept: dict[int, dict[str, Tensor]] = {}

    def keep(step: int) -> None:  # without BatchNorm's statistics: kernels have the initial ones
        kept[step] = {name: value.detach().clone() for name, value in net.named_parameters()}

    steps = [min(epoch * each, recipe.steps) for epoch in epochs]
    histories = [t.fit(net, x, y, recipe, order, at=steps, look=keep)]
    accuracies = [t.evaluate(net, test_x, test_y)[1]]
    for step in steps:
        model = linearize(bench.net, at=kept[step], centred=True)
        histories.append(t.fit(model, x, y, recipe, order))
        accuracies.append(t.evaluate(model, test_x, test_y)[1])
        bench.run.log(target=k, seed=bench.seed, kernel_of_step=step, accuracy=accuracies[-1])
    iterations = [min(t.iterations_to(h, LEVEL, each), float(recipe.steps)) for h in histories]
    return {
        "accuracy": torch.tensor(accuracies, dtype=torch.float64),
        "iterations": torch.tensor(iterations, dtype=torch.float64),
        "losses": torch.stack(histories),
    }


def _losses(row: dict[str, Any], names: list[str], each: int, k: int) -> Chart:
    """Loss of every epoch, for the network and for the linear models."""
    losses: Tensor = row["losses"]
    whole = losses[:, : losses.shape[1] // each * each].view(len(losses), -1, each).mean(2)
    return Chart(
        "losses",
        f"Training loss on eigenfunction {k}",
        "epoch",
        "mean loss",
        tuple(Series.of(name, range(1, 1 + whole.shape[1]), row) for name, row in zip(names, whole)),
        alt="Training loss over epochs for the network and for linear models with kernels of several epochs.",
        log_y=True,
    )


def _accuracies(accuracy: Tensor, epochs: list[int]) -> Chart:
    mean, error = mean_error(accuracy)
    return Chart(
        "accuracy",
        "Validation accuracy with the kernel of an epoch",
        "epoch of the kernel + 1",
        "validation accuracy",
        (
            Series.of("linear model", [epoch + 1 for epoch in epochs], mean[1:], None if error is None else error[1:]),
            Series.of("the network", [1, epochs[-1] + 1], [mean[0]] * 2, style="dashed"),
        ),
        alt="Validation accuracy of linear models against the epoch their kernel is from, and that of the network.",
        log_x=True,
    )
