"""Networks and image sets of the learning-complexity studies, and the small statistics they share.

Networks have one output (a binary logit) and stay in eval mode from beginning to end: BatchNorm keeps its initial mean
0 and variance 1, which switches it off, so that the linearised network is the tangent of the trained one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biascope import data, nets
from biascope.data import Dataset
from biascope.errors import InputError
from biascope.studies.nad.estimates import rank_correlation
from biascope.studies.result import Estimate, Verdict

NETS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": (100, 100)}),
    "lenet": ("lenet-avg", {"padding": "same"}),  # the published code's padding and pooling
    "resnet18": ("resnet18", {}),
    "resnet18-narrow": ("resnet18", {"width": 8}),
}
TITLES = {"mlp": "MLP", "lenet": "LeNet", "resnet18": "ResNet-18", "resnet18-narrow": "ResNet-18, 8 channels"}


def network(name: str, shape: Sequence[int], seed: int, device: str = "cpu") -> nn.Module:
    """A network with one output for inputs of this shape, in eval mode.

    Example:
        >>> network("lenet", (3, 32, 32), 0)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 1])
    """
    if name not in NETS:
        raise InputError(f"no network is called {name!r} here; there is {', '.join(NETS)}")
    kind, options = NETS[name]
    options = options | nets.info(kind).options_for(shape)
    return nets.build(kind, seed=seed, outputs=1, **options).to(device).eval()


def title(name: str) -> str:
    """How a network is called in charts."""
    return TITLES.get(name, name)


def images(
    name: str, split: str | None, n: int | None, seed: int, device: str = "cpu", like: Dataset | None = None
) -> Dataset:
    """n random images of a real set (all, in their own order, if n is None or too large), channels standardised.

    The channels' mean and deviation are those of `like` (the training images), if given.

    Example:
        >>> found = images("digits", "train", 100, seed=0)
        >>> found.x.shape, bool(found.x.mean().abs() < 1e-4)
        (torch.Size([100, 1, 8, 8]), True)
    """
    found = data.load(name, split, dtype=torch.uint8)  # type: ignore[arg-type]
    if n is not None and n < len(found):
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
        found = found.subset(order[:n])
    x = found.x.to(device).float()
    mean, std = (like.info["mean"], like.info["std"]) if like is not None else data.channel_stats(x)
    plain = Dataset(x, found.y.to(device), found.name, seed, {"mean": mean, "std": std})
    return data.normalise(plain, mean, std)


def two_classes(name: str, n_train: int | None, n_test: int | None, seed: int, device: str) -> tuple[Dataset, Dataset]:
    """CIFAR2 (or its likeness): y = 1 for the first five classes, 0 otherwise; training and test images.

    Example:
        >>> train, test = two_classes("digits", 200, 50, 0, "cpu")
        >>> len(train), len(test), sorted(set(train.y.tolist()))
        (200, 50, [0, 1])
    """
    train = images(name, "train", n_train, seed, device)
    test = images(name, "test", n_test, seed, device, like=train)
    return data.cifar2(train, "first-five"), data.cifar2(test, "first-five")


def trend(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where either side is constant.

    Example:
        >>> trend([1, 2, 3], [1.0, 4.0, 9.0]), trend([1, 2, 3], [1.0, 1.0, 1.0])
        (1.0, 0.0)
    """
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    from scipy.stats import spearmanr  # slow to import, and every command imports every study

    found = float(spearmanr(x, y).statistic)
    return 0.0 if math.isnan(found) else round(found, 12)


def above(number: Estimate, level: float = 0.0) -> bool:
    """Is it above the level by two standard errors? An unknown error is never sure.

    Example:
        >>> above(Estimate(1.0, 0.4, 3)), above(Estimate(1.0, 0.6, 3)), above(Estimate(1.0))
        (True, False, False)
    """
    return number.standard_error is not None and number.value - 2 * number.standard_error > level


def below(number: Estimate, level: float = 0.0) -> bool:
    """Is it below the level by two standard errors? An unknown error is never sure.

    Example:
        >>> below(Estimate(-1.0, 0.4, 3)), below(Estimate(-1.0))
        (True, False)
    """
    return number.standard_error is not None and number.value + 2 * number.standard_error < level


def decide(holds: bool, numbers: Iterable[Estimate]) -> Verdict:
    """The verdict on the numbers that the rule looks at; where one has no error bar, nothing is tested.

    Example:
        >>> decide(True, [Estimate(1.0, 0.1, 3)]), decide(False, [Estimate(1.0, 0.1, 3)]), decide(True, [Estimate(1.0)])
        ('confirmed', 'not confirmed', 'not tested')
    """
    if any(number.standard_error is None for number in numbers):
        return "not tested"
    return "confirmed" if holds else "not confirmed"


def over_seeds(rows: Sequence[Sequence[float]] | Tensor) -> Estimate:
    """Mean of rows [seeds, tasks]. Errors are over seeds, tasks averaged first; those of one seed are over its tasks.

    Example:
        >>> print(over_seeds([[1.0, 3.0], [2.0, 6.0]]))
        3.0 ± 1.0 (n = 2)
        >>> print(over_seeds([[1.0, 3.0]]))
        2.0 ± 1.0 (n = 2)
    """
    table = torch.as_tensor(rows, dtype=torch.float64)
    return Estimate.of((table.mean(1) if len(table) > 1 else table[0]).tolist())


def trends(x: Sequence[float], rows: Sequence[Sequence[float]]) -> Estimate:
    """Rank correlation of x with each row [seeds, points]: error over seeds; of one seed, by leaving out one point.

    Example:
        >>> print(trends([1, 2, 3, 4, 5], [[1.0, 4.0, 9.0, 8.0, 9.5]]))
        0.90 ± 0.20 (n = 5)
    """
    if len(rows) > 1:
        return Estimate.of([trend(x, row) for row in rows])
    return rank_correlation(np.asarray(x, dtype=float), np.asarray(rows[0], dtype=float))


def errors_over(seeds: int, tasks: int, of: str) -> str:
    """What the errors of `over_seeds` and `trends` are over, for the text.

    Example:
        >>> errors_over(3, 6, "directions"), errors_over(1, 6, "directions")
        ('errors over 3 seeds', 'one seed: errors over 6 directions of one network, not over trainings')
    """
    if seeds > 1:
        return f"errors over {seeds} seeds"
    if tasks > 1:
        return f"one seed: errors over {tasks} {of} of one network, not over trainings"
    return "one seed, no error bar: nothing is tested"


def mean_and_error(rows: Sequence[Sequence[float]] | Tensor) -> tuple[list[float], list[float] | None]:
    """Mean and standard error over the rows (seeds), column by column.

    Example:
        >>> mean_and_error([[1.0, 2.0], [3.0, 2.0]])
        ([2.0, 2.0], [1.0, 0.0])
    """
    table = torch.as_tensor(rows, dtype=torch.float64)
    error = (table.std(0) / len(table) ** 0.5).tolist() if len(table) > 1 else None
    return table.mean(0).tolist(), error
