"""One row of what a probe saw, and where rows are kept: a folder, from which a killed run goes on, and TensorBoard.

records.jsonl       a header, then one record per line, flushed as it is written
init.safetensors    the network at the start
state.safetensors   the network at the last measurement (if a metric needs it) and the counters; replaced whole
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from biascope.support.errors import CorruptError, InputError, UnsupportedError
from biascope.support.files import explain_write_errors, read_tensors, write_tensors, write_text
from biascope.support.signatures import checked
from biascope.support.tables import facts

State = dict[str, Tensor]


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


def state_of(model: nn.Module) -> State:
    """All parameters and buffers by name, as they are (not copied)."""
    return {k: t.detach() for k, t in (*model.named_parameters(), *model.named_buffers())}


def fill(target: nn.Module, source: State, what: str) -> None:
    """Copy tensors into a module, by name; what does not fit is named."""
    own = state_of(target)
    odd = [k for k in own.keys() | source.keys() if k not in own or k not in source or own[k].shape != source[k].shape]
    if odd:
        raise InputError(f"{what} and the network the probe was made with differ in '{min(odd)}'")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(source[name])


class Folder:
    """The folder of one run."""

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        self.path, self.header = Path(path), header
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None

    @property
    def records(self) -> Path:
        """The file of records."""
        return self.path / "records.jsonl"

    def resume(self) -> list[Record]:
        """Records of an earlier run of the same probe (none if it is new); a half-written line is dropped."""
        if not (self.path / "init.safetensors").exists():
            if self.records.exists():
                raise InputError(f"{self.path} holds records of something else: choose another folder for out=")
            return []
        found: list[Record] = []
        text = self.records.read_text(encoding="utf-8") if self.records.exists() else ""
        line, whole, _ = text.partition("\n")
        if whole:
            before, now = json.loads(line), self.header
            differ = [key for key in ("metrics", "examples", "seed", "schedule") if before.get(key) != now[key]]
            if differ:
                has = f"a run with {differ[0]} {before.get(differ[0])!r}, this one has {now[differ[0]]!r}"
                raise InputError(f"{self.path} holds {has}: choose another folder for out=")
            found = read_records(self.records)
        write_text(self.records, "".join([to_line(self.header), *(to_line(r.as_dict()) for r in found)]))
        return found

    def write(self, row: dict[str, Any]) -> None:
        """Append one line; it is in the hands of the operating system when this returns."""
        if self._file is None:
            self._file = self.records.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._file.write(to_line(self.header))
        self._file.write(to_line(row))
        self._file.flush()

    def save(self, name: str, state: State, about: dict[str, Any]) -> None:
        """Write tensors and a description, whole or not at all."""
        write_tensors(self.path / f"{name}.safetensors", state, {"probe": json.dumps(about)})

    def load(self, name: str) -> tuple[State, dict[str, Any]]:
        """What `save` wrote."""
        path = self.path / f"{name}.safetensors"
        try:
            tensors, metadata = read_tensors(path)
            return tensors, json.loads(metadata["probe"])
        except (CorruptError, KeyError, ValueError) as error:
            raise CorruptError(f"{path} is not the state of a probe; delete {self.path} to start again") from error

    def close(self) -> None:
        """Close the file of records."""
        if self._file is not None:
            self._file.close()
            self._file = None


def writer_of(tensorboard: Any) -> Any:
    """A SummaryWriter from a folder or from a writer (anything with `add_scalar`)."""
    if hasattr(tensorboard, "add_scalar"):
        return tensorboard
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError("tensorboard=... needs the tensorboard package: pip install tensorboard") from error
    return SummaryWriter(str(tensorboard))


def write_scalars(writer: Any, record: Record) -> None:
    """Write the finite values of a record as probe/<name>, and the loss."""
    numbers = {**record.values} if record.loss is None else {"loss": record.loss, **record.values}
    for name, value in numbers.items():
        if math.isfinite(value):
            writer.add_scalar(f"probe/{name}", value, record.step)
