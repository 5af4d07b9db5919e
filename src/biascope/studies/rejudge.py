"""The numbers of a finished run as its study computes them now, from what it has stored: nothing is trained again.

For runs whose study stores another number now than when they were made. Arrays are read on the CPU, whatever device
made them; seconds and environment stay those of the run, and `result.json` says which commit computed the numbers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from biascope.studies import environment
from biascope.studies.options import arguments, merge
from biascope.studies.registry import find, load_result
from biascope.studies.result import StudyResult
from biascope.studies.runs import Run, Value
from biascope.support import files
from biascope.support.claims import Claims
from biascope.support.errors import InputError


class Stored(Run):
    """A run that may only read."""

    def _computed(self, claims: Claims, key: str, compute: Callable[[], Mapping[str, Value]]) -> bool:
        """What is stored under the key; a run that does not have it cannot be judged again."""
        if not self._file(key).exists():
            raise InputError(f"{self.path} has no arrays named {key!r}: it cannot be judged without computing them")
        return True

    def log(self, **metrics: Value) -> None:
        """Nothing happens that would be worth a line."""


def rejudge(folder: str | Path) -> StudyResult:
    """Write `result.json` of a finished run folder again, with the numbers of now."""
    run, _, raw = load_result(folder)
    found = find(str(run.config.get("study")))
    values = merge(found.options, run.config.get("options", {}))
    stored = Stored(run.path, {**run.config, "device": "cpu"}, run.environment)
    result = found.function(stored, **arguments(found.function, values))
    kept = {key: raw[key] for key in ("study", "seconds", "resumed")}
    by = {"judged": environment.git_state()}
    files.write_json(run.path / "result.json", {**result.to_json(), **kept, **by})
    return result
