"""Fig. 4.6, 4.7 and Table 4.1: networks learn CIFAR2, the first five classes of CIFAR-10 against the others.

Fig. 4.6: f and f_lin start from the same weights; f_lin needs far longer to fit the training images, so the best test
accuracy over the epochs counts for both ("at saturation"). Table 4.1 and Fig. 4.7: EC_k(t) = ||Phi_t y||^2 / ||y||^2 on
a fixed subset at some epochs (the printed formula has lost its exponent: both are reported). Images are read only when
something is trained.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from biascope import data, ntk
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, mean_of_ranks, over_seeds, spearman
from biascope.support import derive, generator, progress
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t

PLACE = {"mlp": 0, "lenet": 1, "resnet18-narrow": 2, "resnet18": 2}  # of the published order
PUBLISHED = {"mlp": (0.260, 0.636), "lenet": (0.258, 0.830), "resnet18": (0.227, 0.967)}  # before and after training
TestImages = Annotated[int, "test images"]
SHORT, SHORTER = t.Training(epochs=30, seeds=2), t.Training(epochs=25, seeds=2)


@study(
    "ntk/fig4.6",
    sizes={
        "smoke": {"dataset": "digits", "net": "mlp", "sizes": "50,400", "n_test": 200, "epochs": 8, "least": 100,
                  "batch": 25, **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"sizes": "500,1000,2000,5000,10000,20000,50000", "n_test": 10_000, "epochs": 200, "least": 6000,
                  "seeds": 5, **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_6(
    run: Run,
    *,
    dataset: s.TwoClasses = "cifar10",
    net: s.Net = "lenet",
    sizes: Annotated[tuple[int, ...], "numbers of training images"] = (200, 800, 3000),
    n_test: TestImages = 1000,
    least: Annotated[int, "fewest steps of a training, for small numbers of images"] = 600,
    looks: Annotated[int, "measurements of the test accuracy"] = 12,
    training: t.Training = SHORTER,
) -> StudyResult:
    """Test accuracy of a network and of its linearisation against the number of training images."""
    images = cache(lambda: s.two_classes(dataset, max(sizes), n_test, derive(run.seed, "images"), run.device))

    def train(kind: str, n: int, seed: int) -> dict[str, Any]:
        whole, test = images()
        start = s.network(net, whole.x.shape[1:], derive(run.seed, "init", seed), run.device, training.init)
        chosen = torch.randperm(len(whole), generator=generator(run.seed, "subset", seed))[:n]
        subset = whole.subset(chosen.to(whole.x.device))
        recipe, model, accuracies = training.recipe(n, least), training.copy_of(start, kind), list[float]()

        def look(_: int) -> None:
            accuracies.append(t.evaluate(model, test.x, test.y)[1])

        at = [round(recipe.steps * (i + 1) / looks) for i in range(looks)]
        losses = t.fit(model, subset.x, subset.y, recipe, derive(run.seed, "order", seed), at=at, look=look)
        found = {"best": max(accuracies), "loss": float(losses[-t.per_epoch(n, recipe.batch) :].mean())}
        run.log(kind=kind, n=n, seed=seed, **found)
        distance = t.displacement(model, start)[0]
        return {**found, "last": accuracies[-1], "accuracies": torch.tensor(accuracies), "distance": distance}

    jobs = [(kind, n, seed) for kind in t.KINDS for n in sizes for seed in range(training.seeds)]
    found: dict[tuple[str, int, int], dict[str, Any]] = {
        job: run.cached(" ".join(map(str, job)), partial(train, *job)) for job in progress(jobs, "trainings")
    }

    def table(kind: str, what: str) -> Tensor:
        rows = [[float(found[kind, n, seed][what]) for n in sizes] for seed in range(training.seeds)]
        return torch.tensor(rows, dtype=torch.float64)  # [seeds, sizes]

    best = {kind: table(kind, "best") for kind in t.KINDS}
    gap, distance = best["f"] - best["lin"], table("f", "distance")
    numbers = dict[str, Estimate]()
    for what, rows in (("advantage", gap), ("distance", distance)):
        numbers[f"growth of the {what} from {sizes[0]} to {sizes[-1]} images"] = Estimate.of(rows[:, -1] - rows[:, 0])
        order = mean_of_ranks([spearman(list(sizes), row) for row in rows.tolist()], len(sizes))
        numbers[f"rank correlation of n and the {what}"] = order
    numbers |= {f"advantage with {n} images": Estimate.of(column) for n, column in zip(sizes, gap.T)}
    numbers |= {f"accuracy of f with {n} images": Estimate.of(column) for n, column in zip(sizes, best["f"].T)}
    peaks = {}
    for kind, rows in best.items():  # when the test accuracy is highest, as a share of the training
        when = [[float(found[kind, n, seed]["accuracies"].argmax()) for n in sizes] for seed in range(training.seeds)]
        share = (torch.tensor(when, dtype=torch.float64) + 1) / len(found[kind, sizes[0], 0]["accuracies"])
        numbers[f"when the accuracy of {kind} is highest, share of the training"] = over_seeds(share)
        peaks[kind] = share.log2()
        numbers[f"best accuracy of {kind} with the most images"] = Estimate.of(rows[:, -1])
    numbers["epochs to the best accuracy, f_lin over f (log2)"] = over_seeds(peaks["lin"] - peaks["f"])
    slower = table("lin", "loss") - table("f", "loss")
    numbers["last training loss, f_lin minus f"] = over_seeds(slower)
    left = {kind: float(table(kind, "loss")[:, 0].mean()) for kind in t.KINDS}  # 0.69 before training
    numbers |= {f"last training loss of {kind} with the fewest images": Estimate(loss) for kind, loss in left.items()}

    def chart(name: str, title: str, label: str, what: str, *series: Series) -> Chart:
        alt = f"{what} against the number of training images."
        return Chart(name, title, "training images", label, series, alt=alt, log_x=True)

    models = [curve(t.KINDS[kind], sizes, rows) for kind, rows in best.items()]
    both = "Test accuracy of the network and of its linearisation"
    apart, path = curve("advantage", sizes, gap), curve("network", sizes, distance)
    return StudyResult(
        measured=f"{s.title(net)}: the advantage goes from {numbers[f'advantage with {sizes[0]} images']} with "
        f"{sizes[0]} images to {numbers[f'advantage with {sizes[-1]} images']} with {sizes[-1]}.{s.noted(dataset)}",
        numbers=numbers,
        figures=(
            chart("accuracy", f"Best test accuracy, {s.title(net)}", "test accuracy", both, *models),
            chart("advantage", "Advantage of the network", "accuracy of f minus f_lin", "Difference of the two", apart),
            chart(
                "distance", "Distance from the initial weights", "||theta - theta_0||", "Distance of the network", path
            ),
        ),
    )


@study(
    "ntk/table4.1",
    sizes={
        "smoke": {"dataset": "digits", "n_train": 600, "n_test": 200, "n_kernel": 200, "k": 10, "epochs": 20,
                  "batch": 32, "points": 2, **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "mlp,lenet,resnet18", "n_train": 50_000, "n_test": 10_000, "n_kernel": 12_000, "epochs": 200,
                  "points": 5, "seeds": 3, **s.PUBLISHED},
    },
)  # fmt: skip
def table4_1(
    run: Run,
    *,
    dataset: s.TwoClasses = "cifar10",
    nets: s.Nets = ("mlp", "lenet"),
    n_train: Annotated[int, "training images"] = 5000,
    n_test: TestImages = 2000,
    n_kernel: Annotated[int, "training images on which the kernel is measured"] = 1500,
    k: Annotated[int, "leading eigenvectors"] = 50,
    points: Annotated[int, "measurements of the kernel after the first one, evenly spaced in log epochs"] = 4,
    training: t.Training = SHORT,
    kernel: Annotated[Literal["float32", "tf32", "bf16"], "arithmetic of the kernel"] = "float32",
) -> StudyResult:
    """Energy of the labels in the leading eigenvectors of the tangent kernel, over training."""
    images = cache(lambda: s.two_classes(dataset, n_train, n_test, derive(run.seed, "images"), run.device))
    n = min(n_train, data.info(dataset).n_train)
    recipe, each, size = training.recipe(n), t.per_epoch(n, training.batch), min(n_kernel, n)
    at = t.spread_out(recipe.steps, points, first=min(each, recipe.steps))

    def train(name: str, seed: int) -> dict[str, Any]:
        whole, test = images()
        start = s.network(name, whole.x.shape[1:], derive(run.seed, "init", name, seed), run.device, training.init)
        net = training.copy_of(start, "f")
        x, y, energies = whole.x[:n_kernel], whole.y[:n_kernel].float() * 2 - 1, list[float]()

        def look(step: int) -> None:
            K = ntk(t.expanded(net, start), x, outputs=0, precision=kernel)
            energies.append(K.energy_concentration(y, min(k, len(x))))
            run.log(net=name, seed=seed, step=step, energy=energies[-1])

        losses = t.fit(net, whole.x, whole.y, recipe, derive(run.seed, "order", name, seed), at=at, look=look)
        accuracy = t.evaluate(net, test.x, test.y)[1]
        return {"energy": torch.tensor(energies, dtype=torch.float64), "accuracy": accuracy, "losses": losses}

    numbers: dict[str, Estimate] = {}
    energies, findings, series = dict[str, Tensor](), list[str](), list[Series]()
    for name in progress(nets, "networks"):
        found: list[dict[str, Any]] = run.cached_each(name, range(training.seeds), partial(train, name))
        energies[name] = energy = torch.stack([row["energy"] for row in found])
        own = {
            "energy before": Estimate.of(energy[:, 0]),
            "energy after": Estimate.of(energy[:, -1]),
            "gain of energy": Estimate.of(energy[:, -1] - energy[:, 0]),
            "ratio of norms before": Estimate.of(energy[:, 0].sqrt()),
            "ratio of norms after": Estimate.of(energy[:, -1].sqrt()),
            "test accuracy": Estimate.of([float(row["accuracy"]) for row in found]),
            "last training loss": Estimate.of([float(row["losses"][-each:].mean()) for row in found]),
        }
        numbers |= {f"{key}, {name}": value for key, value in own.items()}
        first, last, accuracy = own["energy before"], own["energy after"], own["test accuracy"]
        findings.append(f"{s.title(name)} {first} to {last} (test accuracy {accuracy})")
        series.append(curve(s.title(name), [step / each for step in at], energy))
        if name in PUBLISHED:
            ends = [at[0] / each, at[-1] / each]
            squares = [share**2 for share in PUBLISHED[name]]  # printed as ratios of norms
            series.append(Series.of(f"{s.title(name)}, published", ends, squares, style="points"))
    for low, high in neighbours(nets):
        more = Estimate.of(energies[high][:, -1] - energies[low][:, -1])
        numbers[f"energy after, {high} minus {low}"] = more
    chart = Chart(
        "energy",
        f"Energy of the labels in the {k} first eigenvectors",
        "epoch",
        "share of energy",
        tuple(series),
        alt="One rising curve per network over epochs, and the published first and last values as points.",
    )
    return StudyResult(
        measured=f"Energy in the first {k} of {size} eigenvectors: {'; '.join(findings)}. Random labels would have "
        f"{k / size:.4f}.{'' if training.seeds > 1 else ' Only one seed, no error bar.'}{s.noted(dataset)}",
        numbers=numbers,
        figures=(chart,),
    )


def neighbours(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of networks that follow each other in the published order, in whatever order they are named."""
    ordered = sorted(names, key=lambda name: PLACE[name])
    there = sorted({PLACE[name] for name in ordered})
    return [(a, b) for a in ordered for b in ordered if there.index(PLACE[b]) == there.index(PLACE[a]) + 1]
