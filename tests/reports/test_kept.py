"""The committed form of a run: small, nothing private, still a run folder."""

import base64
import csv
import json
import platform
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from biascope.reports import keep, ledger, write_pages, write_study_page
from biascope.reports.kept import is_kept, kept_name, scrubbed
from biascope.reports.study_page import linked
from biascope.studies import Run, Series, configure, execute, load_result
from biascope.studies.runs import MARKER
from biascope.support.errors import BiascopeError, InputError


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "r", configure("nad/fig4a"))
    execute(run)
    return run


def test_the_copy_is_a_run_folder_with_the_same_result(finished: Run, tmp_path: Path) -> None:
    finished.log(step=1, loss=0.5)
    finished.save_arrays("small", x=torch.ones(3))
    kept = keep(finished.path, tmp_path / "kept")
    assert kept.left_out == ()
    copy, result, _ = load_result(kept.path)
    whole = load_result(finished.path)[1]
    assert (result.measured, result.numbers) == (whole.measured, whole.numbers)
    for short, long in zip(result.figures, whole.figures, strict=True):
        for a, b in zip(short.series, long.series, strict=True):
            assert a.y == pytest.approx(b.y, rel=1e-4)
    assert copy.config == finished.config
    assert copy.metrics() == finished.metrics()
    assert copy.load_arrays("small")["x"].tolist() == [1, 1, 1]
    assert {path.suffix for path in (kept.path / "figures").iterdir()} == {".png"}
    (kept.path / "index.html").unlink()
    assert write_pages(kept.path.parent) == (kept.path / "index.html",)
    assert write_pages(kept.path.parent) == ()  # it is there
    assert (kept.path / "index.html").stat().st_size < 300_000
    assert kept.size == sum(path.stat().st_size for path in kept.path.rglob("*") if path.is_file())


def test_large_parts_are_left_out_and_named(finished: Run, tmp_path: Path) -> None:
    finished.save_arrays("large", x=torch.zeros(300_000))
    (finished.path / "metrics.jsonl").write_text('{"a": 1}\n' * 40_000)
    kept = keep(finished.path, tmp_path / "kept")
    assert kept.left_out == ("metrics.jsonl (0.4 MB)", "1 of 2 arrays (1.2 MB)")
    shown = kept._repr_html_()
    assert f'href="{kept.path.as_posix()}/index.html"' in shown
    assert "left out: metrics.jsonl (0.4 MB), 1 of 2 arrays (1.2 MB)" in shown
    page = (kept.path / "index.html").read_text()
    assert "<svg" not in page
    assert 'href="../page.css"' in page
    assert (tmp_path / "kept" / "page.css").is_file()
    linked = [part.split('"')[0] for part in page.split('src="')[1:]]
    assert linked
    assert all((kept.path / name).is_file() for name in linked)
    assert [file.name for file in (kept.path / "arrays").iterdir()] == ["curves.safetensors"]  # the study's own, small


def test_nothing_private_is_kept(finished: Run, tmp_path: Path) -> None:
    environment = json.loads((finished.path / "environment.json").read_text())
    environment["argv"] = [str(tmp_path / "bin" / "biascope"), "run", "nad/fig4a", f"--out={tmp_path}/x"]
    environment["platform"] = "Linux-6.1-secret-x86_64-with-glibc2.36"
    environment["note"] = f"on {platform.node()}"
    (finished.path / "environment.json").write_text(json.dumps(environment))
    kept = keep(finished.path, tmp_path / "kept")
    text = "".join(path.read_text(errors="ignore") for path in kept.path.rglob("*") if path.is_file())
    assert str(tmp_path) not in text
    assert json.loads((kept.path / "environment.json").read_text())["argv"][:3] == ["biascope", "run", "nad/fig4a"]
    assert json.loads((kept.path / "environment.json").read_text())["platform"] == "Linux x86_64"
    again = keep(kept.path, tmp_path / "again")  # what was scrubbed once stays as it is
    assert (again.path / "environment.json").read_text() == (kept.path / "environment.json").read_text()
    if len(platform.node()) > 3:
        assert platform.node() not in text


def test_scrubbing_leaves_ordinary_text_alone() -> None:
    same = ["train/test", "1/2", "a / b", "https://example.org/a/b", "nad/fig4a", 3.5, None]
    assert scrubbed(same) == same
    assert scrubbed("in /home/me/data/x.npz now") == "in x.npz now"
    assert scrubbed({"reference": "../shared/reference"}) == {"reference": "reference"}
    assert scrubbed(["../../x.npz", "a/../b", ".."]) == ["x.npz", "a/../b", ".."]


def test_numbers_of_charts_can_be_saved_unless_they_are_long(finished: Run, tmp_path: Path) -> None:
    chart = load_result(finished.path)[1].figures[0]
    page = (keep(finished.path, tmp_path / "kept").path / "index.html").read_text()
    coded = re.search(f'href="data:text/csv;base64,([^"]*)" download="{chart.name}.csv"', page)
    assert coded is not None
    header, *rows = csv.reader(base64.b64decode(coded[1]).decode().splitlines())
    assert header == ["series", chart.x_label, chart.y_label, "standard error"]
    points = [(series.label, x, y) for series in chart.series for x, y in zip(series.x, series.y)]
    assert [row[0] for row in rows] == [label for label, _, _ in points]
    assert [float(row[2]) for row in rows] == pytest.approx([y for _, _, y in points], rel=1e-4)
    long = replace(chart, series=(Series.of("s", range(5000), range(5000)),))
    assert "text/csv" not in linked(long)
    assert 'href="result.json"' in linked(long)


def test_names_and_refusals(finished: Run, tmp_path: Path) -> None:
    gpu = Run(Path(), {**finished.config, "device": "cuda"}, {"device_name": "NVIDIA H200 (x)"})
    assert kept_name(gpu) == "nad-fig4a-smoke-h200"
    net = {**configure("nad/fig5"), "options": {**configure("nad/fig5")["options"], "network": "vgg11"}}
    assert kept_name(Run(Path(), net, {})) == "nad-fig5-smoke-vgg11-cpu"
    kept = keep(finished.path, tmp_path / "kept", name="mine")
    with pytest.raises(InputError, match="--replace"):
        keep(finished.path, tmp_path / "kept", name="mine")
    with pytest.raises(InputError, match="the kept form itself"):
        keep(kept.path, tmp_path / "kept", name="mine")
    with pytest.raises(InputError, match="not finished"):
        keep(Run.create(tmp_path / "half", configure("nad/fig4a")).path, tmp_path / "kept")


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/tmp/elsewhere", ".hidden"])
def test_a_name_is_one_folders(name: str, finished: Run, tmp_path: Path) -> None:
    kept = keep(finished.path, tmp_path / "kept", name="first")
    with pytest.raises(InputError, match="one folder's name is needed"):
        keep(finished.path, tmp_path / "kept", name=name, replace=True)
    assert (kept.path / "result.json").is_file()


def test_replacing_endangers_nothing_but_a_kept_run(finished: Run, tmp_path: Path) -> None:
    thesis = tmp_path / "kept" / "mine" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years")
    with pytest.raises(InputError, match="is not a kept run and stays as it is"):
        keep(finished.path, tmp_path / "kept", name="mine", replace=True)
    assert thesis.read_text() == "years"
    own = shutil.copytree(finished.path, tmp_path / "outer" / "run")
    (own.parent / MARKER).write_text("{}")
    with pytest.raises(InputError, match="lie one in the other"):
        keep(own, tmp_path, name="outer", replace=True)
    with pytest.raises(InputError, match="lie one in the other"):
        keep(own, own)
    assert (own / "result.json").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(BiascopeError, match="cannot write"):
        keep(finished.path, tmp_path / "file")


def test_a_copy_that_fails_leaves_the_earlier_one(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(finished.path, tmp_path / "kept", name="mine")
    before = (kept.path / "index.html").read_text()

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("biascope.reports.kept.write_study_page", full)
    with pytest.raises(OSError, match="No space left"):
        keep(finished.path, tmp_path / "kept", name="mine", replace=True)
    assert (kept.path / "index.html").read_text() == before
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"mine", "page.css", "page.js"}


def test_an_earlier_copy_is_gone_only_when_the_new_one_is_in_its_place(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(finished.path, tmp_path / "kept", name="mine")
    before = (kept.path / "index.html").read_text()
    move, refused = Path.rename, list[Path]()

    def once(path: Path, to: Path) -> Path:
        if path.name.startswith(".") and not refused:  # the new copy on its way
            refused.append(path)
            raise OSError(5, "Input/output error")
        return move(path, to)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(BiascopeError, match="Input/output error"):
        keep(finished.path, tmp_path / "kept", name="mine", replace=True)
    assert (kept.path / "index.html").read_text() == before
    keep(finished.path, tmp_path / "kept", name="mine", replace=True)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"mine", "page.css", "page.js"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", {"options": None}, "config.json is damaged: options should be a JSON object, not None"),
        ("config.json", {"seed": "x"}, "config.json is damaged: seed should be a whole number, not 'x'"),
        ("config.json", {"device": []}, "config.json is damaged: device should be text"),
        ("result.json", {"study": None}, "result.json is damaged: it needs the study's name"),
        ("result.json", {"seconds": "x"}, "result.json is damaged"),
        ("result.json", {"measured": 3}, "result.json is damaged: what was measured should be text"),
        (
            "result.json",
            {"figures": [3]},
            "result.json is damaged: not a study result.*; put it back from a copy, or dele",
        ),
        ("metrics.jsonl", [1], "metrics.jsonl, line 1: every line should hold a JSON object; delete that line"),
    ],
)
def test_a_damaged_folder_is_named(file: str, text: Any, message: str, finished: Run, tmp_path: Path) -> None:
    run = shutil.copytree(finished.path, tmp_path / "runs" / "run")
    held = {**json.loads((run / file).read_text()), **text} if isinstance(text, dict) else text
    (run / file).write_text(json.dumps(held) + "\n")
    for look in (keep, write_study_page):
        with pytest.raises(BiascopeError, match=message):
            look(run)
    with pytest.raises(BiascopeError, match=message):
        ledger(tmp_path / "runs")


@pytest.mark.parametrize("name", [MARKER, "config.json", "environment.json", "result.json", "metrics.jsonl"])
def test_a_folder_or_a_forbidden_file_in_a_run_is_named(
    name: str, finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(finished.path, tmp_path / "runs" / "run")
    (run / "metrics.jsonl").touch()

    def read(path: Path) -> bytes:  # permissions do not stop the superuser, who may run this
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        with path.open("rb") as file:
            return file.read()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", read)
        for look, folder in ((keep, run), (write_study_page, run), (ledger, run.parent)):
            with pytest.raises(BiascopeError, match=f"cannot read .*{name}: Permission denied"):
                look(folder)
    (run / name).unlink()
    (run / name).mkdir()
    for look, folder in ((keep, run), (write_study_page, run), (ledger, run.parent)):
        with pytest.raises(BiascopeError, match=f"{name} is a folder, a file belongs there: move it away"):
            look(folder)


def test_keeping_names_a_folder_in_place_of_an_array_or_a_picture(finished: Run, tmp_path: Path) -> None:
    write_study_page(finished.path)
    for place in ("arrays/w.safetensors", "figures/mine.png"):
        (finished.path / place).mkdir(parents=True)
        with pytest.raises(BiascopeError, match=f"{place} is a folder"):
            keep(finished.path, tmp_path / "kept")
        (finished.path / place).rmdir()
    assert keep(finished.path, tmp_path / "kept").path.is_dir()


def test_a_torn_line_and_unknown_versions_do_not_matter(finished: Run, tmp_path: Path) -> None:
    run = shutil.copytree(finished.path, tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"a": 1}\n{"b": ')
    (run / "environment.json").write_text("{}")
    kept = keep(run, tmp_path / "kept", uncommitted=True)
    assert (kept.path / "metrics.jsonl").read_text() == '{"a": 1}\n'
    assert "torch (version unknown)" in (kept.path / "index.html").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"formats": ("pgn",)}, "formats='pgn' is not known; did you mean png"),
        ({"dpi": 0}, "dpi=0: from 1 to 2400"),
        ({"dpi": 10**6}, "dpi=1000000: from 1"),
        ({"light": True}, r"has no bayes-accuracy\.png to link to"),
    ],
)
def test_pages_that_would_be_empty_or_endless(
    given: dict[str, Any], message: str, finished: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(finished.path, tmp_path / "run")
    shutil.rmtree(run / "figures")
    with pytest.raises(InputError, match=message):
        write_study_page(run, **given)


def test_the_ledger_reads_a_folder_of_runs(finished: Run, tmp_path: Path) -> None:
    kept = keep(finished.path, tmp_path / "kept")
    for stray in (".ipynb_checkpoints", "__pycache__"):
        (tmp_path / "kept" / stray).mkdir()
    (tmp_path / "kept" / "queue").mkdir()
    (tmp_path / "kept" / "queue" / "nad.toml").write_text("")
    (tmp_path / "kept" / "notes.txt").write_text("a stray file")
    assert {each.run.path for row in ledger(tmp_path / "kept") for each in row.judgements} == {kept.path}
    with pytest.raises(InputError, match="is one run: the ledger reads the folder above"):
        ledger(kept.path)
    with pytest.raises(InputError, match="is a file"):
        ledger(tmp_path / "kept" / "notes.txt")


COMMIT = {"commit": "5b758d50" * 5, "dirty": False}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"git": None}, "r names no commit: commit, run it again"),
        ({}, "names no commit"),
        ({"git": COMMIT | {"dirty": True}}, "was made with changes beside commit 5b758d505b: commit"),
        ({"git": COMMIT, "resumed": [{"git": COMMIT}, {"git": COMMIT | {"dirty": True}}]}, "made with changes beside"),
    ],
)
def test_a_run_of_code_in_no_commit_is_kept_only_as_such(
    environment: dict[str, Any], message: str, finished: Run, tmp_path: Path
) -> None:
    (finished.path / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(InputError, match=message):
        keep(finished.path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    kept = Run.open(keep(finished.path, tmp_path / "kept", uncommitted=True).path)
    assert kept.config == {**finished.config, "provenance": "uncommitted tree"}


def test_a_run_of_a_commit_needs_no_mark(finished: Run, tmp_path: Path) -> None:
    (finished.path / "environment.json").write_text(json.dumps({"git": COMMIT, "resumed": [{"git": COMMIT}]}))
    assert Run.open(keep(finished.path, tmp_path / "kept", uncommitted=True).path).config == finished.config


def test_the_same_run_is_found_among_the_kept(finished: Run, tmp_path: Path) -> None:
    assert not is_kept(finished, tmp_path / "kept")
    keep(finished.path, tmp_path / "kept", name="mine")
    assert is_kept(finished, tmp_path / "kept")
    other = replace(finished, environment={**finished.environment, "started": "2026-01-01T00:00:00+00:00"})
    assert not is_kept(other, tmp_path / "kept")
