"""Tables 1 and 2: train on the images whose direction lies most in G, against as many random ones.

Score(x) = (x/|x|)^T G (x/|x|), in the order of the data set; the lowest scores are dropped, of all images (the text) or
within each class (the published code, `per_class`). As in that code the number of steps stays that of the full set, the
learning rate falls linearly and the gradient norm is clipped. The published script reads its scores from a shuffled
loader, so that it compares two random sets. With them in order LeNet loses by the score at every size tried, also in a
training loop written apart; keeping the lowest scores loses as well: either end is less varied.
"""

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

import torch
from torch import Tensor

from biascope import InputError
from biascope.geometry.data_directions import alignment_score
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import generator
from biascope_papers.gih.networks import at_least, factory, named, scope, shape_of
from biascope_papers.gih.sets import Source, describe, ten_classes
from biascope_papers.gih.training import Lazy, Training, mean_of, percent, train_tasks

NETS = ("lenet", "resnet18", "vit")
RATES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
SMOKE = {"nets": ("lenet",), "source": "synthetic", "side": 16, "n_train": 800, "networks": 64, "heads": 32,
         "rates": (50, 90), "epochs": 4, "repeats": 3, "engine": "vmap", "per_class": False}  # fmt: skip
LAPTOP = {"nets": ("lenet",), "side": 16, "n_train": 10_000, "networks": 256, "heads": 64, "epochs": 10, "repeats": 4,
          "per_class": False}  # fmt: skip


@dataclass(frozen=True)
class Pruning(Training):
    """Options of both tables."""

    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS
    rates: Annotated[tuple[int, ...], "percentages of the training set to remove"] = RATES
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10"
    side: Annotated[int, "side of the images"] = 32
    n_train: Annotated[int, "training images before removal (50,000 is all)"] = 50_000
    repeats: Annotated[int, "trainings per cell"] = 5
    epochs: Annotated[int, "epochs of the full set; a smaller set is gone through more often, for the same steps"] = 50
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.2
    per_class: Annotated[bool, "drop within each class (published code), or over all classes (text)"] = True
    chunk: Annotated[int, "networks trained together and saved together"] = 10


FOUR_RATES = Pruning(rates=(30, 50, 70, 90))
NINE_RATES = Pruning()


@study("gih/table1", sizes={"smoke": SMOKE, "laptop": {**LAPTOP, "rates": (50, 90)}, "paper": {"per_class": False}})
def table1(run: Run, *, options: Pruning = FOUR_RATES) -> StudyResult:
    """Pruning CIFAR-10 by the score, at four rates."""
    return pruning(run, options, FOUR_RATES.rates)


@study("gih/table2", sizes={"smoke": SMOKE, "laptop": {**LAPTOP, "rates": (10, 50, 90)}, "paper": {"per_class": False}})
def table2(run: Run, *, options: Pruning = NINE_RATES) -> StudyResult:
    """Pruning CIFAR-10 by the score, at nine rates."""
    return pruning(run, options, NINE_RATES.rates)


def pruning(run: Run, options: Pruning, wanted: tuple[int, ...]) -> StudyResult:
    """Both tables; `wanted` are the rates of the paper's."""
    nets, rates = named(options.nets), options.rates
    if not rates or not all(0 < rate < 100 for rate in rates):
        raise InputError(f"rates={rates} must be percentages between 0 and 100")
    shape = shape_of(3, options.side, nets, outputs=10)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    for net in nets:

        def made(net: str = net) -> dict[str, Tensor]:
            return {"accuracy": accuracies(run, net, shape, options), "rates": torch.tensor(rates)}

        table = torch.as_tensor(run.cached(f"table {net}", made)["accuracy"])  # [rates, 2, repeats]
        for rate, pair in zip(rates, table):
            for name, row in zip(("score", "random"), pair):
                numbers[f"{net}, {rate} % removed, {name}"] = mean_of(row)
            numbers[f"{net}, {rate} % removed, score minus random"] = difference(pair)
        numbers[f"{net}: score minus random, mean over rates"] = difference(table.mean(0))
        charts.append(_chart(net, rates, table))
    text = "; ".join(f"{net} {numbers[f'{net}: score minus random, mean over rates']}" for net in nets)
    how = "within each class" if options.per_class else "over all classes"
    tried = scope(networks=(nets, NETS), rates=(rates, wanted), images=([options.source], ["cifar10"]))
    return StudyResult(
        measured=f"Score minus random, points, mean over rates: {text}. {describe(options.source, options.side)}, "
        f"dropped {how}.{tried}",
        numbers=numbers,
        figures=tuple(charts),
    )


def accuracies(run: Run, net: str, shape: tuple[int, ...], options: Pruning) -> Tensor:
    """Test accuracies in per cent [rates, 2, repeats]: the best scores kept, and as many random images."""
    repeats = options.repeats
    at_least(1, n_train=options.n_train)
    train, test = ten_classes(run, options.source, options.side, options.n_train)
    if len(train) < options.n_train:
        raise InputError(f"n_train={options.n_train}: there are {len(train)} training images")
    train, test = train.subset(torch.arange(options.n_train)).to(run.device), test.to(run.device)
    G = options.geometry(run, net, shape, norm=False)
    scores, labels = alignment_score(train.x, G.matrix.to(run.device)).cpu(), train.y.cpu()
    made, rows = factory(net, shape, outputs=10, norm=False), list[Tensor]()
    for rate in options.rates:
        best = keep(scores, labels, rate / 100, options.per_class)
        if not len(best):
            raise InputError(f"rates: {rate} % of {len(train)} images leave none; give more images or a lower rate")
        chance = [torch.rand(len(train), generator=generator(run.seed, "random", rate, r)) for r in range(repeats)]
        sets = [best] * repeats + [keep(each, labels, rate / 100, options.per_class) for each in chance]
        sets = [index.to(run.device) for index in sets]
        protocol = options.protocol(options.lr, momentum=0.9, decay=5e-4, longer=len(train) / len(best))
        tasks = Lazy(lambda i, s=sets: (train.x[s[i]], train.y[s[i]]), 2 * repeats)  # type: ignore[misc]
        tests = Lazy(lambda i: (test.x, test.y), 2 * repeats)
        _, found = train_tasks(run, f"prune {net} {rate}", made, tasks, [tests], protocol, chunk=options.chunk)
        rows.append(percent(found).view(2, repeats))
    return torch.stack(rows)


def keep(scores: Tensor, y: Tensor, fraction: float, per_class: bool) -> Tensor:
    """Indices, ascending, of the examples left when the lowest `fraction` of scores is dropped."""
    groups = [(y == c).nonzero().flatten() for c in torch.unique(y)] if per_class else [torch.arange(len(y))]
    left = [group[scores[group].argsort(stable=True)[round(fraction * len(group)) :]] for group in groups]
    return torch.cat(left).sort().values


def difference(pair: Tensor) -> Estimate:
    """Mean of the first row minus mean of the second [2, repeats], independent samples; an error from three on."""
    n = pair.shape[1]
    error = float((pair.var(1).sum() / n).sqrt()) if n > 2 else None
    return Estimate(float(pair[0].mean() - pair[1].mean()), error, n)


@functools.cache
def published() -> dict[str, float]:
    """Test accuracies of the paper's Table 2, by the names of the numbers."""
    text = files("biascope_papers.gih").joinpath("claims.toml").read_text(encoding="utf-8")
    rows = next(row for row in tomllib.loads(text)["claim"] if row["id"] == "invariance/table2")["published"]
    return {row["number"]: row["value"] for row in rows}


def _chart(net: str, rates: tuple[int, ...], table: Tensor) -> Chart:
    series = [curve(name, rates, table[:, k].T) for k, name in enumerate(("by score", "random"))]
    for name, label in (("random", "random, published"), ("score", "by score, published")):
        row = [published().get(f"{net}, {rate} % removed, {name}") for rate in rates]
        if None not in row:
            series.append(Series.of(label, rates, [each for each in row if each is not None], style="dashed"))
    return Chart(
        f"pruning-{net}", f"Test accuracy of {net} after pruning", "training images removed, %", "test accuracy, %",
        tuple(series), "Test accuracy over the share of removed images, dropped by score or at random.",
    )  # fmt: skip
