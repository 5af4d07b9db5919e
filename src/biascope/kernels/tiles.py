"""Kernels on disk: computed tile by tile into one memory-mapped array, each tile checksummed, resumable after a kill.

A folder holds `kernel.json` (what is being computed: shapes, and hashes of all that determines the kernel, which are
the differentiated parameters, the others and the buffers, by name, and the data), `values.npy` (the array,
memory-mapped) and `tiles.jsonl` (one line per finished tile with its checksum, written after the tile is on disk). A
killed run leaves at most one unlisted tile, which is computed again. Code has no hash that could be trusted: whether
the network and the output function are those of the folder is seen on a few of its entries, which are computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.kernels.empirical import LOSSY, Job, Outputs, cotangents, measure_error
from biascope.kernels.fingerprint import fingerprint, inputs_fingerprint
from biascope.kernels.kernel import Kernel
from biascope.kernels.plan import Strategy
from biascope.network.functional import Functional
from biascope.network.layers.blocks import Anatomy
from biascope.network.stream import anatomy
from biascope.support.bars import progress
from biascope.support.errors import CorruptError, InputError
from biascope.support.files import explain_write_errors
from biascope.support.inputs import Inputs, batch_size, take
from biascope.support.memory import budget as memory_budget
from biascope.support.precision import Precision, arithmetic
from biascope.support.signatures import checked

FORMAT = "biascope-tiles-1"
SAME = {"float64": 1e-8, "float32": 1e-3, "tf32": 0.1, "bf16": 0.1}  # relative; what rounding may do


def stored_ntk(
    f: Functional,
    one: Inputs,
    two: Inputs | None,
    outputs: Outputs,
    strategy: Strategy,
    precision: Precision,
    max_memory: str | int | None,
    path: Path,
    check: bool | None = None,
) -> Kernel:
    """Compute a kernel into a folder; finished tiles found there are checked and kept."""
    with arithmetic(precision):
        found = anatomy(f, one)
        mode, cot = cotangents(outputs, found.outputs)
        n1, n2 = batch_size(one), batch_size(one if two is None else two)
        k, limit = len(cot), memory_budget(max_memory, f.device)
        shape = {"full": (k, n1, k, n2), "trace": (n1, n2), "diagonal": (k, n1, n2)}[mode]
        side = max(1, math.isqrt(limit // 4 // (f.dtype.itemsize * math.prod(shape) // (n1 * n2))))
        side = -(-max(n1, n2) // -(-max(n1, n2) // side))  # equal tiles
        config = {
            "format": FORMAT,
            "shape": list(shape),
            "dtype": str(f.dtype).removeprefix("torch."),
            "mode": mode,
            "outputs": outputs,
            "symmetric": two is None,
            "precision": precision,
            "kind": "ntk",
            "model_outputs": found.outputs,
            "data": inputs_fingerprint(one, two),
            "parameters": fingerprint(f.params),
            "frozen": fingerprint(f.frozen),
        }
        store = Store.open(path, config, side)
        if store.done:
            r, c = store.slices(*min(store.done))
            _refuse_other_network(store, f, found, take(one, r), take(one if two is None else two, c), r, c)
        first = None
        for r, c in progress(store.missing(n1, n2), f"tiles of {path.name}", leave=False):
            same = two is None and r == c
            other = None if same else take(one if two is None else two, c)
            job = Job.make(f, found, take(one, r), other, outputs, strategy, precision, limit)
            first = first or job.plan
            store.write(job.run()[0], r, c)
        values = store.values()
        wanted = check if check is not None else precision in LOSSY
        error = measure_error(f, found, one, two, outputs, mode, values) if wanted else None
        store.note_error(error)
    return Kernel(values, outputs, mode, two is None, first, error, model_outputs=found.outputs)


def _refuse_other_network(
    store: Store, f: Functional, found: Anatomy, one: Inputs, two: Inputs, r: slice, c: slice
) -> None:
    """Raise if entries of a finished tile at rows r and columns c are not those of this network."""
    tile, mode = torch.from_numpy(np.array(store.array[store.region(r, c)])), store.config["mode"]
    error = measure_error(f, found, one, two, store.config["outputs"], mode, tile)
    if error > SAME[store.config["precision"]]:
        raise InputError(
            f"{store.path} holds another kernel: its entries are {error:.2g} (relative) from those of this network and "
            "output function. Choose another folder"
        )


@checked
def open_kernel(path: str | Path, verify: bool = True) -> Kernel:
    """Open a finished kernel on disk, memory-mapped; every tile's checksum is compared if `verify`.

    Example:
        >>> import tempfile, torch, biascope as bs
        >>> net = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = bs.ntk(net, torch.randn(4, 3), store=folder)
        ...     open_kernel(folder).tensor.shape
        torch.Size([4, 2, 4, 2])
    """
    path = Path(path)
    config = _read_config(path)
    n1, n2 = _examples(config)
    store = Store.open(path, config, int(config["side"]), verify)
    left = store.missing(n1, n2)
    if left:
        raise CorruptError(
            f"{path} holds an unfinished kernel: {len(left)} tiles are missing; run bs.ntk(..., store=) again"
        )
    known = {"error": config.get("error"), "model_outputs": config.get("model_outputs")}
    return Kernel(store.values(), config["outputs"], config["mode"], config["symmetric"], **known)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "kernel.json").read_text())
        if config["format"] != FORMAT:
            raise KeyError("format")
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a biascope kernel folder: kernel.json is missing or unreadable") from error
    return config


def _write_config(path: Path, config: dict[str, Any]) -> None:
    new = path / "kernel.json.new"
    new.write_text(json.dumps(config, indent=1))
    new.rename(path / "kernel.json")


def _examples(config: dict[str, Any]) -> tuple[int, int]:
    s = config["shape"]
    return (s[1], s[3]) if config["mode"] == "full" else (s[-2], s[-1])


class Store:
    """The folder of one kernel."""

    def __init__(self, path: Path, config: dict[str, Any], done: dict[tuple[int, int], str]) -> None:
        self.path, self.config, self.done = path, config, done
        self.array = np.lib.format.open_memmap(path / "values.npy", mode="r+")

    @staticmethod
    def open(path: Path, config: dict[str, Any], side: int, verify: bool = True) -> Store:
        """Make a new folder, or continue in one that holds the same computation."""
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: a kernel is stored in a folder")
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        if not (path / "kernel.json").exists():
            if any(path.iterdir()):
                raise InputError(f"{path} is not empty and holds no kernel: choose another folder")
            config = config | {"side": side}
            dtype = np.dtype(config["dtype"])
            try:
                free = os.statvfs(path)
                need = math.prod(config["shape"]) * dtype.itemsize
                if free.f_bavail * free.f_frsize < need:
                    raise InputError(f"{path}: the kernel needs {need:,} bytes, the disk has fewer free")
                temporary = path / "values.npy.new"
                array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=tuple(config["shape"]))
                array.flush()
                del array
                temporary.rename(path / "values.npy")
                _write_config(path, config)  # last: a folder with this file is complete
            except OSError as error:
                raise InputError(f"cannot write a kernel to {path}: {error}") from error
            return Store(path, config, {})
        old = _read_config(path)
        for key, value in config.items():
            if key != "side" and key not in old:
                raise InputError(
                    f"{path} does not say which {key} its kernel has, so it cannot be resumed: choose another folder"
                )
            if key != "side" and old[key] != value:
                raise InputError(
                    f"{path} holds another kernel: its {key} is {old[key]!r}, not {value!r}. Choose another folder"
                )
        done: dict[tuple[int, int], str] = {}
        log = path / "tiles.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            try:
                entry = json.loads(line)
                done[(entry["row"], entry["col"])] = entry["checksum"]
            except (json.JSONDecodeError, KeyError):
                continue  # the torn last line of a killed run
        store = Store(path, old, done)
        if verify:
            bad = [t for t, checksum in done.items() if store.checksum(*store.slices(*t)) != checksum]
            for t in bad:  # a tile damaged on disk is computed again
                del done[t]
        return store

    def slices(self, row: int, col: int) -> tuple[slice, slice]:
        """Examples of the tile that starts at (row, col)."""
        n1, n2 = _examples(self.config)
        side = int(self.config["side"])
        return slice(row, min(row + side, n1)), slice(col, min(col + side, n2))

    def missing(self, n1: int, n2: int) -> list[tuple[slice, slice]]:
        """Tiles that are not on disk yet; of a symmetric kernel only the upper ones."""
        side = int(self.config["side"])
        return [
            self.slices(i, j)
            for i in range(0, n1, side)
            for j in range(i if self.config["symmetric"] else 0, n2, side)
            if (i, j) not in self.done
        ]

    def region(self, r: slice, c: slice) -> Any:
        """Where a tile lies in the array."""
        return {"full": np.s_[:, r, :, c], "trace": np.s_[r, c], "diagonal": np.s_[:, r, c]}[self.config["mode"]]

    def checksum(self, r: slice, c: slice) -> str:
        """Checksum of a tile as it is on disk."""
        return hashlib.blake2b(
            np.ascontiguousarray(self.array[self.region(r, c)]).tobytes(), digest_size=16
        ).hexdigest()

    def write(self, tile: Tensor, r: slice, c: slice) -> None:
        """Write a tile (and its mirror image), then list it."""
        values = tile.cpu().numpy()
        self.array[self.region(r, c)] = values
        if self.config["symmetric"] and r != c:
            axes = {"full": (2, 3, 0, 1), "trace": (1, 0), "diagonal": (0, 2, 1)}[self.config["mode"]]
            self.array[self.region(c, r)] = values.transpose(axes)
        self.array.flush()
        entry = {"row": r.start, "col": c.start, "checksum": self.checksum(r, c)}
        with open(self.path / "tiles.jsonl", "a") as log:
            log.write(json.dumps(entry) + "\n")
            log.flush()
            os.fsync(log.fileno())
        self.done[(r.start, c.start)] = entry["checksum"]

    def note_error(self, error: float | None) -> None:
        """Write down the measured error, for those who open the folder."""
        if error is not None:
            self.config = self.config | {"error": error}
            _write_config(self.path, self.config)

    def values(self) -> Tensor:
        """The array as a tensor that reads from disk; writing to it does not change the file."""
        return torch.from_numpy(np.load(self.path / "values.npy", mmap_mode="c"))
