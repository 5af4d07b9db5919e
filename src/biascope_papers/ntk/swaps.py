"""Fig. 4.11 and 4.12: what the kernels from before, during and after the training of a network learn.

On sign(phi_k), and on CIFAR2, are trained the network and the linear models J(x; theta_t) (theta - theta_0) of the
kernels at epochs t of its training, centred and starting at zero. (The printed formula reads as if theta_0 set the
kernel.)
"""

from functools import cache, partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import data, linearize
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import errors_over, mean_error, over_seeds
from biascope.support import derive, progress
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t
from biascope_papers.ntk.eigenfunctions import LEVEL, Benchmark

FIFTY = t.Training(epochs=50)
SHORT = t.Training(epochs=30, seeds=2)
Swaps = Annotated[tuple[int, ...], "epochs of the network's training whose kernels are tried"]
Examples = tuple[Tensor, Tensor]


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
    n: Annotated[int, "images on which the kernel is computed"] = 2000,
    targets: Annotated[tuple[int, ...], "eigenfunctions to learn"] = (50, 150),
    swaps: Swaps = (0, 1, 5, 50),
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
            _losses(rows[0], names, t.per_epoch(n_train, training.batch), f"eigenfunction {targets[0]}"),
            _accuracies(accuracy, tried),
        ),
    )


@study(
    "ntk/fig4.12-cifar2",
    sizes={
        "smoke": {"dataset": "digits", "n_train": 300, "n_test": 200, "epochs": 20, "batch": 32, "swaps": "0,20",
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "mlp,lenet,resnet18", "n_train": 50_000, "n_test": 10_000, "epochs": 200, "seeds": 3,
                  "swaps": "0,1,5,20,200", **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_12_cifar2(
    run: Run,
    *,
    dataset: s.TwoClasses = "cifar10",
    nets: s.Nets = ("mlp",),
    n_train: Annotated[int, "training images"] = 2000,
    n_test: Annotated[int, "test images"] = 2000,
    swaps: Swaps = (0, 1, 5, 30),
    training: t.Training = SHORT,
) -> StudyResult:
    """Test accuracy on CIFAR2 of linear models with kernels from before, during and after training."""
    tried = sorted({0, *(min(epoch, int(training.epochs)) for epoch in swaps)})
    images = cache(lambda: s.two_classes(dataset, n_train, n_test, derive(run.seed, "images"), run.device))

    def one(name: str, seed: int) -> dict[str, Any]:
        train, test = images()
        start = s.network(name, train.x.shape[1:], derive(run.seed, "init", name, seed), run.device, training.init)
        found = swapped(start, (train.x, train.y), (test.x, test.y), training, tried, derive(run.seed, "order", seed))
        run.log(net=name, seed=seed, network=float(found["accuracy"][0]), trained=float(found["accuracy"][-1]))
        return found

    numbers, charts, findings = dict[str, Estimate](), list[Chart](), list[str]()
    for name in progress(nets, "networks"):
        rows: list[dict[str, Any]] = run.cached_each(name, range(training.seeds), partial(one, name))
        accuracy = torch.stack([row["accuracy"].double() for row in rows])  # [seeds, models]: f, then the kernels
        names = ["the network", *(f"kernel of epoch {epoch}" for epoch in tried)]
        own = {f"test accuracy, {model}": Estimate.of(column) for model, column in zip(names, accuracy.T)}
        gain = own["accuracy of the trained kernel minus the initial one"] = Estimate.of(
            accuracy[:, -1] - accuracy[:, 1]
        )
        own["accuracy of the network minus the initial kernel"] = Estimate.of(accuracy[:, 0] - accuracy[:, 1])
        each = t.per_epoch(min(n_train, data.info(dataset).n_train), training.batch)
        for model, losses in zip(names, torch.stack([row["losses"] for row in rows]).transpose(0, 1)):
            own[f"last training loss, {model}"] = Estimate.of(losses[:, -each:].double().mean(1))
        numbers |= {f"{key}, {name}": value for key, value in own.items()}
        findings.append(f"{s.title(name)} {gain}")
        charts.append(_accuracies(accuracy, tried, name, "Test accuracy on CIFAR2"))
    return StudyResult(
        measured=f"On CIFAR2 the kernel of epoch {tried[-1]} has over the initial one, in test accuracy: "
        f"{'; '.join(findings)}. {n_train} images.{s.noted(dataset)}",
        numbers=numbers,
        figures=tuple(charts),
    )


def _swap(bench: Benchmark, training: t.Training, epochs: list[int], k: int) -> dict[str, Any]:
    found = swapped(bench.net, *bench.task(k), training, epochs, derive(bench.run.seed, "order", bench.seed))
    for epoch, accuracy in zip(epochs, found["accuracy"][1:]):
        bench.run.log(target=k, seed=bench.seed, kernel_of_epoch=epoch, accuracy=float(accuracy))
    return found


def swapped(
    start: nn.Module, train: Examples, test: Examples, training: t.Training, epochs: list[int], order: int
) -> dict[str, Tensor]:
    """The network from its start, then the linear models of its kernels at some epochs, trained on the same examples.

    Accuracy on the test examples and iterations to the level [1 + epochs], losses of all steps [1 + epochs, steps].
    """
    x, y = train
    net, recipe = training.copy_of(start, "f"), training.recipe(len(x))
    each = t.per_epoch(len(x), recipe.batch)
    kept: dict[int, dict[str, Tensor]] = {}

    def keep(step: int) -> None:  # without BatchNorm's statistics: kernels have the initial ones
        kept[step] = {name: value.detach().clone() for name, value in net.named_parameters()}

    steps = [min(epoch * each, recipe.steps) for epoch in epochs]
    histories = [t.fit(net, x, y, recipe, order, at=steps, look=keep)]
    accuracies = [t.evaluate(net, *test)[1]]
    for step in steps:
        model = linearize(start, at=kept[step], centered=True)
        histories.append(t.fit(model, x, y, recipe, order))
        accuracies.append(t.evaluate(model, *test)[1])
    iterations = [min(t.iterations_to(h, LEVEL, each), float(recipe.steps)) for h in histories]
    return {
        "accuracy": torch.tensor(accuracies, dtype=torch.float64),
        "iterations": torch.tensor(iterations, dtype=torch.float64),
        "losses": torch.stack(histories),
    }


def _losses(row: dict[str, Any], names: list[str], each: int, task: str) -> Chart:
    """Loss of every epoch, for the network and for the linear models."""
    losses: Tensor = row["losses"]
    whole = losses[:, : losses.shape[1] // each * each].view(len(losses), -1, each).mean(2)
    return Chart(
        "losses",
        f"Training loss on {task}",
        "epoch",
        "mean loss",
        tuple(Series.of(name, range(1, 1 + whole.shape[1]), row) for name, row in zip(names, whole)),
        alt="Training loss over epochs for the network and for linear models with kernels of several epochs.",
        log_y=True,
    )


def _accuracies(accuracy: Tensor, epochs: list[int], net: str = "", what: str = "Validation accuracy") -> Chart:
    mean, error = mean_error(accuracy)
    return Chart(
        f"accuracy-{net}" if net else "accuracy",
        f"{what} with the kernel of an epoch{f', {s.title(net)}' if net else ''}",
        "epoch of the kernel + 1",
        "test accuracy" if net else "validation accuracy",
        (
            Series.of("linear model", [epoch + 1 for epoch in epochs], mean[1:], None if error is None else error[1:]),
            Series.of("the network", [1, epochs[-1] + 1], [mean[0]] * 2, style="dashed"),
        ),
        alt="Validation accuracy of linear models against the epoch their kernel is from, and that of the network.",
        log_x=True,
    )
