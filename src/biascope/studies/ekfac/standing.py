"""Who is ahead in a contest of optimisers, and what a reader must know to believe it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from biascope.studies.ekfac.contest import LEARNT, NAMES, Outcome
from biascope.studies.result import Estimate, Verdict


@dataclass(frozen=True)
class Standing:
    """Comparisons: won, lost, and those that test nothing (a rival that did not learn, or one seed); and the names of
    those a claim speaks of that did not take part, with whom nothing is compared.
    """

    won: list[str]
    lost: list[str]
    untested: list[str]
    absent: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Confirmed if all are won; not confirmed if one is lost."""
        if self.lost:
            return "not confirmed"
        return "confirmed" if self.won and not self.untested else "not tested"

    def __str__(self) -> str:
        parts = [
            f"Not lower by two standard errors: {'; '.join(self.lost)}." if self.lost else "",
            f"Not tested (one seed, or a rival that did not learn): {'; '.join(self.untested)}."
            if self.untested
            else "",
            f"Did not take part, and is not judged: {'; '.join(self.absent)}." if self.absent else "",
        ]
        return " ".join(filter(None, parts))


def compare(
    out: Outcome, mine: Sequence[str], rivals: Sequence[str], numbers: dict[str, Estimate], where: str = ""
) -> Standing:
    """Whose loss is lower by two standard errors of the paired difference, and whose is not.

    A rival that never learnt anything was badly tuned: being ahead of it shows nothing. Who did not take part is named.
    """
    standing = Standing([], [], [], [NAMES[name] for name in (*mine, *rivals) if name not in out.rows])
    for a, b in product(mine, rivals):
        if a not in out.rows or b not in out.rows:
            continue
        gap = Estimate.of([theirs - ours for ours, theirs in zip(out.final(a), out.final(b))])
        numbers[f"loss of {NAMES[b]} minus {NAMES[a]}{where}"] = gap
        if gap.standard_error is None or not (out.learnt(a) or out.learnt(b)):
            side = standing.untested
        elif gap.value <= 2 * gap.standard_error:
            side = standing.lost
        else:
            side = standing.won if out.learnt(b) else standing.untested
        side.append(f"{NAMES[a]} against {NAMES[b]}{where}")
    return standing


def remarks(out: Outcome) -> list[str]:
    """What a reader must know of the search, and of those who did not learn."""
    flat = [NAMES[name] for name in out.rows if not out.learnt(name)]
    return [
        searched(out),
        f"Not below {LEARNT:g} of the plateau ({out.plateau:.4g}, the best constant output): {', '.join(flat)}."
        if flat and math.isfinite(out.plateau)
        else "",
    ]


def searched(out: Outcome, where: str = "") -> str:
    """How many trainings each search took, and whose result is provisional."""
    spent = ", ".join(f"{NAMES[name]} {count}" for name, count in out.spent.items())
    parts = [
        f"Trainings of the search{where} (one rule for all): {spent}." if spent else "",
        f"Not surrounded by worse settings when the trials ran out: {', '.join(out.loose)}." if out.loose else "",
        f"Chosen by trials that had not left the plateau: {', '.join(out.blind)}." if out.blind else "",
    ]
    return " ".join(filter(None, parts))
