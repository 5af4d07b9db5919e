"""The studies: executable figures of the papers. A new one is one new file with a decorated function.

    @study("nad/fig4a", sizes={"smoke": {...}, "laptop": {...}, "paper": {...}})
    def fig4a(run: Run, *, sigma: Annotated[float, "noise"] = 3.0) -> StudyResult: ...

Files are found by walking the package, so there is no list to edit. A file that fails to import is reported by name and
does not hide the others.
"""

import functools
import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from biascope.studies.claims import claims_of, documents, packages
from biascope.studies.options import Option, arguments, merge, options_of
from biascope.studies.own_networks import watch_networks
from biascope.studies.result import Estimate as Estimate
from biascope.studies.result import StudyResult
from biascope.studies.runs import Run, way_out
from biascope.support import executors, files
from biascope.support.arguments import device_of
from biascope.support.errors import CorruptError, InputError, near
from biascope.support.executors import Choice

Size = Literal["smoke", "laptop", "paper"]
StudyFunction = Callable[..., StudyResult]


@dataclass(frozen=True)
class Study:
    """A registered study: what it is about, how to run it, at which sizes."""

    name: str
    paper: str
    figure: str
    statement: str  # of the claim that it is about
    function: StudyFunction
    options: tuple[Option, ...]
    sizes: Mapping[str, Mapping[str, Any]]

    @property
    def place(self) -> str:
        """Where the claim is made: the paper, and the figure, table or theorem."""
        if self.figure.startswith("Table"):
            where = self.figure
        else:
            where = f"theorem {self.figure[1:]}" if self.figure.startswith("T") else f"figure {self.figure}"
        return f"{documents()[self.paper].title}, {where}"

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (self.function.__doc__ or "").strip().split("\n")[0]

    def values(self, size: str = "smoke", overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every option's value at a size, with overrides on top."""
        if size not in get_args(Size):
            raise InputError(f"size {size!r} is not one of {', '.join(get_args(Size))}")
        return merge(self.options, self.sizes[size], overrides or {})


_STUDIES: dict[str, Study] = {}


def study(
    name: str, *, sizes: Mapping[str, Mapping[str, Any]], paper: str = "", figure: str = "", statement: str = ""
) -> Callable[[StudyFunction], StudyFunction]:
    """Register a function as the study `name`; `sizes` override its defaults for smoke, laptop and paper.

    Document, figure and statement come from the `claims.toml` that names the study first; a study that no catalogue
    names brings them along, and nothing judges it.

    Example:
        >>> sizes = {"smoke": {}, "laptop": {}, "paper": {"n": 9}}
        >>> @study("nad/mine", paper="nad", figure="0", statement="1 < n", sizes=sizes)
        ... def mine(run: Run, *, n: int = 3) -> StudyResult:
        ...     return StudyResult(f"n is {n}", {"n": Estimate(n)})
        >>> find("nad/mine").values("paper")
        {'n': 9}
        >>> del _STUDIES["nad/mine"]  # only an example
    """

    def register(function: StudyFunction) -> StudyFunction:
        known = next(iter(claims_of(name)), None)
        about = (paper, figure, statement) if paper or known is None else (known.paper, known.figure, known.statement)
        if about[0] not in documents():
            raise InputError(f"study {name!r}: unknown paper {about[0]!r}{near(about[0], documents())}")
        if set(sizes) != set(get_args(Size)):
            raise InputError(f"study {name!r} needs the sizes {', '.join(get_args(Size))}, got {', '.join(sizes)}")
        made = Study(name, *about, function, options_of(function), sizes)
        for size in sizes:
            made.values(size)  # a size that names an unknown option fails here, not in front of a user
        earlier = _STUDIES.get(name)
        if earlier is not None and earlier.function.__module__ != function.__module__:
            raise InputError(f"study {name!r} is defined in {earlier.function.__module__} and {function.__module__}")
        _STUDIES[name] = made
        return function

    return register


@functools.cache
def discover(*names: str) -> dict[str, str]:
    """Import every file of some packages, or of all that hold studies; returns {module: error} for those that fail."""
    broken: dict[str, str] = {}
    for package in names or packages():
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
            try:
                importlib.import_module(module.name)
            except Exception as error:  # one bad file must not take the list down
                broken[module.name] = f"{type(error).__name__}: {error}"
    return broken


def studies() -> dict[str, Study]:
    """Every study by name, in the order of papers and figures.

    Example:
        >>> "nad/fig4a" in studies()
        True
    """
    discover()
    names = _ordered(tuple((each.name, each.paper, each.figure) for each in _STUDIES.values()))
    return {name: _STUDIES[name] for name in names}


@functools.lru_cache(maxsize=1)
def _ordered(known: tuple[tuple[str, str, str], ...]) -> tuple[str, ...]:
    order = list(documents())
    return tuple(each[0] for each in sorted(known, key=lambda each: (order.index(each[1]), _figure_key(each[2]))))


def find(name: str) -> Study:
    """The study of that name; an unknown name gives near matches.

    Example:
        >>> find("nad/fig4a").figure
        '4a'
    """
    known = studies()
    if name not in known:
        raise InputError(f"no study is called {name!r}{near(name, known)}{_broken()}")
    return known[name]


def _broken() -> str:
    """One sentence per reason why files failed to import: a file that many others import takes them all along."""
    reasons: dict[str, list[str]] = {}
    for module, error in discover().items():
        reasons.setdefault(error, []).append(module)
    parts = []
    for error, modules in reasons.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        parts.append(f"; {modules[0]}{more} failed to import ({error})")
    return "".join(parts)


def configure(
    name: str, size: str = "smoke", seed: int = 0, device: str = "cpu", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a run: study, size, seed, device and every option's value.

    Example:
        >>> configure("nad/fig4a", overrides={"sigma": "2"})["options"]["sigma"]
        2.0
    """
    found = find(name)
    device_of(device)
    return {
        "study": name,
        "size": size,
        "seed": seed,
        "device": device,
        "options": found.values(size, overrides),
    }


def execute(
    run: Run,
    executor: Choice | None = None,
    *,
    address: str | None = None,
    jobs: int | None = None,
    cpus: float = 1.0,
    gpus: float | None = None,
) -> StudyResult:
    """Run the study a folder was made for (or go on with it) and write `result.json`.

    A run goes on with the networks it began with: own ones (`module:factory`) that build something else are refused.

    Args:
        run: the folder.
        executor: who does independent jobs of the study (`Run.cached_each`: trainings, groups of networks): "ray",
            "processes" of this machine, or None for one after another. The numbers are the same; a job whose worker is
            lost is done again.
        address: of a Ray cluster ("auto": the one that this machine belongs to); None starts Ray here.
        jobs: at a time; by default as many as there are processors, or as Ray's resources allow.
        cpus: of each job.
        gpus: of each job on Ray, which may be a share of one; by default 1 where the run's device is CUDA.

    Example:
        >>> import tempfile
        >>> execute(Run.create(Path(tempfile.mkdtemp()) / "r", configure("nad/fig4a"))).numbers["accuracy at DC"].value
        1.0
    """
    found = find(str(run.config.get("study")))
    device_of(run.device)
    resumed = bool(run.arrays() or run.metrics())
    begin = time.perf_counter()
    values = merge(found.options, run.config.get("options", {}))
    watch_networks(run, values)
    on_gpu = run.device.startswith("cuda")
    if executor == "ray" and on_gpu and run.device != "cuda":
        raise InputError(f"device {run.device!r}: Ray says which GPU a job gets; start the run with device='cuda'")
    gpus = float(on_gpu) if gpus is None else gpus
    with executors.executor(executor, jobs=jobs, cpus=cpus, gpus=gpus, address=address):
        result = found.function(run, **arguments(found.function, values))
    if not isinstance(result, StudyResult):
        raise InputError(f"study {found.name!r} returned {type(result).__name__}, not a StudyResult")
    seconds = round(time.perf_counter() - begin, 2)
    files.write_json(
        run.path / "result.json", {**result.to_json(), "study": found.name, "seconds": seconds, "resumed": resumed}
    )
    return result


def load_result(path: str | Path) -> tuple[Run, StudyResult, dict[str, Any]]:
    """A finished run folder: the run, its result, and the raw `result.json` (with study name and seconds).

    Example:
        >>> import tempfile
        >>> run = Run.create(Path(tempfile.mkdtemp()) / "r", configure("nad/fig4a")); made = execute(run)
        >>> again, result, raw = load_result(run.path)
        >>> result == made, raw["study"]
        (True, 'nad/fig4a')
    """
    run = Run.open(path)
    if not run.finished:
        raise InputError(f"{run.path} is not finished; go on with `biascope run --resume {run.path}`")
    file = run.path / "result.json"
    with way_out(file):
        raw = files.read_json(file)
        try:
            return run, StudyResult.from_json(raw), raw
        except (CorruptError, ValueError) as error:
            raise CorruptError(f"{file} is damaged: {error}") from error


def _figure_key(figure: str) -> tuple[int, str]:
    digits = "".join(character for character in figure if character.isdigit())
    return (int(digits) if digits else 0, figure)
