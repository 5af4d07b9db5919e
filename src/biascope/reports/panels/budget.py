"""The time a card may take, and what each panel gets of it.

Every panel has a share, in the order in which it is made. What a panel leaves (nothing to do, or its largest size done)
goes to those after it. A panel chooses the largest size that fits, and says it on the page.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

MINUTES = 2.0
SHARES = {  # by title; some networks with many layers need more for the last two than others
    "What it responds to": 0.18,
    "What it learns": 0.25,
    "Tangent kernel": 0.2,
    "Alignment with the labels": 0.2,
    "Linear or not": 0.17,
}


@dataclass(frozen=True)
class Budget:
    """Seconds in all, and a clock: of the processor on a CPU, which other jobs on the machine do not move.

    Example:
        >>> now = [0.0]
        >>> budget = Budget(100.0, lambda: now[0])
        >>> round(budget.of("What it learns"))  # its share, and that of the panel before it, which took nothing
        43
        >>> now[0] = 50.0  # a panel took longer than was thought: the others keep their shares
        >>> round(budget.of("Linear or not")), round(budget.of("Tangent kernel"))
        (50, 20)
    """

    seconds: float
    clock: Callable[[], float]
    began: float = field(default=0.0)

    @classmethod
    def start(cls, minutes: float, on_gpu: bool) -> "Budget":
        """A budget whose clock begins now."""
        clock = time.perf_counter if on_gpu else time.process_time
        return cls(60 * minutes, clock, clock())

    def of(self, title: str) -> float:
        """Seconds that the panel may take: its share, or all that is left without the shares of the panels after it."""
        titles = list(SHARES)
        later = sum(SHARES[each] for each in titles[titles.index(title) + 1 :])
        left = self.seconds - (self.clock() - self.began)
        return max(SHARES[title] * self.seconds, left - later * self.seconds)
