"""What a folder of probes, runs and pages holds at this moment, as plain data for `biascope watch`."""

import html
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from biascope.probes.records import read_records
from biascope.studies.runs import MARKER
from biascope.support.errors import BiascopeError

RECORDS = "records.jsonl"
POINTS = 400  # of one curve on the page; longer ones are thinned
DEEP = 6  # folders below the one that is watched


class Watched:
    """A folder that is looked at again and again; files that did not change are not read twice.

    Example:
        >>> import tempfile
        >>> Watched(Path(tempfile.mkdtemp())).state()["probes"]
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def state(self) -> dict[str, Any]:
        """{"probes": [...], "runs": [...], "pages": [...]}, the newest first."""
        found: dict[str, list[dict[str, Any]]] = {"probes": [], "runs": [], "pages": []}
        for path, names in _folders(self.folder):
            if RECORDS in names:
                found["probes"].append(self._entry(path / RECORDS, _probe))
            if MARKER in names:
                found["runs"].append(self._entry(path / _newest(path, names), _run, path))
            else:
                found["pages"] += [self._entry(path / name, _page) for name in names if name.endswith(".html")]
        for entries in found.values():
            entries.sort(key=lambda entry: -entry["changed"])
        return {"folder": str(self.folder), **found}

    def _entry(self, file: Path, read: Any, place: Path | None = None) -> dict[str, Any]:
        place = place or (file.parent if file.name == RECORDS else file)
        try:
            stat = file.stat()
        except OSError:  # gone since it was listed
            return {"name": _name(place, self.folder), "changed": 0.0, "problem": "it has just been removed"}
        mark = (stat.st_mtime_ns, stat.st_size)
        known = self._read.get(place)
        if known is None or known[0] != mark:
            try:
                content = read(place)
            except (OSError, ValueError, BiascopeError) as error:  # one damaged file must not hide the others
                content = {"problem": str(error)}
            known = self._read[place] = (mark, content)
        return {"name": _name(place, self.folder), "changed": stat.st_mtime, **known[1]}


def _name(place: Path, folder: Path) -> str:
    return place.relative_to(folder).as_posix()


def _folders(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every folder with the names of its files; hidden ones, links and what runs keep for themselves are left out."""
    for path, below, names in os.walk(folder):
        here = Path(path)
        if len(here.relative_to(folder).parts) >= DEEP or MARKER in names:
            below.clear()
        below[:] = [name for name in below if not name.startswith(".") and not (here / name).is_symlink()]
        yield here, [name for name in names if not name.startswith(".") and not (here / name).is_symlink()]


def _newest(path: Path, names: list[str]) -> str:
    """The file of a run that says most about its state."""
    for name in ("index.html", "result.json", "metrics.jsonl"):
        if name in names:
            return name
    return MARKER


def _probe(path: Path) -> dict[str, Any]:
    records = read_records(path)
    shown = [r for r in records if not r.skipped]
    curves: dict[str, list[list[float | None]]] = {}
    for record in shown:
        values = {"loss": record.loss} if record.loss is not None else {}
        for key, value in (values | record.values).items():
            curves.setdefault(key, []).append([record.step, _number(value)])
    return {
        "step": records[-1].step if records else 0,
        "skipped": len(records) - len(shown),
        "failed": shown[-1].failed if shown else {},
        "curves": {key: _thinned(points) for key, points in curves.items()},
    }


def _run(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    metrics: list[dict[str, Any]] = []
    if (path / "metrics.jsonl").exists():
        for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                metrics.append(json.loads(line))
            except json.JSONDecodeError:  # the line being written
                continue
    finished = (path / "result.json").exists()
    return {
        "study": config.get("study", ""),
        "size": config.get("size", ""),
        "seed": config.get("seed", 0),
        "finished": finished,
        "last": {key: value for key, value in (metrics[-1] if metrics else {}).items() if key != "time"},
        "page": finished and (path / "index.html").exists(),
    }


def _page(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(2000)
    _, found, rest = head.partition("<title>")
    return {"title": html.unescape(rest.partition("</title>")[0]) if found else path.stem}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _thinned(points: list[list[float | None]]) -> list[list[float | None]]:
    every = -(-len(points) // POINTS)
    return points[::every] if every == 1 else [*points[:-1:every], points[-1]]
