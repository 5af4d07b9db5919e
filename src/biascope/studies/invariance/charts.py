"""Small steps that every figure takes: means with errors, curves over an eigenvector index, pictures when possible."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from biascope.studies.result import Estimate, Series, Verdict


def mean_error(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and standard error over the first axis; no error with a single repeat.

    Example:
        >>> mean_error(torch.tensor([[1.0], [3.0]]))
        (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    wide = values.double()
    return wide.mean(0), wide.std(0) / len(wide) ** 0.5 if len(wide) > 1 else None


def curve(label: str, x: Sequence[float], values: Tensor, dashed: bool = False) -> Series:
    """A curve [repeats, points] as its mean with standard errors."""
    mean, error = mean_error(values)
    return Series.of(label, x, mean, error, "dashed" if dashed else "line")


def spearman(x: Sequence[float], y: Tensor) -> float:
    """Rank correlation of two lists; 0 when one of them is constant.

    Example:
        >>> spearman([1, 2, 3], torch.tensor([3.0, 2.0, 1.0]))
        -1.0
    """
    if float(y.max()) == float(y.min()) or len(set(x)) == 1:
        return 0.0
    return float(spearmanr(np.asarray(x), y.double().numpy()).statistic)


def above(estimate: Estimate, bar: float = 0.0) -> bool:
    """Whether the estimate lies above the bar by two standard errors; one sample decides nothing (False)."""
    return estimate.standard_error is not None and estimate.value - 2 * estimate.standard_error > bar


def below(estimate: Estimate, bar: float = 0.0) -> bool:
    """Whether the estimate lies below the bar by two standard errors; one sample decides nothing (False)."""
    return estimate.standard_error is not None and estimate.value + 2 * estimate.standard_error < bar


def negligible(estimate: Estimate, bound: float) -> bool | None:
    """Whether |value| lies below the bound even two standard errors up; None where the error is too wide to tell.

    Too wide: two standard errors alone reach the bound. Then noise would decide, unless |value| is above the bound by
    two standard errors.

    Example:
        >>> [negligible(Estimate(1.0, error), 5.0) for error in (1.0, 2.2, 3.0, None)]
        [True, False, None, None]
    """
    if estimate.standard_error is None:
        return None
    size, doubt = abs(estimate.value), 2 * estimate.standard_error
    return None if doubt >= bound > size - doubt else size + doubt < bound


def together(parts: Iterable[bool | None]) -> bool | None:
    """Whether all parts are as claimed: False if one is not, else None if one cannot be told.

    Example:
        >>> together([True, None]), together([True, None, False]), together([True])
        (None, False, True)
    """
    found = list(parts)
    return False if False in found else None if None in found else True


def decide(as_claimed: bool | None, repeats: int) -> Verdict:
    """The verdict; None tests nothing, nor do fewer than three repeats, whose errors are not worth the name.

    Example:
        >>> decide(True, 5), decide(False, 5), decide(None, 5), decide(True, 2)
        ('confirmed', 'not confirmed', 'not tested', 'not tested')
    """
    if repeats < 3 or as_claimed is None:
        return "not tested"
    return "confirmed" if as_claimed else "not confirmed"


def remark(as_claimed: bool | None) -> str:
    """What the text says after the numbers of a part.

    Example:
        >>> remark(False), remark(None), remark(True)
        (' (not as claimed)', ' (cannot be told)', '')
    """
    return {True: "", False: " (not as claimed)", None: " (cannot be told)"}[as_claimed]


def percent(values: Tensor) -> Tensor:
    """Accuracies in percent."""
    return 100.0 * torch.as_tensor(values).double()
