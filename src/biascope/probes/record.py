"""One row of what a probe saw, and the file such rows are kept in."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from biascope.errors import CorruptError, InputError
from biascope.signatures import checked
from biascope.tables import facts


@dataclass(frozen=True)
class Record:
    """What was measured at one moment of training.

    Attributes:
        step: number of optimiser steps taken.
        loss: training loss, smoothed as the schedule smooths it; None where none was given (step 0).
        raw_loss: the loss as given.
        epoch: number of epochs, where known.
        threshold: the lowest threshold of a loss schedule that the loss has crossed.
        elapsed: seconds since the probe was made.
        seconds: seconds this measurement took.
        skipped: True if it was due but left out to keep the overhead cap; `values` is empty then.
        values: {"metric" or "metric/part": number}.
        failed: {metric: why it has no value here}.

    Example:
        >>> Record(10, 0.5, values={"effective_rank": 3.0})["effective_rank"]
        3.0
    """

    step: int
    loss: float | None = None
    raw_loss: float | None = None
    epoch: float | None = None
    threshold: float | None = None
    elapsed: float = 0.0
    seconds: float = 0.0
    skipped: bool = False
    values: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """A value, or a field such as "loss"; NaN where there is none."""
        if name in self.values:
            return self.values[name]
        found = getattr(self, name, None) if name in MOMENTS else None
        return math.nan if found is None else float(found)

    def _repr_html_(self) -> str:
        """Everything measured at this step, for notebooks."""
        rows: dict[str, object] = {"loss": self.loss} if self.loss is not None else {}
        rows |= {"epoch": self.epoch} if self.epoch is not None else {}
        rows |= {"skipped": "to keep the overhead cap"} if self.skipped else {}
        rows |= self.values
        rows |= {name: f"no value: {why}" for name, why in self.failed.items()}
        return facts(f"Step {self.step}", rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain dict, as written to the file."""
        return asdict(self)

    @staticmethod
    def from_dict(row: dict[str, Any]) -> Record:
        """What `as_dict` came from; null is NaN."""
        names = {f.name for f in fields(Record)}
        kept = {k: v for k, v in row.items() if k in names}
        kept["values"] = {k: math.nan if v is None else float(v) for k, v in row.get("values", {}).items()}
        return Record(**kept)


MOMENTS = {"step", "loss", "raw_loss", "epoch", "threshold", "elapsed", "seconds"}  # fields that are numbers


def to_line(row: dict[str, Any]) -> str:
    """One line of JSON; NaN and infinities become null, which every JSON reader understands."""
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@checked
def read_records(path: str | Path) -> list[Record]:
    """Records from a `records.jsonl` (or the folder that holds it); a half-written last line is left out.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "records.jsonl").write_text(to_line(Record(3).as_dict()) + '{"step": 4')
        ...     [r.step for r in read_records(folder)]
        [3]
    """
    path = Path(path)
    path = path / "records.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"{path}: there is no such file of records")
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:  # no newline after it: the writer was killed
                continue
            raise CorruptError(f"{path}, line {number + 1} is not JSON: {error}") from error
        if "step" in row:
            rows.append(Record.from_dict(row))
    return rows
