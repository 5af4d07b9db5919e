"""A run folder: everything one execution of a study needs to be resumed, checked and shown.

biascope-run.json   marks the folder and its format version
config.json         what was asked for; a resumed run must ask for the same
environment.json    versions, device, git state, seed, command line, start time
networks.json       what the user's own networks look like, where options name some
metrics.jsonl       one line per `run.log(...)`, on disk as soon as the call returns
arrays/             one safetensors file per `run.save_arrays(...)` or `run.cached(...)`
result.json         the numbers, once the study has finished
figures/            PNG, SVG, PDF
index.html          the page
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import numpy as np
import torch

from biascope.studies import environment
from biascope.support import files
from biascope.support.bars import progress
from biascope.support.claims import Claims
from biascope.support.errors import BiascopeError, CorruptError, InputError
from biascope.support.executors import Failure, current

FORMAT = 1
MARKER = "biascope-run.json"
NETWORKS = "networks.json"
NAMED = ("config.json", "environment.json", NETWORKS, MARKER)  # what a run that has stored nothing may hold,
FOLDERS = ("arrays", "figures")  # beside these, which are empty then
PAUSE = 0.2  # seconds between two looks at what another process computes
ABANDONED = 600.0  # seconds without a write after which a temporary file is abandoned
WAYS_OUT = {  # of a file that is damaged or missing
    MARKER: f'if all else is there, write {{"format": {FORMAT}}} into it',
    "config.json": "put it back from a copy (a run of the same command into another folder has the same; "
    "environment.json holds the command), or start a new run",
    "environment.json": "put it back from a copy, or write {} into it: no result depends on it",
    "result.json": "put it back from a copy, or delete it and resume the run: what is in arrays/ is not computed again",
    "metrics.jsonl": "delete that line, or the file, and go on: results rest on arrays/, which stay as they are",
}
Item = TypeVar("Item")
Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = torch.Tensor | Scalar


@dataclass(frozen=True)
class Run:
    """An open run folder. Make one with `Run.create`, go on with `Run.resume`, look at one with `Run.open`.

    Example:
        >>> import tempfile
        >>> run = Run.create(Path(tempfile.mkdtemp()) / "r", {"study": "demo", "seed": 0})
        >>> run.cached("a", lambda: {"x": torch.ones(2), "loss": 0.5})["loss"]
        0.5
        >>> run.log(step=1, loss=0.5); Run.open(run.path).metrics()[0]["loss"]
        0.5
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]

    # ---- opening ----

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> "Run":
        """Make a new run folder; the path must not exist yet, or be an empty folder."""
        path = Path(path)
        kept: dict[str, Any] = json.loads(_json("the configuration", dict(config)))  # what a reader will get back
        described = environment.describe(kept.get("device", "cpu"), kept.get("seed"))
        with _beginning(path):
            there = path.exists()
            if there and (not path.is_dir() or any(path.iterdir())):
                hint = f"resume it with `biascope run --resume {path}`, or " if (path / MARKER).exists() else ""
                raise InputError(f"{path} exists already: {hint}choose another folder")
            try:
                for folder in FOLDERS:
                    (path / folder).mkdir(parents=True, exist_ok=True)
                files.write_json(path / "config.json", kept)
                files.write_json(path / "environment.json", described)
                files.write_json(path / MARKER, {"format": FORMAT})  # last: a folder with the marker is whole
            except BaseException:
                _clear(path, itself=not there)  # half a folder would be in the way of the next try
                raise
        return cls(path, kept, described)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open a folder to read it; a corrupt or foreign one is refused, with the name of the file that is wrong."""
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path} is not a folder")
        with files.explain_read_errors(path):  # a folder that may not be entered
            marked = (path / MARKER).exists()
        if not marked:
            raise CorruptError(f"{path} is not a biascope run folder: it has no {MARKER}")
        marker = _read_json(path / MARKER)
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            found = marker.get("format") if isinstance(marker, dict) else marker
            raise CorruptError(f"{path / MARKER}: format {found!r}, this version of biascope reads format {FORMAT}")
        parts = {}
        for name in ("config.json", "environment.json"):
            parts[name] = _read_json(path / name)
            if not isinstance(parts[name], dict):
                raise CorruptError(f"{path / name} should hold a JSON object; {WAYS_OUT[name]}")
        run = cls(path, parts["config.json"], parts["environment.json"])
        run.metrics()  # a damaged line is reported now, not after hours
        return run

    @classmethod
    def resume(cls, path: str | Path, config: Mapping[str, Any] | None = None) -> "Run":
        """Open a folder to go on with it. `config`, when given, must equal the stored one: a changed key is named."""
        run = cls.open(path)
        if config is not None:
            check_same_config(run.config, json.loads(_json("the configuration", dict(config))), run.path)
        for leftover in run.path.rglob(f"{files.TEMPORARY}*"):
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > ABANDONED:  # else another process may be writing it
                    leftover.unlink()
        files.mend_tail(run.path / "metrics.jsonl")
        return run if run.finished else run._going_on()

    def _going_on(self) -> "Run":
        """The run, with a note in `environment.json` and a warning where code or device are others than before."""
        earlier = self.environment.get("resumed")
        earlier = earlier if isinstance(earlier, list) else []
        now = environment.describe(self.device, self.seed)
        changed = environment.differences(earlier[-1] if earlier else self.environment, now)
        if not changed:
            return self
        if self.bare:  # nothing was computed then
            noted = now
        else:
            warnings.warn(
                f"{self.path} goes on with other code or another device ({'; '.join(changed)}): what is in arrays/ "
                "stays as it was computed then. Start a new run if that matters",
                stacklevel=3,
            )
            kept = {key: now[key] for key in (*environment.MADE_WITH, "started")}
            noted = {**self.environment, "resumed": [*earlier, kept]}
        files.write_json(self.path / "environment.json", noted)
        return Run(self.path, self.config, noted)

    # ---- what a study sees of its configuration ----

    @property
    def seed(self) -> int:
        """The seed asked for (0 if none was)."""
        return int(self.config.get("seed") or 0)

    @property
    def device(self) -> str:
        """The device asked for."""
        return str(self.config.get("device", "cpu"))

    @property
    def finished(self) -> bool:
        """Whether the study has written its result."""
        return (self.path / "result.json").exists()

    @property
    def bare(self) -> bool:
        """Whether the folder holds nothing but what the run was made with: no array, line, figure or result."""
        held = {file.relative_to(self.path).as_posix() for file in self.path.rglob("*")}
        return held <= {*NAMED, *FOLDERS}

    def discard(self) -> bool:
        """Remove the folder if it is bare, and never anything else; whether that was done.

        Example:
            >>> import tempfile
            >>> run = Run.create(Path(tempfile.mkdtemp()) / "r", {"seed": 0})
            >>> run.discard(), run.path.exists()
            (True, False)
        """
        return self.bare and _clear(self.path, itself=True)

    # ---- metrics ----

    def log(self, **metrics: Value) -> None:
        """Append one line of numbers to `metrics.jsonl`; it is on disk when this returns."""
        line = {"time": round(time.time(), 3)} | {key: _without_nan(_plain(value)) for key, value in metrics.items()}
        files.append_line(self.path / "metrics.jsonl", line)

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`."""
        path = self.path / "metrics.jsonl"
        with way_out(path):
            return files.read_lines(path)

    # ---- arrays ----

    def save_arrays(self, name: str, **tensors: torch.Tensor | np.ndarray[Any, Any]) -> Path:
        """Store tensors or arrays under a name; replaces an earlier one of that name in one step."""
        return self._write(name, {key: torch.as_tensor(value) for key, value in tensors.items()}, {})

    def load_arrays(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors stored under a name, on the CPU."""
        return self._read(name)[0]

    def arrays(self) -> list[str]:
        """The names of everything stored in `arrays/`."""
        return sorted(unquote(file.stem) for file in (self.path / "arrays").glob("*.safetensors"))

    # ---- resumable jobs ----

    def cached(self, key: str, compute: Callable[[], Mapping[str, Value]]) -> dict[str, Value]:
        """The value of `compute()`, a dict of tensors and scalars: computed once, then read from disk when resumed.

        Where several processes go on with one folder, one of them computes it and the others wait.
        """
        if not self._file(key).exists():
            with Claims(self.path / "claims") as claims:
                while not self._computed(claims, key, compute):
                    time.sleep(PAUSE)
        found, stored = self._read(key)  # also the first time: both ways give the same bits
        return {**found, **stored}

    def cached_each(
        self, key: str, items: Iterable[Item], compute: Callable[[Item], Mapping[str, Value]]
    ) -> list[dict[str, Value]]:
        """`cached` for every item (seed, piece, ...): `compute(item)`, stored under the key and the item.

        The items do not depend on one another: under `execute(run, executor=...)` they are done side by side, and so
        they are where several processes go on with one folder: each takes the next that nobody has.
        """
        there = current()
        if there is not None:
            items = list(items)
            missing = [item for item in items if not self._file(f"{key} {item}").exists()]
            for index, outcome in progress(there.map(compute, missing), key, total=len(missing)):
                if isinstance(outcome, Failure):
                    raise outcome.error
                self.cached(f"{key} {missing[index]}", partial(dict, outcome))
        seen = list[Item]()
        with Claims(self.path / "claims") as claims:
            for item in items:
                self._computed(claims, f"{key} {item}", partial(compute, item))
                seen.append(item)
        return [self.cached(f"{key} {item}", partial(compute, item)) for item in seen]

    def cached_together(
        self, keys: Sequence[str], compute: Callable[[list[str]], Iterable[Mapping[str, Value]]], most: int
    ) -> list[dict[str, Value]]:
        """`cached` for every key, where one call computes several: `compute(keys)`, at most `most` of them at a time.

        What is on disk is not asked for. Where several processes go on with one folder, each takes what nobody has.
        """
        with Claims(self.path / "claims") as claims:
            while left := [key for key in keys if not self._file(key).exists()]:
                mine = list(islice((key for key in left if claims.take(_claim(key))), most))
                if not mine:
                    time.sleep(PAUSE)
                for key, value in zip(mine, compute(mine) if mine else (), strict=True):
                    self._computed(claims, key, partial(dict, value))
        return [{**tensors, **scalars} for tensors, scalars in map(self._read, keys)]

    # ---- inside ----

    def _computed(self, claims: Claims, key: str, compute: Callable[[], Mapping[str, Value]]) -> bool:
        """Is the value on disk now, computed here or elsewhere? False while another process is at it."""
        claim = _claim(key)
        if self._file(key).exists() or not claims.take(claim):
            return self._file(key).exists()
        if not self._file(key).exists():  # nobody has finished it since
            value = compute()
            tensors = {name: item.detach() for name, item in value.items() if isinstance(item, torch.Tensor)}
            scalars = {name: item for name, item in value.items() if not isinstance(item, torch.Tensor)}
            self._write(key, tensors, scalars)
        claims.release(claim, done=True)
        return True

    def _file(self, name: str) -> Path:
        return self.path / "arrays" / f"{quote(name, safe=' =+,')}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> Path:
        path = self._file(name)
        scalars = {key: _plain(value) for key, value in scalars.items()}
        metadata = {"scalars": _json(f"the scalars of {name!r}", scalars)}
        files.write_tensors(path, tensors, metadata)
        return path

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        path = self._file(name)
        if not path.exists():
            raise InputError(f"{self.path} has no arrays named {name!r}; it has {', '.join(self.arrays()) or 'none'}")
        try:
            tensors, metadata = files.read_tensors(path)
            return tensors, json.loads(metadata.get("scalars", "{}"))
        except (CorruptError, ValueError) as error:
            raise CorruptError(f"{path} is damaged ({error}); delete it and resume to compute it again") from error


def _claim(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _clear(path: Path, itself: bool) -> bool:
    """Remove what `Run.create` makes, and the folder itself if asked for; whether that could be done."""
    try:
        for name in NAMED:
            (path / name).unlink(missing_ok=True)
        for folder in (*(path / name for name in FOLDERS), *([path] if itself else [])):
            if folder.exists():
                folder.rmdir()  # takes empty folders only
    except OSError:
        return False  # no error of its own: the caller has one already
    return True


@contextmanager
def _beginning(path: Path) -> Iterator[None]:
    """Say of a folder that cannot be made or filled what to do: there is nothing yet that could be resumed."""
    try:
        yield
    except (OSError, BiascopeError) as error:
        if isinstance(error, InputError):
            raise
        cause = error.__cause__ if isinstance(error, BiascopeError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise BiascopeError(
            f"cannot begin a run in {path}: {reason}. Nothing was computed: choose another folder (--out FOLDER), or "
            "make room there (or fix the permissions) and start again."
        ) from error


def _read_json(path: Path) -> Any:
    with way_out(path):
        return files.read_json(path)


@contextmanager
def way_out(path: Path) -> Iterator[None]:
    """Say of a damaged file of a run what to do about it."""
    try:
        yield
    except CorruptError as error:
        if path.is_dir():
            raise  # says it already
        raise CorruptError(f"{error}; {WAYS_OUT[path.name]}") from error


def check_same_config(stored: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> None:
    """Refuse to resume with another configuration; every changed key is named, nested ones as `options.sigma`."""
    before, now = _flatten(stored), _flatten(asked)
    changed = [
        f"{key} ({before.get(key, 'absent')!r} stored, {now.get(key, 'absent')!r} asked)"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, ...) != now.get(key, ...)
    ]
    if changed:
        raise InputError(
            f"{path} was started with another configuration: {'; '.join(changed)}. Start a new run instead."
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    """One-element tensors and NumPy scalars as Python numbers."""
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value


def _without_nan(value: Any) -> Any:
    """nan and infinities as strings, for readers of JSON that do not know them."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=True)
    except TypeError as error:
        raise InputError(f"{what} must hold only numbers, strings, lists and dicts: {error}") from error
