"""Features of training examples in a folder: memory-mapped, with a checksum per part, continued where it was cut off.

influence.json   whose features these are: network, metric, damping, seed, and how the data is cut
features.npy     [n, dim], memory-mapped
parts.jsonl      a line per finished part with its place, its checksum and that of its inputs and labels
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from biascope.support.errors import CorruptError, InputError
from biascope.support.files import (
    append_line,
    explain_write_errors,
    make_array,
    mend_tail,
    read_json,
    read_lines,
    write_json,
)

FORMAT = "biascope-influence-3"


class FeatureStore:
    """The folder; `path` None: in memory, nothing is kept."""

    def __init__(self, path: Path | None, n: int, dim: int, dtype: torch.dtype, config: dict[str, Any]) -> None:
        self.path, self.done = path, dict[int, dict[str, Any]]()
        kind = "float64" if dtype == torch.float64 else "float32"
        config = {"format": FORMAT, "n": n, "dim": dim, "dtype": kind, **config}
        self.step = int(config["step"])
        if path is None:
            self.array: Any = np.zeros((n, dim), kind)
            return
        file, said = path / "features.npy", path / "influence.json"
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            if said.exists():
                self.step = self._compare(read_json(said), config)
            elif any(path.iterdir()):
                raise InputError(f"{path} is not empty and holds no features: choose another folder")
            else:
                make_array(file, kind, (n, dim))
                write_json(said, config)
        try:
            self.array = np.lib.format.open_memmap(file, "r+")
        except (OSError, ValueError) as e:
            raise CorruptError(f"{file} is damaged ({e}): delete the folder and compute it again") from e
        if self.array.shape != (n, dim):
            raise CorruptError(f"{file} has shape {self.array.shape}, not {(n, dim)}: delete the folder")
        mend_tail(path / "parts.jsonl")
        for line in read_lines(path / "parts.jsonl") if (path / "parts.jsonl").exists() else []:
            if crc32(self.array[line["start"] : line["stop"]].tobytes()) == line["checksum"]:
                self.done[line["start"]] = line  # others are computed again

    def _compare(self, theirs: dict[str, Any], mine: dict[str, Any]) -> int:
        """An error that names what differs; else how the data was cut."""
        differ = [k for k in mine if k != "step" and theirs.get(k) != mine[k]]
        if differ:
            k = differ[0]
            raise InputError(f"{self.path} holds features of another {k} ({theirs.get(k)!r}, not {mine[k]!r})")
        return int(theirs["step"])

    def has(self, start: int, stop: int, data: int) -> bool:
        """Is this part there? An error if it is of other data."""
        line = self.done.get(start)
        if line is None or line["stop"] != stop:
            return False
        if line["data"] != data:
            raise InputError(f"{self.path} holds features of other data: examples {start} to {stop - 1} differ")
        return True

    def put(self, start: int, features: Tensor, data: int) -> None:
        """Write a part, then its line; what a power cut leaves out is found by the checksum."""
        values = features.detach().cpu().numpy()
        stop = start + len(values)
        self.array[start:stop] = values
        if self.path is None:
            return
        line = {"start": start, "stop": stop, "checksum": crc32(values.tobytes()), "data": data}
        append_line(self.path / "parts.jsonl", line)
        self.done[start] = line

    def rows(self, some: slice | np.ndarray[Any, Any]) -> Tensor:
        """Features of some examples."""
        return torch.from_numpy(np.array(self.array[some]))
