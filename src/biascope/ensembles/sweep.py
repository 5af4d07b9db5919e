"""A sweep: independent jobs, each written to disk as it finishes, none done twice.

A job is a dict of plain values; its file is named after a hash of them. Files appear whole or not at all (written
aside, then renamed), so Ctrl-C or a lost machine costs the job that was running and nothing else.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biascope.support import executors
from biascope.support.bars import progress
from biascope.support.errors import BiascopeError, CorruptError, InputError
from biascope.support.executors import Choice, Failure
from biascope.support.files import explain_write_errors, read_tensors, write_tensors
from biascope.support.limits import Count, NonNegative, Positive
from biascope.support.signatures import checked

Job = Mapping[str, Any]
Outcome = dict[str, Any]  # tensors and plain values by name


@checked
def sweep(
    function: Callable[..., Mapping[str, Any]],
    jobs: Sequence[Job],
    folder: str | Path,
    executor: Choice | None = None,
    *,
    address: str | None = None,
    at_once: Count | None = None,
    cpus: Positive = 1.0,
    gpus: NonNegative = 0.0,
) -> list[Outcome]:
    """Call `function(**job)` for every job that has no file in `folder` yet; returns all outcomes in order.

    A job that fails does not stop the others, nor does an outcome that is not a dict or cannot be written; at the end
    the failures are raised together, by job. A disk that takes no more stops the sweep. Two processes may work on the
    same folder: at worst a job is computed twice, and both write the same file.

    Args:
        function: returns a dict of tensors (or arrays, which come back as tensors) and plain values (numbers, strings,
            lists).
        jobs: keyword arguments, JSON-able.
        folder: made if it does not exist.
        executor: who calls it: "ray", "processes" of this machine, or None for one job after another, here. A job whose
            worker is lost is done again.
        address: of a Ray cluster ("auto": the one that this machine belongs to); None starts Ray here.
        at_once: jobs at a time; by default as many as there are processors, or as Ray's resources allow.
        cpus: of each job.
        gpus: of each job on Ray, which may be a share of one.

    Example:
        >>> import tempfile
        >>> where = tempfile.mkdtemp()
        >>> [o["square"] for o in sweep(lambda n: {"square": n * n}, [{"n": 2}, {"n": 3}], where)]
        [4, 9]
        >>> len(finished([{"n": 2}, {"n": 5}], where))
        1
    """
    folder = Path(folder)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [_path(folder, job) for job in jobs]
    waiting = [(job, path) for job, path in dict(zip(map(_key, jobs), zip(jobs, paths))).values() if not path.exists()]
    failures: list[str] = []
    cause: Exception | None = None

    def contents(job: Job) -> Any:
        return _contents(job, function(**job))

    with executors.executor(executor, jobs=at_once, cpus=cpus, gpus=gpus, address=address) as there:
        todo = [job for job, _ in waiting]
        outcomes = _here(contents, todo) if there is None else there.map(contents, todo)
        for index, outcome in progress(outcomes, "jobs", total=len(waiting)):
            job, path = waiting[index]
            if isinstance(outcome, Failure):
                cause = outcome.error
                failures.append(f"{_key(job)}: {type(cause).__name__}: {cause}")
                continue
            try:
                write_tensors(path, *outcome)
            except BiascopeError:
                raise  # the disk, not the job: all others would be computed for nothing
            except Exception as error:  # what safetensors does not take: sparse tensors, names that are no text
                failures.append(f"{_key(job)}: its outcome cannot be written: {type(error).__name__}: {error}")
                cause = error
    if failures:
        listed = "\n  ".join(failures)
        raise BiascopeError(
            f"{len(failures)} of {len(jobs)} jobs failed; the others are in {folder}\n  {listed}"
        ) from cause
    return [_read(path) for path in paths]


def _here(function: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
    for index, job in enumerate(jobs):
        try:
            yield index, function(job)
        except Exception as error:  # KeyboardInterrupt passes through: what is finished is on disk
            yield index, Failure(error)


@checked
def finished(jobs: Sequence[Job], folder: str | Path) -> list[Job]:
    """The jobs whose outcome is on disk."""
    return [job for job in jobs if _path(Path(folder), job).exists()]


def _key(job: Job) -> str:
    try:
        return json.dumps(dict(job), sort_keys=True)
    except TypeError as error:
        raise InputError(f"a job must hold plain values only (numbers, strings, lists): {error}") from error


def _path(folder: Path, job: Job) -> Path:
    return folder / f"{hashlib.sha256(_key(job).encode()).hexdigest()[:20]}.safetensors"


def _contents(job: Job, outcome: object) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What goes into the file of a job: tensors, and texts for its header."""
    if not isinstance(outcome, Mapping):
        raise InputError(
            f"the function returned {type(outcome).__name__}; it must return a dict of tensors and plain values"
        )
    held = {
        name: torch.as_tensor(v.copy(), device="cpu") if isinstance(v, np.ndarray) else v for name, v in outcome.items()
    }
    tensors = {name: v for name, v in held.items() if isinstance(v, Tensor)}
    plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in held.items() if name not in tensors}
    try:
        metadata = {"job": _key(job), "values": json.dumps(plain)}
    except TypeError as error:
        raise InputError(f"the outcome must hold tensors and plain values only: {error}") from error
    return tensors or {"": torch.empty(0, device="cpu")}, metadata


def _read(path: Path) -> Outcome:
    try:
        tensors, metadata = read_tensors(path)
        tensors.pop("", None)
        return {**tensors, **json.loads(metadata["values"])}
    except (CorruptError, ValueError, KeyError) as error:
        raise CorruptError(f"{path} is damaged ({error}); delete it and run the sweep again") from error
