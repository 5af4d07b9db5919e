"""`biascope queue` from end to end, with runs of seconds."""

import json
from pathlib import Path

import pytest

from biascope.cli.app import run
from biascope.studies import Run, configure

ENTRIES = """
[[run]]
study = "nad/fig4a"
size = "smoke"
set = { D = 32, sigma = 2.5 }
minutes = 0.5
small = true
claims = ["nad/4a"]
name = "begun"

[[run]]
study = "nad/fig4a"
size = "smoke"
set = { D = 30 }
minutes = 0.5
name = "wrong"

[[run]]
study = "nad/fig4a"
size = "smoke"
minutes = 60
alone = true
data = ["mnist"]
name = "long"
"""


@pytest.fixture(autouse=True)
def _a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIASCOPE_DATA", str(tmp_path / "data"))
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "nad.toml").write_text(ENTRIES)


def queue(command: str, *more: str) -> int:
    folder = [] if command == "keep" else ["--folder", "queue"]
    return run(["queue", command, *folder, "--runs", "runs", *more])


def test_list_run_keep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"D": 32, "sigma": 2.5}
    Run.create(tmp_path / "runs" / "begun", configure("nad/fig4a", overrides=options))
    assert queue("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["begun", "0.5", "begun", "nad/4a"],
        ["wrong", "0.5", "waiting"],
        ["long", "60.0", "waiting", "(alone;", "needs", "mnist)"],
    ]
    assert lines[4:] == [
        "3 runs, 61 minutes, 1 claims: 0 done, 1 begun, 2 waiting",
        "still to run: 61 minutes, 1 claims",
    ]
    assert queue("run", "--minutes", "3", "--jobs", "1") == 1
    both = capsys.readouterr()
    assert "begun done in" in both.out
    assert "long waits for data: mnist" in both.out
    assert "wrong failed:\n" in both.err
    assert "D = 30, S = 4: S must divide D" in both.err
    made = Run.open(tmp_path / "runs" / "begun")
    assert made.config["options"] | options == made.config["options"]
    assert queue("list", "--only", "begun") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[3] == "done"
    environment = tmp_path / "runs" / "begun" / "environment.json"
    held = json.loads(environment.read_text())
    environment.write_text(json.dumps(held | {"git": None}))
    assert queue("keep") == 1
    assert "begun was not kept: runs/begun names no commit" in capsys.readouterr().err
    environment.write_text(json.dumps(held | {"git": {"commit": "1" * 40, "dirty": False}, "resumed": []}))
    assert queue("keep") == 0
    assert capsys.readouterr().out.strip() == "reproductions/begun-cpu"
    assert queue("keep") == 0  # it is kept already
    assert capsys.readouterr().out == ""


def test_a_pattern_that_nothing_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert queue("list", "--only", "gih/*") == 1
    assert "queue: no file there has a [[run]] with a study or name like 'gih/*'" in capsys.readouterr().err
