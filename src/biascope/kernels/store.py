"""The folder of a kernel on disk, which several processes fill at once.

    kernel.json    what is being computed, and how it is cut into tiles
    values.npy     the array, memory-mapped
    tiles.jsonl    one line per finished tile with its checksum, written after the tile is on disk
    parcels/       tiles that are on their way into the array
    claims/        who is at work on what

The array and the list of tiles are written by one process at a time, the one that has the claim `array`: two machines
that write neighbouring bytes of one file would overwrite each other's. Who finds that claim taken leaves the tile as a
file in `parcels/`, and whoever has it next moves it on. A killed process leaves at most an unlisted tile or a parcel.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.kernels.plan import MIRRORED, region
from biascope.support.claims import LEASE, Claims
from biascope.support.errors import CorruptError, InputError
from biascope.support.files import (
    TEMPORARY,
    append_line,
    explain_read_errors,
    explain_write_errors,
    make_array,
    mend_tail,
    read_tensors,
    write_json,
    write_tensors,
)

FORMAT = "biascope-tiles-1"
FREE = ("side", "budget", "sample", "error")  # of kernel.json: what may differ between two calls for one kernel
PAUSE = 0.2  # seconds between two looks at what the others do
Place = tuple[int, int]  # the first row and column of a tile


class Store:
    """The folder of one kernel."""

    def __init__(self, path: Path, config: dict[str, Any], lease: float = LEASE) -> None:
        self.path, self.config = path, config
        self.claims = Claims(path / "claims", lease)
        self.array = path / "values.npy"
        self.log = path / "tiles.jsonl"
        self.parcels = path / "parcels"
        self.done: dict[Place, str] = {}
        self.read = 0  # bytes of the log
        self.verified = False  # since this object was made

    # ---- opening ----

    @staticmethod
    @contextmanager
    def join(path: Path, config: dict[str, Any], cut: dict[str, Any], lease: float = LEASE) -> Iterator[Store]:
        """Make the folder, or help in one that holds the same computation; `cut` is how a new one is cut."""
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: a kernel is stored in a folder")
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        store = Store(path, config, lease)
        begun = {"claims", "values.npy", "values.npy.new"}
        with store.claims:
            while not (path / "kernel.json").exists():
                there = [file.name for file in path.iterdir()]
                foreign = [name for name in there if name not in begun and not name.startswith(TEMPORARY)]
                if foreign and not (path / "kernel.json").exists():
                    raise InputError(f"{path} is not empty and holds no kernel: choose another folder")
                if store.claims.take("folder"):
                    if not (path / "kernel.json").exists():
                        _make(path, config | cut)
                    store.claims.release("folder", done=True)
                else:
                    sleep(PAUSE)
            store.config = _same(path, config)
            store.look()
            store.verified = False  # by this call, before it ends
            yield store
        with suppress(OSError):
            store.parcels.rmdir()  # empty when all is done

    @staticmethod
    def open(path: Path) -> Store:
        """A folder to read; every tile's checksum is that of the list when `damaged` finds none."""
        store = Store(path, read_config(path))
        store.look()
        return store

    # ---- what there is ----

    def look(self) -> None:
        """Read what was added to the list of tiles since the last look."""
        if not self.log.exists():
            return
        with explain_read_errors(self.log), self.log.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]  # the last line may still be on its way, or torn
        self.read += len(new)
        for line in new.splitlines():
            try:
                entry = json.loads(line)
                if "verified" in entry:
                    self.verified = True
                elif entry["checksum"] is None:  # found damaged
                    self.done.pop((entry["row"], entry["col"]), None)
                else:
                    self.done[entry["row"], entry["col"]] = entry["checksum"]
            except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
                continue  # a line of a killed process

    @property
    def places(self) -> list[Place]:
        """All tiles; of a symmetric kernel only the upper ones."""
        side = int(self.config["side"])
        n1, n2 = self._examples()
        return [(i, j) for i in range(0, n1, side) for j in range(i if self.config["symmetric"] else 0, n2, side)]

    @property
    def missing(self) -> list[Place]:
        """Tiles that are not in the array."""
        return [place for place in self.places if place not in self.done]

    def slices(self, place: Place) -> tuple[slice, slice]:
        """Examples of a tile."""
        side, (n1, n2) = int(self.config["side"]), self._examples()
        return slice(place[0], min(place[0] + side, n1)), slice(place[1], min(place[1] + side, n2))

    def damaged(self) -> list[Place]:
        """Listed tiles whose values on disk are not those that were written."""
        array = np.lib.format.open_memmap(self.array, mode="r")
        return [place for place, checksum in self.done.items() if checksum != _checksum(array[self._region(place)])]

    def values(self) -> Tensor:
        """The array as a tensor that reads from disk; writing to it does not change the file."""
        return torch.from_numpy(np.load(self.array, mmap_mode="c"))

    # ---- work ----

    def work(self, wait: bool = True) -> Iterator[Place]:
        """Tiles for this process to compute and `deliver`, until all are in the array and their checksums are right.

        Without `wait` it ends when all tiles are done or in the hands of others.
        """
        while True:
            self.look()
            if self._waiting():
                self._collect()
            missing = self.missing
            if not missing:
                if self.verified or self._verify():
                    return
            else:
                ready = {file.stem for file in self._waiting()}
                name = next((n for n in map(_name, missing) if n not in ready and self.claims.take(n)), None)
                if name is not None:
                    place = _place(name)
                    self.look()
                    if place not in self.done and not self._parcel(place).exists():  # else it was finished just now
                        yield place
                    self.claims.release(name, done=place in self.done or self._parcel(place).exists())
                    continue
            if not wait:
                return
            sleep(PAUSE)

    def deliver(self, tile: Tensor, place: Place) -> None:
        """Put a tile (and its mirror image) into the array, or hand it to the process that writes there."""
        values = tile.detach().cpu()
        if self.claims.take("array"):
            self._enter({place: values.numpy()})
            self.claims.release("array", done=True)
        else:
            write_tensors(self._parcel(place), {"tile": values}, {"checksum": _checksum(values.numpy())})

    def note_error(self, error: float | None) -> None:
        """Write down the measured error, for those who open the folder."""
        if error is not None:
            self.config = self.config | {"error": error}
            write_json(self.path / "kernel.json", self.config)

    # ---- inside ----

    def _examples(self) -> tuple[int, int]:
        s = self.config["shape"]
        return (s[1], s[3]) if self.config["mode"] == "full" else (s[-2], s[-1])

    def _region(self, place: Place) -> Any:
        return region(self.config["mode"], *self.slices(place))

    def _parcel(self, place: Place) -> Path:
        return self.parcels / f"{_name(place)}.safetensors"

    def _waiting(self) -> list[Path]:
        return [file for file in self.parcels.glob("*.safetensors") if not file.name.startswith(TEMPORARY)]

    def _enter(self, tiles: dict[Place, Any]) -> None:
        """Write tiles into the array and list them; only with the claim `array`."""
        array = np.lib.format.open_memmap(self.array, mode="r+")  # anew: another machine may have written there
        for place, values in tiles.items():
            array[self._region(place)] = values
            if self.config["symmetric"] and place[0] != place[1]:
                array[self._region((place[1], place[0]))] = values.transpose(MIRRORED[self.config["mode"]])
        array.flush()
        self._list({"row": p[0], "col": p[1], "checksum": _checksum(values)} for p, values in tiles.items())

    def _list(self, lines: Any) -> None:
        self.look()
        if self.log.exists() and self.log.stat().st_size > self.read:  # a killed process left half a line
            mend_tail(self.log)
        for line in lines:
            append_line(self.log, line)
        with self.log.open("rb") as file:
            os.fsync(file.fileno())
        self.look()

    def _collect(self) -> None:
        """Move parcels into the array, if nobody else is about to."""
        if not self.claims.take("array"):
            return
        self.look()
        for file in self._waiting():
            place = _place(file.stem)
            if place not in self.done:
                with suppress(CorruptError):  # what is not whole is computed again
                    tensors, said = read_tensors(file)
                    if said.get("checksum") == _checksum(tensors["tile"].numpy()):
                        self._enter({place: tensors["tile"].numpy()})
            file.unlink(missing_ok=True)
        self.claims.release("array", done=True)

    def _verify(self) -> bool:
        """Compare all checksums, unless somebody else is about to; True if the kernel is whole."""
        if not self.claims.take("array"):
            return False
        self.look()
        if self.verified or self.missing:  # by another one just now
            self.claims.release("array", done=True)
            return self.verified
        damaged = self.damaged()
        lines = [{"row": r, "col": c, "checksum": None} for r, c in damaged] or [{"verified": len(self.done)}]
        self._list(lines)
        self.claims.release("array", done=True)
        return not damaged


def read_config(path: Path) -> dict[str, Any]:
    """What a folder's `kernel.json` says."""
    try:
        config: dict[str, Any] = json.loads((path / "kernel.json").read_text())
        if config["format"] != FORMAT:
            raise KeyError("format")
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a biascope kernel folder: kernel.json is missing or unreadable") from error
    return config


def _same(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What a folder says, if it is of the same kernel."""
    old = read_config(path)
    for key, value in config.items():
        if key not in old:
            raise InputError(
                f"{path} does not say which {key} its kernel has, so it cannot be resumed: choose another folder"
            )
        if key not in FREE and old[key] != value:
            raise InputError(
                f"{path} holds another kernel: its {key} is {old[key]!r}, not {value!r}. Choose another folder"
            )
    return old


def _make(path: Path, config: dict[str, Any]) -> None:
    """Fill an empty folder; `kernel.json` comes last: a folder that has it is complete."""
    temporary = path / "values.npy.new"
    try:
        make_array(temporary, np.dtype(config["dtype"]), tuple(config["shape"]))
        temporary.rename(path / "values.npy")
    except OSError as error:
        raise InputError(f"cannot write a kernel to {path}: {error}") from error
    write_json(path / "kernel.json", config)


def _name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def _place(name: str) -> Place:
    row, _, column = name.partition("-")
    return int(row), int(column)


def _checksum(values: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
