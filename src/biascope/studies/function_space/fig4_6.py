"""Fig. 4.6: the advantage of a network over its linearisation on CIFAR2, against the number of training images.

f and f_lin start from the same weights and are trained in the same way on n images. Both reach their best test accuracy
after a similar number of epochs, while f_lin needs far longer to fit the training images; so the best test accuracy
over the epochs counts for both ("at saturation"). The distance ||theta - theta_0|| is that of the network after
training.

Verdict, each by two standard errors over seeds: confirmed if the advantage acc(f) - acc(f_lin) at the largest n exceeds
that at the smallest n, and so does the distance, and both have a positive rank correlation with n. One seed tests
nothing. (Changed: the correlations had been judged by their sign alone.) Models that have not learnt their smallest
training set (mean loss of the last epoch above 0.5, for f or for f_lin) test nothing: an untrained f_lin loses to any
network.
"""

import copy
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.data import Dataset
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.estimates import above, curve, decide, spearman
from biascope.studies.function_space.setting import network, title, two_classes
from biascope.studies.function_space.training import Recipe, displacement, evaluate, fit, per_epoch, steps_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "On CIFAR2 the advantage of a network over its linearisation grows with the number of training images, and so does "
    "the distance the network travels. (That it is next to none with few images is not judged.)"
)


@study(
    "ntk/fig4.6",
    paper="function-space",
    figure="4.6",
    claim=CLAIM,
    sizes={
        "smoke": {
            "dataset": "digits",
            "net": "mlp",
            "sizes": "50,400",
            "n_test": 200,
            "epochs": 8,
            "least": 100,
            "batch": 25,
        },
        "laptop": {},
        "paper": {
            "net": "lenet",
            "sizes": "500,1000,2000,5000,10000,20000,50000",
            "n_test": 10_000,
            "epochs": 200,
            "least": 6000,
            "seeds": 5,
        },
    },
)
def fig4_6(
    run: Run,
    *,
    dataset: Annotated[str, "cifar10, or digits as a stand-in (0-4 against 5-9)"] = "cifar10",
    net: Annotated[str, "mlp, lenet, resnet18 or resnet18-narrow"] = "lenet",
    sizes: Annotated[tuple[int, ...], "numbers of training images"] = (200, 800, 3000),
    n_test: Annotated[int, "test images"] = 1000,
    epochs: Annotated[float, "passes over the training images"] = 25,
    least: Annotated[int, "fewest steps of a training, for small numbers of images"] = 600,
    batch: Annotated[int, "images per step"] = 128,
    lr: Annotated[float, "first learning rate; it falls linearly to zero"] = 0.05,
    seeds: Annotated[int, "initialisations and subsets of images"] = 2,
    looks: Annotated[int, "measurements of the test accuracy"] = 12,
    precision: Annotated[str, "float32, tf32 or bf16 while training on a GPU"] = "tf32",
) -> StudyResult:
    """Test accuracy of a network and of its linearisation against the number of training images."""
    train, test = two_classes(dataset, max(sizes), n_test, derive(run.seed, "images"), run.device)
    jobs = [(kind, n, seed) for kind in ("f", "lin") for n in sizes for seed in range(seeds)]
    work = partial(_train, run, net, train, test, (epochs, least, batch, lr, precision), looks)
    found: dict[tuple[str, int, int], dict[str, Any]] = {
        job: run.cached(" ".join(map(str, job)), partial(work, *job)) for job in progress(jobs, "trainings")
    }

    def table(kind: str, what: str) -> Tensor:
        rows = [[float(found[kind, n, seed][what]) for n in sizes] for seed in range(seeds)]
        return torch.tensor(rows, dtype=torch.float64)  # [seeds, sizes]

    gap, distance = table("f", "best") - table("lin", "best"), table("f", "distance")
    growth = {"advantage": Estimate.of(gap[:, -1] - gap[:, 0])}
    growth["distance"] = Estimate.of(distance[:, -1] - distance[:, 0])
    trends = {
        name: Estimate.of([spearman(list(sizes), row) for row in rows.tolist()])
        for name, rows in (("advantage", gap), ("distance", distance))
    }
    numbers = {f"growth of the {name} from {sizes[0]} to {sizes[-1]} images": value for name, value in growth.items()}
    numbers |= {f"rank correlation of n and the {name}": value for name, value in trends.items()}
    numbers |= {f"advantage with {n} images": Estimate.of(column) for n, column in zip(sizes, gap.T)}
    numbers |= {f"accuracy of f with {n} images": Estimate.of(c) for n, c in zip(sizes, table("f", "best").T)}
    judged = [*growth.values(), *trends.values()]
    left = {kind: float(table(kind, "loss")[:, 0].mean()) for kind in ("f", "lin")}  # 0.69 before training
    learnt = max(left.values()) <= 0.5
    ends_at = f" With {sizes[0]} images the training loss ends at {left['f']:.2f} (f) and {left['lin']:.2f} (f_lin)."
    ends = [Estimate.of(gap[:, i]) for i in (0, -1)]
    stand_in = "" if dataset == "cifar10" else f" Images: {dataset}."
    charts = (
        Chart(
            "accuracy",
            f"Best test accuracy, {title(net)}",
            "training images",
            "test accuracy",
            tuple(
                curve(label, sizes, table(kind, "best")) for kind, label in (("f", "network"), ("lin", "linearised"))
            ),
            alt="Test accuracy of the network and of its linearisation against the number of training images.",
            log_x=True,
        ),
        Chart(
            "advantage",
            "Advantage of the network",
            "training images",
            "accuracy of f minus f_lin",
            (curve("advantage", sizes, gap),),
            alt="Difference of the two accuracies against the number of training images.",
            log_x=True,
        ),
        Chart(
            "distance",
            "Distance from the initial weights",
            "training images",
            "||theta - theta_0||",
            (curve("network", sizes, distance),),
            alt="Distance the network travels against the number of training images.",
            log_x=True,
        ),
    )
    return StudyResult(
        decide(all(map(above, judged)), judged) if learnt else "not tested",
        CLAIM,
        f"{title(net)}: the advantage goes from {ends[0]} with {sizes[0]} images to {ends[1]} with {sizes[-1]}; the "
        f"distance grows by {growth['distance']}; {epochs:g} epochs, {seeds} seed(s).{ends_at}{stand_in}",
        numbers,
        charts,
    )


def _train(
    run: Run,
    name: str,
    train: Dataset,
    test: Dataset,
    settings: tuple[float, int, int, float, str],
    looks: int,
    kind: str,
    n: int,
    seed: int,
) -> dict[str, Value]:
    from biascope.linearize import linearize

    epochs, least, batch, lr, precision = settings
    net = network(name, train.x.shape[1:], derive(run.seed, "init", seed), run.device)
    chosen = torch.randperm(len(train), generator=generator(run.seed, "subset", seed))[:n]
    subset = train.subset(chosen.to(train.x.device))
    recipe = Recipe(max(least, steps_of(epochs, n, batch)), batch, lr, precision=precision)
    model = copy.deepcopy(net) if kind == "f" else linearize(net)
    accuracies: list[float] = []

    def look(_: int) -> None:
        accuracies.append(evaluate(model, test.x, test.y)[1])

    at = [round(recipe.steps * (i + 1) / looks) for i in range(looks)]
    losses = fit(model, subset.x, subset.y, recipe, derive(run.seed, "order", seed), at=at, look=look)
    last = float(losses[-per_epoch(n, batch) :].mean())
    run.log(kind=kind, n=n, seed=seed, best=max(accuracies), loss=last)
    return {
        "best": max(accuracies),
        "last": accuracies[-1],
        "accuracies": torch.tensor(accuracies),
        "distance": displacement(model, net)[0],
        "loss": last,
    }
