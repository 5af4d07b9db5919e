"""A finished run in the form that is committed: small, without anything private, still a run folder.

Kept: configuration, environment, result, small metrics, small arrays, and pictures that no chart can draw again. The
page and its charts are drawn from these (`write_pages`) and are not committed. Paths that are absolute or lead upwards
become file names, and the host's name is taken out.
"""

import json
import platform
import re
import shutil
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from biascope.reports.html import tag, write_look
from biascope.reports.study_page import changed_options, finished, write_study_page
from biascope.studies import Run
from biascope.studies.runs import MARKER
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.files import (
    TEMPORARY,
    explain_write_errors,
    read_bytes,
    read_json,
    write_bytes,
    write_json,
    write_text,
)
from biascope.support.signatures import checked

ARRAYS_LIMIT = 400_000  # bytes, the arrays kept, all together
METRICS_LIMIT = 150_000
DIGITS = 5  # of the numbers behind curves and maps; those that rules judge are kept whole
DPI = 150  # for a screen; print is drawn again from result.json
UNCOMMITTED = "uncommitted tree"
NETWORK_OPTIONS = ("net", "network", "architecture", "model", "nets")
_PATH = re.compile(r"(?<![\w./:])(?:/(?:[\w.+@%~-]+/)+|(?:\.\./)+(?:[\w.+@%~-]+/)*)([\w.+@%~-]+)")


@dataclass(frozen=True)
class Kept:
    """Where the committed form is, its size in bytes, and what was left out, in words."""

    path: Path
    size: int
    left_out: tuple[str, ...]

    def _repr_html_(self) -> str:
        """A link to the page, its size and what was left out, for notebooks."""
        link = tag("a", str(self.path), href=(self.path / "index.html").as_posix(), target="_blank")
        without = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return tag("p", "Kept: ", link, f" ({self.size / 1000:.0f} kB{without})")


@checked
def keep(
    run_folder: str | Path,
    into: str | Path = "reproductions",
    name: str = "",
    replace: bool = False,
    uncommitted: bool = False,
) -> Kept:
    """Copy a finished run folder into `into` in committed form; it appears whole or not at all.

    A run counts only where its code can be had again: one whose environment names no commit, or one with changes
    beside it, is refused.

    Args:
        run_folder: what `biascope run` made.
        into: folder of kept runs.
        name: of the copy, one folder's; study-size[-network]-device by default.
        replace: put it in place of an earlier one of that name; nothing but a run folder is replaced.
        uncommitted: keep it although its code is in no commit; its configuration says so then, as "provenance".

    Example:
        >>> import tempfile
        >>> from biascope.studies import configure, execute
        >>> home = Path(tempfile.mkdtemp())
        >>> run = Run.create(home / "r", configure("nad/fig4a")); _ = execute(run)
        >>> keep(run.path, home / "kept", uncommitted=True).path.name
        'nad-fig4a-smoke-cpu'
    """
    run, _, _ = finished(run_folder)
    loose = _loose_code(run)
    if loose and not uncommitted:
        raise InputError(
            f"{run.path} {loose}: commit, run it again and keep that (a copy without git names its commit by "
            "$BIASCOPE_TREE), or keep it marked as such (--uncommitted)"
        )
    target = _target(run, Path(into), name, replace)
    with explain_write_errors(target):
        Path(into).mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=into))
    try:
        left_out = _fill(run, making)
        if loose:
            write_json(making / "config.json", read_json(making / "config.json") | {"provenance": UNCOMMITTED})
        making.chmod(0o755)
        with explain_write_errors(target):
            _put(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    write_look(Path(into))  # one for all kept pages
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return Kept(target, size, tuple(left_out))


def _loose_code(run: Run) -> str:
    """Why the code that made a run, at first or when it was resumed, cannot be had again; empty if it can."""
    for made in (run.environment, *run.environment.get("resumed", [])):
        git = made.get("git")
        if not isinstance(git, dict) or not git.get("commit"):
            return "names no commit"
        if git.get("dirty"):
            return f"was made with changes beside commit {git['commit'][:10]}"
    return ""


def is_kept(run: Run, into: str | Path = "reproductions") -> bool:
    """Whether this very run, by its options and its start, is among the kept ones."""
    started = run.environment.get("started")
    for marker in Path(into).glob(f"*/{MARKER}"):
        kept = Run.open(marker.parent)
        if kept.environment.get("started") == started and kept.config.get("options") == scrubbed(
            run.config.get("options")
        ):
            return True
    return False


def _put(made: Path, target: Path) -> None:
    """Move a folder in the place of another, which is gone only when that is done."""
    earlier = made.with_name(f"{made.name}-earlier")
    if target.exists():
        target.rename(earlier)
    try:
        made.rename(target)
    except OSError:
        if earlier.exists():
            earlier.rename(target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _target(run: Run, into: Path, name: str, replace: bool) -> Path:
    """Where the copy goes; nothing that is not a kept run is ever in danger."""
    if name and (Path(name).name != name or name.startswith((".", "__"))):
        raise InputError(
            f"name {name!r}: one folder's name is needed, e.g. {kept_name(run)}; --into says where it goes"
        )
    target = into / (name or kept_name(run))
    here, source = target.resolve(), run.path.resolve()
    if here == source:
        raise InputError(f"{run.path} is the kept form itself: give the run folder that biascope run made")
    if here.is_relative_to(source) or source.is_relative_to(here):
        raise InputError(f"{target} and the run {run.path} lie one in the other: keep it somewhere else, with --into")
    if target.exists() and not replace:
        raise InputError(f"{target} exists: --replace puts this run in its place, --name gives it another name")
    if target.exists() and not (target / MARKER).is_file():
        raise InputError(f"{target} is not a kept run and stays as it is: --name gives this run another name")
    return target


def _fill(run: Run, target: Path) -> list[str]:
    """The committed form in an empty folder; what was left out."""
    left_out: list[str] = []
    for file in ("config.json", "environment.json", "result.json", MARKER):
        held = scrubbed(read_json(run.path / file))
        if "platform" in held:  # the name of a kernel build can tell whose machine it was
            held["platform"] = _system(str(held["platform"]))
        if "figures" in held:
            held["figures"] = shorter(held["figures"])
        write_text(target / file, json.dumps(held, indent=None if "figures" in held else 2) + "\n")
    _copy_metrics(run, target / "metrics.jsonl", left_out)
    _copy_arrays(run.path / "arrays", target / "arrays", left_out)
    charts = {chart.name for chart in finished(run.path)[1].figures}
    for made in sorted([*(run.path / "figures").glob("*.*"), *(run.path / "pictures").glob("*.*")]):
        if made.suffix in (".png", ".txt") and made.stem not in charts:
            (target / "pictures").mkdir(exist_ok=True)
            write_bytes(target / "pictures" / made.name, read_bytes(made))
    _draw(target)
    return left_out


def _draw(folder: Path) -> None:
    """The charts of a kept run, and a page that links to them."""
    write_study_page(folder, formats=("png",), dpi=DPI)
    write_study_page(folder, light=True)


@checked
def write_pages(folder: str | Path = "reproductions") -> tuple[Path, ...]:
    """Draw the pages of all kept runs that have none, or one older than their result; returns those that were drawn.

    Example:
        >>> write_pages(tempfile.mkdtemp())
        ()
    """
    drawn = []
    for run in progress(sorted(marker.parent for marker in Path(folder).glob(f"*/{MARKER}")), "pages", leave=False):
        page = run / "index.html"
        if not page.exists() or page.stat().st_mtime < (run / "result.json").stat().st_mtime:
            _draw(run)
            drawn.append(page)
    if drawn:
        write_look(Path(folder))  # one for all kept pages
    return tuple(drawn)


def kept_name(run: Run) -> str:
    """study-size[-network]-device, in letters, digits, dots and dashes."""
    options = changed_options(run)
    network = scrubbed(next((options[key] for key in NETWORK_OPTIONS if key in options), ""))
    network = "-".join(map(str, network)) if isinstance(network, list | tuple) else str(network)
    parts = [str(run.config.get("study")), str(run.config.get("size")), network, device_part(run)]
    return "-".join(_slug(part) for part in parts if part)


def device_part(run: Run) -> str:
    """The device as a part of a kept run's name: cpu, h200."""
    if not run.device.startswith("cuda"):
        return "cpu"
    name = str(run.environment.get("device_name", "gpu")).replace("NVIDIA", "").split("(")[0]
    return _slug(name) or "gpu"


def _slug(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-").lower()


def scrubbed(value: Any) -> Any:
    """JSON without paths from the root or upwards (the last part of each stays), and without the name of this host."""
    if isinstance(value, dict):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item) for item in value]
    if isinstance(value, str):
        value = _PATH.sub(r"\1", value)
        host = platform.node()
        return re.sub(rf"\b{re.escape(host)}\b", "host", value) if len(host) > 3 else value
    return value


def shorter(value: Any) -> Any:
    """JSON with its fractions cut to five digits."""
    if isinstance(value, dict):
        return {key: shorter(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shorter(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _system(platform_name: str) -> str:
    """`Linux-6.1-something-x86_64-with-glibc2.36` as `Linux x86_64`, which stays what it is."""
    machine = re.search(r"x86_64|AMD64|aarch64|arm64", platform_name)
    return " ".join(part for part in (re.split("[- ]", platform_name)[0], machine.group(0) if machine else "") if part)


def _copy_metrics(run: Run, target: Path, left_out: list[str]) -> None:
    """Whole lines only: the last may be torn."""
    source = run.path / "metrics.jsonl"
    if not source.exists():
        return
    if source.stat().st_size > METRICS_LIMIT:
        left_out.append(f"{source.name} ({source.stat().st_size / 1e6:.1f} MB)")
        return
    write_text(target, "".join(f"{json.dumps(scrubbed(line))}\n" for line in run.metrics()))


def _copy_arrays(source: Path, target: Path, left_out: list[str]) -> None:
    """The smallest first, as many as fit: curves and accuracies are small, directions and kernels are not."""
    arrays = sorted(source.glob("*.safetensors"), key=lambda file: (file.stat().st_size, file.name))
    sizes = list(accumulate(file.stat().st_size for file in arrays))
    fits = sum(size <= ARRAYS_LIMIT for size in sizes)
    if fits < len(arrays):
        size = sizes[-1] - (sizes[fits - 1] if fits else 0)
        left_out.append(f"{len(arrays) - fits} of {len(arrays)} arrays ({size / 1e6:.1f} MB)")
    if fits:
        target.mkdir()
    for file in arrays[:fits]:
        write_bytes(target / file.name, read_bytes(file))
