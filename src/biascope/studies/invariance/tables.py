"""Tables 1 and 2: train on the images whose direction lies most in G, against as many random ones.

Score(x) = (x/|x|)^T G (x/|x|), computed in the order of the data set; the lowest scores are dropped. As in the
published code they are dropped within each class, the number of steps stays that of the full set, the learning rate
falls linearly and the gradient norm is clipped; the text says none of this. The published script reads its scores from
a shuffled loader, which gives them to the wrong images, so that it compares two random sets; here they are in order.
With them in order LeNet loses by the score at every size tried in a training loop written apart from this one (two
networks each, fewer steps than published): 16 x 16 pixels, 10,000 images, 90 % removed, 790 steps: 30.1 against 35.2 %;
32 x 32, 50,000 images, 90 % removed, 2000 steps (training loss 0.001): 40.2 +- 3.1 against 45.4 +- 0.4 (published for
random: 45.1); 30 % removed, 1000 steps: 55.1 against 57.1. The same sign with GELU and with scores of pixels in [0, 1].
Keeping the lowest scores loses as well (31.4 and 38.9 % in the first two): either end is less varied.

Verdict rule: for every network and at each removal rate the difference score minus random is positive by 2 standard
errors over repeats. (Changed after runs had been seen: the mean over the rates had been judged, where the paper claims
every rate. No verdict changed by it.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.ensembles.arithmetic import Precision
from biascope.errors import InputError
from biascope.geometry import alignment_score
from biascope.seeds import generator
from biascope.studies.estimates import above, curve
from biascope.studies.invariance.charts import decide, percent, remark, restricted
from biascope.studies.invariance.geometries import initial_geometry
from biascope.studies.invariance.images import Source, said, ten_classes
from biascope.studies.invariance.networks import as_they_are, factory, named, shape_of
from biascope.studies.invariance.tasks import Lazy
from biascope.studies.invariance.training import Protocol, train_tasks
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "Dropping the CIFAR-10 images with the smallest score costs less test accuracy than dropping random ones, for "
    "LeNet, ResNet18 and ViT without normalisation, at every rate: 0.6 to 2 points."
)
NETS = ("lenet", "resnet18", "vit")
RATES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
PUBLISHED = {  # test accuracy in %, random and score, at RATES
    "lenet": (
        (65.0, 63.95, 61.7, 58.9, 56.6, 54.8, 52.4, 49.5, 45.1),
        (65.9, 65.1, 62.5, 60.9, 58.5, 56.4, 53.5, 50.8, 45.9),
    ),
    "resnet18": (
        (78.6, 76.8, 75.8, 73.9, 71.8, 68.8, 65.1, 60.3, 52.4),
        (79.6, 78.4, 77.0, 75.9, 73.2, 70.0, 66.2, 61.5, 54.4),
    ),
    "vit": (
        (62.0, 60.0, 57.5, 54.6, 51.5, 48.7, 45.5, 41.3, 35.6),
        (62.9, 60.6, 58.4, 55.4, 52.2, 49.7, 46.5, 42.1, 36.2),
    ),
}
SMOKE = {"nets": ("lenet",), "source": "synthetic", "side": 16, "n_train": 800, "networks": 64, "heads": 32,
         "rates": (50, 90), "epochs": 4, "repeats": 3, "engine": "vmap"}  # fmt: skip
LAPTOP = {"nets": ("lenet",), "side": 16, "n_train": 10_000, "networks": 256, "heads": 64, "epochs": 10, "repeats": 4}


@dataclass(frozen=True)
class Pruning:
    """Options of both tables."""

    nets: Annotated[tuple[str, ...], "architectures, without normalisation; or your own as module:factory"] = NETS
    rates: Annotated[tuple[int, ...], "percentages of the training set to remove"] = RATES
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10"
    side: Annotated[int, "side of the images"] = 32
    n_train: Annotated[int, "training images before removal (50,000 is all)"] = 50_000
    networks: Annotated[int, "networks drawn for G"] = 10_000
    heads: Annotated[int, "output layers per network drawn for G (1 in the paper)"] = 1
    repeats: Annotated[int, "trainings per cell"] = 5
    epochs: Annotated[int, "epochs of the full set; a smaller set is gone through more often, for the same steps"] = 50
    lr: Annotated[float, "first learning rate (linear decay to 0)"] = 0.2
    clip_norm: Annotated[float, "largest gradient norm, 0 for none"] = 0.5
    per_class: Annotated[bool, "drop within each class (published code), or over all classes (text)"] = True
    chunk: Annotated[int, "networks trained together and saved together"] = 10
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32"
    engine: Annotated[str, "auto, vmap, loop or graph"] = "auto"


FOUR_RATES = Pruning(rates=(30, 50, 70, 90))
NINE_RATES = Pruning()


@study(
    "gih/table1",
    paper="invariance",
    figure="Table 1",
    claim=CLAIM,
    sizes={"smoke": SMOKE, "laptop": {**LAPTOP, "rates": (50, 90)}, "paper": {}},
)
def table1(
    run: Run,
    *,
    options: Pruning = FOUR_RATES,
) -> StudyResult:
    """Pruning CIFAR-10 by the score, at four rates."""
    return pruning(run, options, FOUR_RATES.rates)


@study(
    "gih/table2",
    paper="invariance",
    figure="Table 2",
    claim=CLAIM,
    sizes={"smoke": SMOKE, "laptop": {**LAPTOP, "rates": (10, 50, 90)}, "paper": {}},
)
def table2(
    run: Run,
    *,
    options: Pruning = NINE_RATES,
) -> StudyResult:
    """Pruning CIFAR-10 by the score, at nine rates."""
    return pruning(run, options, NINE_RATES.rates)


def pruning(run: Run, options: Pruning, published: tuple[int, ...]) -> StudyResult:
    """Both tables; `published` are the rates of the paper's."""
    nets, rates, repeats = named(options.nets), options.rates, options.repeats
    if not rates or not all(0 < rate < 100 for rate in rates):
        raise InputError(f"rates={rates} must be percentages between 0 and 100")
    shape = shape_of(3, options.side, nets, outputs=10)
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    right: dict[str, bool] = {}
    for net in nets:

        def measured(net: str = net) -> dict[str, Value]:
            return {"accuracy": accuracies(run, net, shape, options), "rates": torch.tensor(rates)}

        table = torch.as_tensor(run.cached(f"table {net}", measured)["accuracy"])  # [rates, 2, repeats]
        gains = []
        for rate, pair in zip(rates, table):
            for name, row in zip(("score", "random"), pair):
                numbers[f"{net}, {rate} % removed, {name}"] = Estimate.of(row)
            gain = numbers[f"{net}, {rate} % removed, score minus random"] = difference(pair)
            gains.append(gain)
        numbers[f"{net}: score minus random, mean over rates"] = difference(table.mean(0))
        right[net] = all(above(gain) for gain in gains)
        charts.append(_chart(net, rates, table))
    told = "; ".join(
        f"{net} "
        + ", ".join(f"{numbers[f'{net}, {rate} % removed, score minus random']} at {rate} %" for rate in rates)
        + f"; mean over rates {numbers[f'{net}: score minus random, mean over rates']}{remark(right[net])}"
        for net in nets
    )
    how = "within each class" if options.per_class else "over all classes"
    claim, untested = restricted(
        CLAIM, networks=(nets, NETS), rates=(rates, published), images=([options.source], ["cifar10"])
    )
    return StudyResult(
        verdict=decide(all(right.values()), repeats),
        claim=claim,
        measured=f"Score minus random, points: {told}. {said(options.source, options.side)}, {options.n_train} images "
        f"before removal, dropped {how}, {options.epochs} epochs' worth of steps, {repeats} repeats."
        f"{as_they_are(nets)}{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )


def accuracies(run: Run, net: str, shape: tuple[int, ...], options: Pruning) -> Tensor:
    """Test accuracies in per cent [rates, 2, repeats]: the best scores kept, and as many random images."""
    repeats = options.repeats
    train, test = ten_classes(run, options.source, options.side, check_count(options.n_train, "n_train"))
    if len(train) < options.n_train:
        raise InputError(f"n_train={options.n_train}: there are {len(train)} training images")
    train = train.subset(torch.arange(options.n_train)).to(run.device)
    test = test.to(run.device)
    G = initial_geometry(run, net, shape, networks=options.networks, heads=options.heads, norm=False)
    scores, labels = alignment_score(train.x, G.matrix.to(run.device)).cpu(), train.y.cpu()
    rows: list[Tensor] = []
    for rate in options.rates:
        best = keep(scores, labels, rate / 100, options.per_class)
        if not len(best):
            raise InputError(f"rates: {rate} % of {len(train)} images leave none; give more images or a lower rate")
        chance = [torch.rand(len(train), generator=generator(run.seed, "random", rate, r)) for r in range(repeats)]
        sets = [best] * repeats + [keep(each, labels, rate / 100, options.per_class) for each in chance]
        sets = [index.to(run.device) for index in sets]
        passes = round(options.epochs * len(train) / len(best))  # over the kept images, for as many steps
        protocol = Protocol(
            passes, 128, options.lr, 0.9, 5e-4, options.clip_norm or None,
            precision=options.precision, engine=options.engine,  # type: ignore[arg-type]
        )  # fmt: skip
        accuracy = train_tasks(
            run, f"prune {net} {rate}", factory(net, shape, outputs=10, norm=False),
            Lazy(lambda i, s=sets: (train.x[s[i]], train.y[s[i]]), 2 * repeats),  # type: ignore[misc]
            [Lazy(lambda i: (test.x, test.y), 2 * repeats)], protocol, chunk=options.chunk,
        ).test[:, 0]  # fmt: skip
        rows.append(percent(accuracy).view(2, repeats))
    return torch.stack(rows)


def keep(scores: Tensor, y: Tensor, fraction: float, per_class: bool) -> Tensor:
    """Indices, ascending, of the examples left when the lowest `fraction` of scores is dropped.

    Example:
        >>> keep(torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 1]), 0.5, per_class=True).tolist()
        [0, 3]
    """
    groups: Sequence[Tensor] = (
        [(y == c).nonzero().flatten() for c in torch.unique(y)] if per_class else [torch.arange(len(y))]
    )
    left = []
    for group in groups:
        drop = round(fraction * len(group))
        left.append(group[scores[group].argsort(stable=True)[drop:]])
    return torch.cat(left).sort().values


def difference(pair: Tensor) -> Estimate:
    """Mean of the first row minus mean of the second [2, repeats], independent samples."""
    n = pair.shape[1]
    value = float(pair[0].mean() - pair[1].mean())
    error = float((pair.var(1).sum() / n).sqrt()) if n > 1 else None
    return Estimate(value, error, n)


def _chart(net: str, rates: tuple[int, ...], table: Tensor) -> Chart:
    series = [curve(name, rates, table[:, k].T) for k, name in enumerate(("by score", "random"))]
    if net in PUBLISHED and all(rate in RATES for rate in rates):
        for name, row in zip(("random", "by score"), PUBLISHED[net]):
            series.append(Series.of(f"{name}, published", rates, [row[RATES.index(r)] for r in rates], style="dashed"))
    return Chart(
        name=f"pruning-{net}",
        title=f"Test accuracy of {net} after pruning",
        x_label="training images removed, %",
        y_label="test accuracy, %",
        series=tuple(series),
        alt="Test accuracy over the share of removed images, dropped by score or at random.",
    )
