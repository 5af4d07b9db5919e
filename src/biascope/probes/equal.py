"""Two trainings compared at equal progress: where each first reached a loss, never at equal iteration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from biascope.probes.records import Record
from biascope.support.errors import InputError
from biascope.support.figures import once, pyplot
from biascope.support.signatures import checked
from biascope.support.tables import grid


@dataclass(frozen=True)
class Pair:
    """Both runs at one threshold."""

    threshold: float
    a: Record
    b: Record

    @checked
    def difference(self, name: str) -> float:
        """Value of a minus value of b."""
        return self.a[name] - self.b[name]


@dataclass(frozen=True)
class EqualProgress:
    """What `equal_progress` found: one `Pair` per threshold both runs reached, in the order of progress.

    `missed` are the thresholds that at least one run never reached.
    """

    by: str
    pairs: tuple[Pair, ...] = field(repr=False)
    missed: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def thresholds(self) -> list[float]:
        """Thresholds both runs reached."""
        return [pair.threshold for pair in self.pairs]

    @checked
    def column(self, name: str) -> tuple[list[float], list[float]]:
        """A value (such as "ntk_alignment" or "group_losses/noisy/loss") of run a and of run b at every threshold."""
        known = {key for pair in self.pairs for key in (*pair.a.values, *pair.b.values)}
        if self.pairs and name not in known and all(math.isnan(pair.a[name]) for pair in self.pairs):
            raise InputError(f"no record has a value {name!r}; there are {', '.join(sorted(known)) or 'none'}")
        return [pair.a[name] for pair in self.pairs], [pair.b[name] for pair in self.pairs]

    def table(self) -> list[dict[str, float]]:
        """Rows as dicts: threshold, step_a, step_b, and every value as name_a and name_b."""
        rows = []
        for pair in self.pairs:
            row = {"threshold": pair.threshold}
            for side, record in (("a", pair.a), ("b", pair.b)):
                row |= {f"step_{side}": float(record.step), f"loss_{side}": record["loss"]}
                row |= {f"{name}_{side}": value for name, value in record.values.items()}
            rows.append(row)
        return rows

    def _repr_html_(self) -> str:
        """Both runs at every threshold, for notebooks."""
        rows = self.table()
        names = list(dict.fromkeys(name for row in rows for name in row))
        title = f"Equal progress by {self.by}: {len(rows)} thresholds, {len(self.missed)} missed"
        return grid(title, names, [[row.get(name, "") for name in names] for row in rows])

    @checked
    def plot(self, name: str, ax: Any = None) -> Any:
        """A value of both runs against the threshold, progress to the right; returns the matplotlib figure."""
        if ax is None:
            _, ax = pyplot().subplots(figsize=(3.4, 2.6))
        one, two = self.column(name)
        ax.plot(self.thresholds, one, color="#0072B2", label="a")
        ax.plot(self.thresholds, two, color="#D55E00", label="b")
        if len(self.thresholds) > 1 and self.thresholds[0] > self.thresholds[-1]:
            ax.invert_xaxis()
        ax.set_xlabel(self.by)
        ax.set_ylabel(name)
        ax.legend(frameon=False)
        return once(ax.figure)


@checked
def equal_progress(
    a_records: Sequence[Record],
    b_records: Sequence[Record],
    thresholds: Sequence[float] | None = None,
    by: str = "loss",
    *,
    rising: bool | None = None,
    interpolate: bool = False,
) -> EqualProgress:
    """Pair two runs at equal loss (or equal clean loss, equal majority accuracy, ...).

    For each threshold each run gives the first record at which `by` is at or beyond it (its very first, if it starts
    beyond). With `interpolate`, values are interpolated linearly in `by` between the records before and after the
    crossing, so both runs stand exactly at the threshold.

    Args:
        a_records: of one run (`probe.records`), in the order of training.
        b_records: of the other.
        thresholds: values of `by`; None for those a loss schedule wrote into the records.
        by: "loss", or the name of a value, such as "group_losses/clean/loss".
        rising: whether progress means larger values; None: True for names that end in "accuracy".
        interpolate: whether to interpolate.

    Example:
        >>> fast = [Record(1, 0.9, values={"m": 1.0}), Record(2, 0.4, values={"m": 2.0})]
        >>> slow = [Record(1, 0.9, values={"m": 1.0}), Record(9, 0.5, values={"m": 7.0})]
        >>> both = equal_progress(fast, slow, [0.5])
        >>> both.pairs[0].a.step, both.pairs[0].b.step, both.pairs[0].difference("m")
        (2, 9, -5.0)
    """
    up = by.endswith("accuracy") if rising is None else rising
    a, b = _seen(a_records, by, "a_records"), _seen(b_records, by, "b_records")
    if thresholds is None:
        thresholds = sorted({r.threshold for r in (*a, *b) if r.threshold is not None}) if by == "loss" else []
        if not thresholds:
            raise InputError("the records hold no thresholds of a loss schedule; pass thresholds=[...]")
    pairs, missed = [], []
    for t in sorted(set(thresholds), reverse=not up):
        one, two = _reach(a, by, t, up, interpolate), _reach(b, by, t, up, interpolate)
        if one is None or two is None:
            missed.append(t)
        else:
            pairs.append(Pair(t, one, two))
    return EqualProgress(by, tuple(pairs), tuple(missed))


def _seen(records: Sequence[Record], by: str, what: str) -> list[Record]:
    found = [r for r in records if not r.skipped and not math.isnan(r[by])]
    if not found:
        raise InputError(f"{what}: none of {len(records)} records has {by!r}")
    return found


def _reach(records: list[Record], by: str, t: float, up: bool, interpolate: bool) -> Record | None:
    slack = 1e-8 * abs(t)  # thresholds are computed numbers
    for i, record in enumerate(records):
        if (record[by] >= t - slack) if up else (record[by] <= t + slack):
            return _between(records[i - 1], record, by, t) if interpolate and i else record
    return None


def _between(before: Record, after: Record, by: str, t: float) -> Record:
    w = (t - before[by]) / (after[by] - before[by])
    values = {k: before[k] + w * (v - before[k]) for k, v in after.values.items() if k in before.values}
    loss = None
    if before.loss is not None and after.loss is not None:
        loss = before.loss + w * (after.loss - before.loss)
    return replace(after, loss=loss, values=values)
