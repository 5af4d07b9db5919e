"""A share of the wall time that must not be exceeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from biascope.arguments import as_number
from biascope.errors import InputError


class Overhead:
    """Counts the seconds spent measuring against all seconds since it was made.

    Example:
        >>> now = iter([0.0, 0.0, 2.0, 10.0, 100.0])
        >>> time = Overhead(0.1, lambda: next(now))
        >>> with time.counted():  # from 0 to 2
        ...     pass
        >>> time.cost = 2.0
        >>> time.allows(), time.allows()  # at 10: 4 of 12 seconds; at 100: 4 of 102
        (False, True)
    """

    def __init__(self, cap: float | None, clock: Callable[[], float]) -> None:
        if cap is not None and not 0 < as_number(cap, "max_overhead") <= 1:
            raise InputError(f"max_overhead={cap}: a share of the time, above 0 and up to 1, or None for no cap")
        self.cap, self.clock = cap, clock
        self.began = clock()
        self.before = 0.0  # seconds of earlier processes of the same run
        self.spent = 0.0
        self.cost = 0.0  # of the last measurement: what the next one is expected to take

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens inside as spent."""
        begin = self.clock()
        try:
            yield
        finally:
            self.spent += self.clock() - begin

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.before + self.clock() - self.began

    @property
    def share(self) -> float:
        """Spent / elapsed."""
        elapsed = self.elapsed
        return self.spent / elapsed if elapsed > 0 else 0.0

    def allows(self) -> bool:
        """Whether one more measurement keeps the share under the cap."""
        return self.cap is None or self.spent + self.cost <= self.cap * (self.elapsed + self.cost)
