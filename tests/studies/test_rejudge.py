"""A finished run judged again: from its arrays, with its own times, and never by computing what is missing."""

from pathlib import Path

import pytest

from biascope.studies import Run, configure, execute, load_result
from biascope.studies.rejudge import rejudge
from biascope.support.errors import InputError
from biascope.support.files import read_json, write_json


def test_a_run_is_judged_from_its_arrays(tmp_path: Path) -> None:
    options = {"networks": 2, "width": 16, "depth": 2, "points": 20}
    run = Run.create(tmp_path / "r", configure("alignment/figB.2", "smoke", overrides=options))
    result = execute(run)
    # as if made elsewhere, slowly, and judged wrongly
    write_json(run.path / "config.json", {**run.config, "device": "cuda"})
    raw = read_json(run.path / "result.json")
    write_json(run.path / "result.json", {**raw, "seconds": 1234.5, "measured": "wrong"})
    before = {file: file.read_bytes() for file in (run.path / "arrays").iterdir()}
    assert rejudge(run.path) == result
    assert before == {file: file.read_bytes() for file in (run.path / "arrays").iterdir()}
    again, told, raw = load_result(run.path)
    assert told.measured == result.measured
    assert raw["seconds"] == 1234.5
    assert "judged" in raw
    assert (again.device, again.environment) == ("cuda", run.environment)


def test_what_is_missing_is_not_computed(tmp_path: Path) -> None:
    options = {"networks": 2, "width": 16, "depth": 2, "points": 20}
    run = Run.create(tmp_path / "r", configure("alignment/figB.2", "smoke", overrides=options))
    execute(run)
    before = (run.path / "result.json").read_bytes()
    (run.path / "arrays" / "network 1.safetensors").unlink()
    with pytest.raises(InputError, match="network 1"):
        rejudge(run.path)
    assert (run.path / "result.json").read_bytes() == before
