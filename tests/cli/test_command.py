"""The command: exit codes, one-line errors, resuming, near matches."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import biascope
import biascope as bs
from biascope.cli.app import run
from biascope.cli.card import shape
from biascope.cli.run_study import study_options
from biascope.studies import Run
from biascope.support.errors import InputError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("BIASCOPE_DEBUG", raising=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"biascope {biascope.__version__}"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list"]) == 0
    assert "nad/fig4a" in capsys.readouterr().out
    assert run(["list", "nad/fig4b"]) == 0
    out = capsys.readouterr().out
    assert "--frequencies" in out
    assert "initialisations, for the error bars" in out
    assert "figure 4b" in out
    for family in ("mine", "mine/"):
        assert run(["list", family]) == 0
        out = capsys.readouterr().out
        assert "mine/table5.1" in out
        assert "nad/" not in out
    assert run(["list", "mine/table5.1"]) == 0
    assert "figure Table" not in capsys.readouterr().out


def test_run_writes_a_folder_with_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["run", "nad/fig4a", "--D", "32", "--sigma=2", "--set", "S=2", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "supported (proves nothing) at" in out
    assert "smoke, to see that it runs: it proves nothing" in out
    folder = tmp_path / "runs" / "nad-fig4a-smoke"
    opened = Run.open(folder)
    assert opened.config["options"] == {"D": 32, "S": 2, "eps": 1.0, "sigma": 2.0}
    assert opened.seed == 7
    page = (folder / "index.html").read_text()
    assert "--set sigma=2.0" in page
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".png", ".svg", ".pdf"}
    assert run(["run", "nad/fig4a", "--D", "32"]) == 0  # a second run does not touch the first
    assert (tmp_path / "runs" / "nad-fig4a-smoke-2").is_dir()


def test_run_like_takes_the_options_of_a_folder_and_compares(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["run", "nad/fig4a", "--D", "32", "--seed", "7", "--out", "first"]) == 0
    capsys.readouterr()
    assert run(["run", "--like", "first", "--sigma", "2", "--out", "second"]) == 0
    out = capsys.readouterr().out
    assert "Beside first" in out
    assert "accuracy at DC" in out
    opened = Run.open(tmp_path / "second")
    assert opened.config["options"] == {"D": 32, "S": 4, "eps": 1.0, "sigma": 2.0}
    assert opened.seed == 7
    assert run(["run", "nad/fig4b", "--like", "first"]) == 1
    assert "first is a run of nad/fig4a, not of nad/fig4b" in capsys.readouterr().err
    assert run(["run", "--like", "first", "--resume", "second"]) == 1
    assert "give one of them" in capsys.readouterr().err
    assert run(["run", "--like", "nowhere"]) == 1


def test_help_of_run_shows_the_studys_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "nad/fig4a", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--resume" in out
    assert "signal length" in out
    assert run(["run"]) == 0
    assert "--resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nad/fig4z"], "did you mean nad/fig4"),
        (["run", "nad/fig4a", "--sigm", "2"], "unknown option 'sigm'; did you mean sigma?"),
        (["run", "nad/fig4a", "--sise", "smoke"], "unknown option --sise; did you mean --size?"),
        (["run", "nad/fig4a", "--sigma", "loud"], "option sigma='loud' should be float"),
        (["run", "nad/fig4a", "--size", "huge"], "size 'huge' is not one of smoke, laptop, paper"),
        (["run", "nad/fig4a", "--device", "gpu"], "'gpu' is not a torch device"),
        (["run", "nad/fig4a", "--device", ""], "device ''"),
        (["run", "nad/fig4a", "--device", "mps"], "device 'mps' is not supported here; use cpu"),
        (["run", "nad/fig4a", "--D", "0"], "stopped before it began; nothing is lost with runs/nad-fig4a-smoke"),
        (["run", "nad/fig4a", "--set", "sigma"], "--set 'sigma' should read key=value"),
        (["run", "nad/fig4a", "stray"], "did not understand 'stray'"),
        (["run", "nad/fig4a", "--D", "30"], "D = 30, S = 4: S must divide D"),
        (["run", "--resume", "nowhere"], "nowhere is not a folder"),
        (["card", "lenat"], "did you mean lenet"),
        (["card", "lenet", "--input", "3,a"], "--input '3,a' should be the shape"),
        (["card", "torch.nn:Flatten"], "say what one input looks like"),
        (["nets", "lenat"], "did you mean lenet"),
        (["card", "lenet", "--weights", "none.pt"], "none.pt: there is no such file"),
        (["card", "lenet", "--data", "mnits"], "did you mean mnist"),
        (["card", "lenet", "--set", "outputs"], "--set 'outputs' should read key=value"),
        (["card", "lenet", "--set", "output=3"], "did you mean outputs"),
        (["card", "hf:brt"], "did you mean"),
        (["compare", "lenet"], "two or more networks"),
        (["lisst"], "No such command 'lisst'"),
        (["run", "nad/fig4a", "--seed", "x"], "Invalid value for '--seed'"),
    ],
)
def test_errors_are_one_line_and_exit_1(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_a_command_that_needs_more_shows_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    both = capsys.readouterr()
    assert "Usage: biascope" in both.out
    assert not both.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DEBUG", "1")
    assert run(["run", "nad/nothing"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_option_that_is_not_finite_starts_nothing(
    value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["run", "nad/fig4a", "--eps", value, "--size", "smoke"]) == 1
    assert f"option eps='{value}' should be a finite float" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resume_refuses_another_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "nad/fig4a", "--out", "r"]) == 0
    assert run(["run", "--resume", "r", "--sigma", "1"]) == 1
    assert "options.sigma (3.0 stored, 1.0 asked)" in capsys.readouterr().err
    assert run(["run", "nad/fig4b", "--resume", "r"]) == 1
    assert "r is a run of nad/fig4a, not of nad/fig4b" in capsys.readouterr().err
    assert run(["run", "nad/fig4a", "--resume", "r", "--seed", "0"]) == 0
    assert "was finished already" in capsys.readouterr().out
    assert run(["run", "nad/fig4a", "--out", "r"]) == 1
    assert "biascope run --resume r" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"measured": "m"}', {"measured": 3}, {"numbers": 3}])
def test_a_damaged_result_is_made_again(
    text: str | dict[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["run", "nad/fig4a", "--out", "r"]) == 0
    result = tmp_path / "r" / "result.json"
    whole = json.loads(result.read_text())
    result.write_text(text if isinstance(text, str) else json.dumps({**whole, **text}))
    capsys.readouterr()
    assert run(["run", "--resume", "r"]) == 1
    assert "delete r/result.json, then make it again from what is stored: biascope run --resume r" in (
        capsys.readouterr().err
    )
    result.unlink()
    assert run(["run", "--resume", "r"]) == 0
    assert json.loads(result.read_text())["numbers"] == whole["numbers"]


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json"])
def test_a_folder_in_place_of_a_file_of_a_run_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "nad/fig4a", "--out", "runs/r"]) == 0
    (Path("runs/r") / name).unlink()
    (Path("runs/r") / name).mkdir()
    capsys.readouterr()
    for command in (["run", "--resume", "runs/r"], ["run", "--like", "runs/r"], ["keep", "runs/r"],
                    ["ledger", "--folder", "runs"]):  # fmt: skip
        assert run(command) == 1
        assert f"{name} is a folder, a file belongs there: move it away" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_leaves_a_folder_that_resumes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "biascope",
        "run",
        "nad/fig4b",
        "--out",
        "my run",
        "--seeds",
        "60",
        "--D",
        "32",
    ]
    process = subprocess.Popen(
        [*command, "--batch", "8"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    arrays = tmp_path / "my run" / "arrays"
    deadline = time.monotonic() + 60
    while len(list(arrays.glob("seed*"))) < 1 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    said = re.search(r"go on with: biascope (.*)", error)
    assert said is not None
    assert said.group(1) == "run --resume 'my run'"
    assert "Traceback" not in error
    before = {path: path.stat().st_mtime_ns for path in arrays.glob("seed*")}
    assert 1 <= len(before) < 60
    subprocess.run([sys.executable, "-m", "biascope", "run", "--resume", "my run"], check=True, capture_output=True)
    assert len(list(arrays.glob("seed*"))) == 60
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert json.loads((tmp_path / "my run" / "result.json").read_text())["resumed"] is True


def test_an_interrupt_that_makes_clean_up_fail_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **more: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:  # as torch's vmap does when it is interrupted while it begins
            raise RuntimeError("INTERNAL ASSERT FAILED")

    monkeypatch.setattr("biascope.cli.run_study.execute", interrupted)
    assert run(["run", "nad/fig4b", "--size", "smoke", "--out", str(tmp_path / "r")]) == 130
    assert "go on with: biascope run --resume" in capsys.readouterr().err

    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("biascope.cli.run_study.execute", broken)
    with pytest.raises(RuntimeError, match="something else"):
        run(["run", "nad/fig4b", "--size", "smoke", "--out", str(tmp_path / "s")])


MINE = """
from torch import nn
def net(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
def one(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 1))
def wrong():
    raise ValueError("no checkpoint")
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--net", "mine.py:wrong"], "ValueError: no checkpoint (line 6 of mine.py: raise ValueError"),
        (["--net", "mine.py:one"], "mine.py:one gives 1 output; this study needs 2 logits"),
        (["--net", "mine.py:net", "--width", "16"], "width = 16 is for networks of the registry"),
    ],
)
def test_a_failed_start_says_why_and_leaves_no_folder(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "runs" / "nad-fig1-smoke").mkdir(parents=True)  # another run: not touched
    (tmp_path / "there").mkdir()
    assert run(["run", "nad/fig1", *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "nothing is lost with runs/nad-fig1-smoke-2, which was removed" in error
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["nad-fig1-smoke"]
    assert run(["run", "nad/fig1", *options, "--out", "there"]) == 1  # was there before: stays
    assert "removed" not in capsys.readouterr().err
    assert (tmp_path / "there" / "config.json").exists()
    assert run(["run", "--resume", "there"]) == 1
    assert "removed" not in capsys.readouterr().err
    assert (tmp_path / "there" / "config.json").exists()


def test_a_run_that_stored_something_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(started: Run, *args: object, **more: object) -> None:
        started.log(step=1)
        raise InputError("in the middle")

    monkeypatch.setattr("biascope.cli.run_study.execute", breaks)
    assert run(["run", "nad/fig4b", "--out", "r"]) == 1
    assert "it goes on by: biascope run --resume r" in capsys.readouterr().err
    assert Run.open(tmp_path / "r").metrics()


def test_an_own_network_that_changed_is_not_mixed_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    few = ["--first", "4", "--chunk", "2", "--n", "32", "--epochs", "1", "--control", "false"]
    assert run(["run", "nad/fig1", "--net", "mine.py:net", *few, "--out", "r"]) == 0
    for name in ("result.json", "arrays/mine.py%3Anet 2.safetensors"):  # as if it had been stopped in the middle
        (tmp_path / "r" / name).unlink()
    (tmp_path / "mine.py").write_text(MINE.replace("256, 2", "256, 3"))
    assert run(["run", "--resume", "r"]) == 1
    assert "mine.py:net builds another network than when the run began" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(MINE)
    assert run(["run", "--resume", "r"]) == 0


def test_help_says_that_own_networks_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "nad/fig1"]) == 0
    assert "module:factory" in capsys.readouterr().out


def test_a_damaged_configuration_comes_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "nad/fig4a", "--out", "r"]) == 0
    stored = Path("r/config.json")
    for text in ("{", json.dumps({**json.loads(stored.read_text()), "options": []})):
        stored.write_text(text)
        assert run(["run", "--resume", "r"]) == 1
        error = capsys.readouterr().err
        assert "config.json" in error
        assert "or start a new run" in error


def test_a_place_where_no_run_can_be_made_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "runs").touch()  # a file
    assert run(["run", "nad/fig4a"]) == 1
    error = capsys.readouterr().err
    assert "cannot begin a run in runs/nad-fig4a-smoke: Not a directory" in error
    assert "choose another folder (--out FOLDER)" in error
    assert "resume" not in error


def test_nets_and_data(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", str(tmp_path / "cache"))
    assert run(["nets"]) == 0
    assert "lenet-avg" in capsys.readouterr().out
    assert run(["nets", "lenet"]) == 0
    assert "60,941 parameters" in capsys.readouterr().out
    assert run(["data", "list"]) == 0
    assert "cifar10" in capsys.readouterr().out
    shared = tmp_path / "cache" / "networks" / "a"
    shared.mkdir(parents=True)
    (shared / "b.safetensors").write_bytes(bytes(3 * 2**20))
    assert run(["data", "list"]) == 0
    assert "3.0 MiB of networks that studies share" in capsys.readouterr().out
    assert run(["data", "info", "digits"]) == 0
    both = capsys.readouterr()
    assert "citation" in both.err
    assert "1437" in both.out
    assert run(["data", "get", "digits"]) == 0
    assert "digits.npz" in capsys.readouterr().out
    assert run(["data", "get", "cifar11"]) == 1
    assert "cifar10" in capsys.readouterr().err
    assert run(["data", "unpack", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err
    asked: list[object] = []
    monkeypatch.setattr("biascope.data.packing.pack", lambda *given: asked.append(given) or "parts")
    assert run(["data", "pack", "cifar10", "parts", "--part-mib", "5"]) == 0
    assert asked == [("cifar10", Path("parts"), 5.0)]


def test_tables_are_readable_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len({line.index("┃ figure") for line in lines if "┃ figure" in line}) == 1  # columns of all papers line up
    cells = [line.split("│")[3].strip() for line in lines if line.count("│") == 4]
    assert max(map(len, cells)) >= 35  # room for words
    assert run(["ledger"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out.split("Written")[0].split("claims:")[0]  # nothing is cut off
    assert "what it says" in out


def test_ledger_comes_from_run_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["ledger"]) == 0
    out = capsys.readouterr().out
    assert "undecided" in out
    assert "There is no folder reproductions" in out
    assert not (tmp_path / "reproductions").exists()
    assert run(["run", "nad/fig4a", "--out", "reproductions/nad-fig4a"]) == 0
    assert run(["ledger"]) == 0
    text = (tmp_path / "reproductions" / "ledger.html").read_text()
    assert '<a href="nad-fig4a/index.html">nad-fig4a</a>' in text
    assert 'class="badge supported"' in text
    capsys.readouterr()
    assert run(["ledger", "--tested", "--no-write"]) == 0
    out = capsys.readouterr().out
    assert "nad/4a" in out
    assert "nad/4b" not in out
    (tmp_path / "reproductions" / "stray").mkdir()
    assert run(["ledger"]) == 1
    assert "stray is not a biascope run folder" in capsys.readouterr().err


def test_keep_then_ledger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["run", "nad/fig4a", "--out", "r"]) == 0
    assert run(["keep", "r"]) == 0
    assert "reproductions/nad-fig4a-smoke-cpu" in capsys.readouterr().out
    assert run(["keep", "r"]) == 1
    assert "--replace" in capsys.readouterr().err
    assert run(["keep", "r", "--replace"]) == 0
    assert run(["ledger"]) == 0
    assert ">nad-fig4a-smoke-cpu</a>" in (tmp_path / "reproductions" / "ledger.html").read_text()
    assert run(["keep", "nowhere"]) == 1


def test_bench_outside_a_checkout_says_where_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from biascope.cli import bench

    with pytest.raises(InputError, match="clone the repository"):
        bench.find_folder(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    guard = 'import sys\nif __name__ == "__main__":\n    sys.exit(3 if "fail" in sys.argv else 0)\n'
    for name in ("harness", "table", "tiny"):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(guard)
    (tmp_path / "benchmarks" / "rivals.py").write_text("import sys\n")  # there to be imported
    assert run(["bench"]) == 0
    assert capsys.readouterr().out.strip() == "tiny"
    assert run(["bench", "tiny"]) == 0
    assert run(["bench", "tiny", "fail"]) == 1
    assert run(["bench", "tin"]) == 1
    assert "did you mean tiny" in capsys.readouterr().err


def test_bench_lists_the_benchmarks_of_the_repository(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert run(["bench"]) == 0
    listed = set(capsys.readouterr().out.split())
    assert {"ntk", "curvature", "patterns"} <= listed
    assert not listed & {"harness", "rivals", "curvature_rivals", "table"}


def test_without_the_extras_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('no typer', name='typer')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "biascope", "list"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "the biascope command needs typer: pip install 'biascope[cli,plot]'"


def test_study_options_and_shapes() -> None:
    assert study_options(["--a", "1", "--b=2", "--flag", "--c", "-3"]) == {
        "a": "1",
        "b": "2",
        "flag": "true",
        "c": "-3",
    }
    assert shape(None) is None
    for text in ("3x8x8", "3X8X8", "(3, 8, 8)", "[3,8,8]", "3 8 8", "3,8,8,", " 3 × 8 × 8 "):
        assert shape(text) == (3, 8, 8)
    for text in ("", "3,,8", "3,8.0", "-1,8", "0", "n,3,8,8"):
        with pytest.raises(InputError, match="should be the shape of one input"):
            shape(text)


def test_directions_and_geometries_are_files_and_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is written is what the library gives; a file is shown again, and compared with another."""
    small = ["--input", "1,8,8", "--set", "hidden=(8,)"]
    assert run(["nads", "mlp", *small, "--networks", "300", "--seed", "3"]) == 0
    stored = tmp_path / "runs" / "nads-mlp.safetensors"
    found = bs.geometry.NADs.load(stored)
    again = bs.nads(
        lambda: bs.nets.build("mlp", **{**bs.nets.info("mlp").options_for((1, 8, 8)), "hidden": (8,)}),
        (1, 8, 8), 300, seed=3,
    )  # fmt: skip
    assert torch.equal(found.eigenvalues, again.eigenvalues)
    assert stored.with_suffix(".png").stat().st_size > 1000
    capsys.readouterr()
    assert run(["nads", str(stored), "--against", str(stored)]) == 0
    said = capsys.readouterr().out
    assert "Eigenvalues above the band that an isotropic network would fill: " in said.replace("\n", " ")
    assert re.search(r"those of\s.*: 1\.000 \(1\), 1\.000 \(3\), 1\.000 \(10\)", said.replace("\n", " "))
    assert run(["geometry", "mlp", *small, "--analytic", "--out", "exact.safetensors"]) == 0
    assert run(["geometry", "mlp", *small, "--networks", "200", "--against", "exact.safetensors"]) == 0
    assert "Correlation with exact.safetensors: " in capsys.readouterr().out
    exact = bs.geometry.AverageGeometry.load("exact.safetensors").matrix
    assert torch.allclose(exact, torch.eye(64, dtype=torch.float64) / (3 * 64 * 6))  # (1 / 3 D) 6^-L


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nads", "mlp", "--networks", "many"], "--networks 'many' should be a number, or auto"),
        (["nads", "mlp", "--out", "a.txt"], "the file is a .safetensors file"),
        (["nads", "mlp", "--against", "none.safetensors"], "none.safetensors"),
        (["nads", "mlp", "--method", "guess"], "guess"),
        (["nads", "mlp", "--networks", "4", "--set", "outputs=3", "--output", "3"], "has 3 outputs, from 0 on"),
        (["geometry", "lenet", "--analytic"], "MaxPool2d"),
        (["geometry", "mlp", "--analytic", "--output", "0"], "leave --output out"),
        (["geometry", "none.safetensors"], "none.safetensors"),
    ],
)
def test_directions_that_cannot_be_had(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(arguments) == 1
    assert message in capsys.readouterr().err
