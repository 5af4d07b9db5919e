"""Fig. 6: remove the directions where images vary much and G is small, against random directions of equal variance.

Directions v solve S v = l (G + ridge) v, l descending, orthogonalised in that order; the first k are projected out of
training and test images. The published code removes eigenvectors of GSG in descending order instead, those that the
network sees best: `directions=gsg`. Gradients are clipped as in that code (`clip_norm=0`: none).
"""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from biascope import InputError
from biascope.data import Dataset
from biascope.geometry import data_second_moment, gsg
from biascope.geometry.data_directions import generalised_directions, removed_variance
from biascope.linalg import psd_eigh
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import generator
from biascope_papers.gih.networks import factory, named, scope, shape_of
from biascope_papers.gih.sets import Source, describe, two_classes
from biascope_papers.gih.training import Lazy, Protocol, Task, Training, mean_of, percent, train_tasks

NETS = ("lenet", "resnet18", "vit")
Directions = Literal["generalised", "gsg"]
REMOVED = {
    "generalised": "generalised eigenvectors of S and G (the text)",
    "gsg": "eigenvectors of GSG (the published code)",
}
TRAINING = Training(epochs=50)


@study(
    "gih/fig6",
    sizes={
        "smoke": {"nets": ("lenet",), "source": "synthetic", "side": 16, "networks": 48, "heads": 32, "per_class": 100,
                  "counts": 3, "epochs": 4, "repeats": 3, "engine": "vmap"},
        "laptop": {"nets": ("lenet",), "side": 16, "networks": 256, "heads": 64, "per_class": 2000, "counts": 4,
                   "epochs": 15, "repeats": 3},
        "paper": {},
    },
)  # fmt: skip
def fig6(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    directions: Annotated[Directions, "removed first: largest S for its G (text), or GSG (code)"] = "generalised",
    ridge: Annotated[float, "added to G in S v = l G v, as a share of its largest eigenvalue"] = 1e-6,
    per_class: Annotated[int, "training images per class"] = 5000,
    counts: Annotated[int, "numbers of removed directions, evenly spaced from 0 to below D"] = 11,
    repeats: Annotated[int, "trainings per point, each with its own random directions"] = 5,
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.1,
    momentum: Annotated[float, "momentum"] = 0.9,
    chunk: Annotated[int, "networks trained together and saved together"] = 32,
    training: Training = TRAINING,
) -> StudyResult:
    """Test accuracy after removing directions, guided by G or at random."""
    nets = named(nets)
    shape = shape_of(3, side, nets)
    D = math.prod(shape)
    if not 1 <= counts <= D:
        raise InputError(f"counts={counts}: a number from 1 to {D} is needed, and from 2 on for a comparison")
    train, test = (part.to(run.device) for part in two_classes(run, source, side, per_class))
    S = data_second_moment(train.x, normalise=True).cpu()
    ks = [round(i * D / counts) for i in range(counts)]
    protocol = training.protocol(lr, momentum=momentum)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    gains: dict[str, Estimate] = {}
    for net in nets:
        guided = guiding(S, training.geometry(run, net, shape, norm=False).matrix, directions, ridge)
        shares = removed_variance(S, guided)
        accuracies = eliminate(run, net, train, test, S, guided, shares, ks, repeats, protocol, chunk)
        left = percent(accuracies[0] - accuracies[1])[:, 1:]  # [repeats, ks]; where none are removed nothing differs
        gains[net] = mean_of(left.mean(1)) if counts > 1 else Estimate(0.0)
        numbers[f"{net}: guided minus random, mean over removals, points"] = gains[net]
        for j, k in enumerate(ks):
            for name, rows in zip(("guided", "random of equal variance"), accuracies):
                numbers[f"{net}, {k} removed, {name}, %"] = mean_of(percent(rows[:, j]))
        removed = [0.0 if k == 0 else 100 * float(shares[k - 1]) for k in ks]
        charts.append(_chart(net, ks, accuracies, removed))
    text = "No directions are removed, so that there is nothing to compare"
    if counts > 1:
        points = "; ".join(f"{net} {gain} points" for net, gain in gains.items())
        text = f"Guided minus random removal, mean over {', '.join(map(str, ks[1:]))} directions: {points}"
    ways = ([REMOVED[directions]], [REMOVED["generalised"]])
    return StudyResult(
        measured=f"{text}. {describe(source, side)}."
        f"{scope(networks=(nets, NETS), images=([source], ['cifar10']), directions=ways)}",
        numbers=numbers,
        figures=tuple(charts),
    )


def guiding(S: Tensor, G: Tensor, directions: Directions, ridge: float) -> Tensor:
    """Orthonormal rows [D, D], in the order in which they are removed."""
    if directions == "gsg":
        return psd_eigh(gsg(G, S)).vectors.T.contiguous()
    return generalised_directions(S, G, ridge=ridge).directions


def eliminate(
    run: Run, net: str, train: Dataset, test: Dataset, S: Tensor, guided: Tensor, shares: Tensor, ks: list[int],
    repeats: int, protocol: Protocol, chunk: int,
) -> Tensor:  # fmt: skip
    """Test accuracy [2, repeats, ks]: guided and random removal."""
    bases, counts = [guided.float().to(run.device)] * repeats, [ks] * repeats
    for r in range(repeats):
        basis = random_basis(len(S), generator(run.seed, "basis", r))
        reached = removed_variance(S, basis)
        counts.append([matched(shares, reached, k) for k in ks])
        bases.append(basis.float().to(run.device))

    def made(data: Dataset, i: int) -> Task:
        row, j = divmod(i, len(ks))
        return remove(data.x, bases[row][: counts[row][j]]), data.y

    total, net_of = 2 * repeats * len(ks), factory(net, tuple(train.x.shape[1:]), norm=False)
    tasks, tests = (Lazy(lambda i, part=part: made(part, i), total) for part in (train, test))  # type: ignore[misc]
    _, found = train_tasks(run, f"eliminate {net}", net_of, tasks, [tests], protocol, chunk=chunk)
    return found.view(2, repeats, len(ks))


def remove(x: Tensor, directions: Tensor) -> Tensor:
    """x [n, ...] without its components along orthonormal rows [k, D]; bit for bit x when k is 0."""
    if len(directions) == 0:
        return x
    flat = x.flatten(1)
    return (flat - (flat @ directions.T) @ directions).view_as(x)


def random_basis(D: int, rng: torch.Generator) -> Tensor:
    """Random orthonormal rows [D, D], float64."""
    Q, _ = torch.linalg.qr(torch.randn(D, D, generator=rng, dtype=torch.float64))
    rows: Tensor = Q.T.contiguous()
    return rows


def matched(shares: Tensor, reached: Tensor, k: int) -> int:
    """Smallest number of random directions that take at least the variance of the first k guided ones.

    `shares` and `reached` [D] are the removed shares of variance (see `geometry.matched_count`).
    """
    if k == 0:
        return 0
    return min(len(reached), int((reached < shares[k - 1] - 1e-12).sum()) + 1)


def _chart(net: str, ks: list[int], accuracies: Tensor, removed: list[float]) -> Chart:
    series = (
        curve("accuracy, guided", ks, percent(accuracies[0])),
        curve("accuracy, random", ks, percent(accuracies[1])),
        Series.of("variance removed", ks, removed, style="dashed"),
    )
    return Chart(
        f"elimination-{net}", f"Test accuracy of {net} after removing directions",
        "guided directions removed (random ones: as many as take the same variance)", "%", series,
        "Test accuracy over the number of removed directions, guided and random, and the variance removed.",
    )  # fmt: skip
