"""What a probe leaves on disk: records as they come, and enough state to go on after a kill.

records.jsonl       a header, then one record per line, flushed as it is written
init.safetensors    the network at the start
state.safetensors   the network at the last measurement (if a metric needs it) and the counters; replaced whole
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from biascope.errors import CorruptError, InputError
from biascope.files import explain_write_errors, read_tensors, write_tensors, write_text
from biascope.probes.record import Record, read_records, to_line

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    """All parameters and buffers by name, as they are (not copied)."""
    return {k: t.detach() for k, t in (*model.named_parameters(), *model.named_buffers())}


def fill(target: nn.Module, source: State, what: str) -> None:
    """Copy tensors into a module, by name; what does not fit is named."""
    own = state_of(target)
    if own.keys() != source.keys():
        odd = sorted(own.keys() ^ source.keys())[0]
        where = "lacks" if odd in own else "has"
        raise InputError(f"{what} {where} a parameter or buffer '{odd}', unlike the network the probe was made with")
    with torch.no_grad():
        for name, t in own.items():
            given = source[name]
            if given.shape != t.shape:
                raise InputError(f"{what}: '{name}' has shape {list(given.shape)}, at the start {list(t.shape)}")
            t.copy_(given)


class Folder:
    """The folder of one run."""

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"out={path!r}: expected the path of a folder")
        self.path, self.header = Path(path), header
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"out: {self.path} is a file; records go into a folder")
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
        if self.records.exists():
            first = self.records.read_text(encoding="utf-8").partition("\n")
            if first[1]:
                self._check(first[0])
                found = read_records(self.records)
        write_text(self.records, "".join([to_line(self.header), *(to_line(r.as_dict()) for r in found)]))
        return found

    def _check(self, line: str) -> None:
        try:
            before = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorruptError(f"{self.records} does not begin with the header of a probe: {error}") from error
        for key in ("metrics", "examples", "seed", "schedule"):
            if before.get(key) != self.header[key]:
                raise InputError(
                    f"{self.path} holds a run with {key} {before.get(key)!r}, this one has {self.header[key]!r}: "
                    "choose another folder for out="
                )

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
            raise CorruptError(
                f"{path} is not the state of a probe ({error}); delete {self.path} to start again"
            ) from error

    def close(self) -> None:
        """Close the file of records."""
        if self._file is not None:
            self._file.close()
            self._file = None
