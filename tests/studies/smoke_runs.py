"""Studies run once at smoke size for a whole file of tests."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from biascope.studies import Run, StudyResult, configure, execute

Results = dict[str, tuple[Run, StudyResult]]


def smoke_runs(
    factory: pytest.TempPathFactory, names: Iterable[str], options: Mapping[str, Mapping[str, Any]] | None = None
) -> Results:
    """{name: (run, result)}."""
    made = {}
    for name in names:
        changed = dict((options or {}).get(name, {}))
        path = factory.mktemp("runs") / name.replace("/", "-")
        run = Run.create(path, configure(name, "smoke", seed=0, overrides=changed))
        made[name] = (run, execute(run))
    return made
