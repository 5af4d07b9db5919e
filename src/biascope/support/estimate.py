"""A measured number with its standard error: one class for all rooms, and how it is written."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from biascope.support.errors import InputError
from biascope.support.tables import number


@dataclass(frozen=True)
class Estimate:
    """A measured number; a sampled one carries its standard error and sample count.

    Example:
        >>> print(Estimate(0.91234, standard_error=0.012, n=5))
        0.912 ± 0.012 (n = 5)
    """

    value: float
    standard_error: float | None = None
    n: int | None = None

    @classmethod
    def of(cls, samples: Iterable[Any]) -> Estimate:
        """Mean of independent samples (numbers, or a tensor or array [n]) with its standard error.

        Example:
            >>> print(Estimate.of([1.0, 2.0, 3.0]))
            2.00 ± 0.58 (n = 3)
        """
        values = [float(sample) for sample in samples]
        n = len(values)
        if n == 0:
            raise InputError("an estimate needs at least one sample")
        mean = math.fsum(values) / n
        if n == 1:
            return Estimate(mean, None, 1)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        return Estimate(mean, math.sqrt(variance / n), n)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        count = "" if self.n is None or self.standard_error is None else f" (n = {self.n})"
        return number(self.value, self.standard_error) + count

    def _repr_html_(self) -> str:
        """The number with its error and its sample, for notebooks."""
        return f"<span>{html.escape(str(self))}</span>"


def mean(samples: Iterable[Any]) -> str:
    """Mean of samples with its standard error, as text."""
    found = Estimate.of(samples)
    return number(found.value, found.standard_error)
