"""The study registry: hints become options, sizes override defaults, broken files are reported."""

import dataclasses
import importlib
import math
import random
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch

from biascope.studies import Chart, Estimate, Run, Series, StudyResult, configure, execute, find, load_result, studies
from biascope.studies import registry as registry_module
from biascope.studies.options import arguments, convert, merge, options_of
from biascope.studies.own_networks import fingerprint
from biascope.studies.registry import discover, study
from biascope.studies.runs import NETWORKS
from biascope.support.errors import CorruptError, InputError, near
from biascope.support.files import read_json, write_json

SIZES: dict[str, dict[str, object]] = {"smoke": {"n": 2}, "laptop": {}, "paper": {"n": 100}}


def example(
    run: Run,
    *,
    n: Annotated[int, "how many"] = 10,
    lr: float = 0.1,
    kind: Literal["a", "b"] = "a",
    widths: tuple[int, ...] = (4, 8),
    flag: bool = False,
    limit: int | None = None,
) -> StudyResult:
    """An example."""
    run.log(n=n)
    return StudyResult(f"n = {n}", {"n": Estimate(n)})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_STUDIES", studies())
    study("nad/registered", paper="nad", figure="99", statement="claim", sizes=SIZES)(example)


def test_hints_become_options() -> None:
    options = {option.name: option for option in options_of(example)}
    assert list(options) == ["n", "lr", "kind", "widths", "flag", "limit"]
    assert (options["n"].help, options["n"].type_name, options["n"].default) == ("how many", "int", 10)
    names = [options[name].type_name for name in ("kind", "widths", "limit")]
    assert names == ["a|b", "int,...", "int or none"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "5", 5),
        ("n", "1e3", 1000),
        ("n", "123456789012345678", 123456789012345678),
        ("n", 123456789012345678, 123456789012345678),  # as read back from config.json
        ("lr", "1e-3", 1e-3),
        ("kind", "b", "b"),
        ("widths", "1,2,3", (1, 2, 3)),
        ("widths", [3, 4], (3, 4)),
        ("flag", "yes", True),
        ("flag", False, False),
        ("limit", "none", None),
        ("limit", "4", 4),
    ],
)
def test_text_becomes_typed(name: str, text: object, value: object) -> None:
    option = next(option for option in options_of(example) if option.name == name)
    assert convert(option, text) == value
    assert type(convert(option, text)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("n", "2.5"), ("n", "x"), ("n", "inf"), ("n", "nan"), ("kind", "c"), ("flag", "maybe"), ("lr", "fast")],
)
def test_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(InputError, match=f"option {name}='{text}' should be"):
        merge(options_of(example), {name: text})


def scaled(run: Run, *, eps: float = 1.0, rates: tuple[float, ...] = (0.1,), limit: float | None = None) -> StudyResult:
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", "inf"),
        ("eps", "-Infinity"),
        ("eps", "nan"),
        ("eps", "1e400"),
        ("eps", math.inf),  # as Python reads it back from config.json
        ("rates", "0.1,nan"),
        ("rates", (math.inf,)),
        ("limit", "inf"),
    ],
)
def test_an_option_must_be_finite(name: str, value: object) -> None:
    with pytest.raises(InputError, match=re.escape(f"option {name}={value!r} should be a finite float")):
        merge(options_of(scaled), {name: value})


def test_no_study_asks_for_an_infinite_option() -> None:
    for name, found in studies().items():
        for size in found.sizes:  # converting again refuses what is not finite, defaults too
            assert merge(found.options, found.values(size)) == found.values(size), name


def test_unknown_option_gets_a_near_match() -> None:
    with pytest.raises(InputError, match="unknown option 'width'; did you mean widths"):
        merge(options_of(example), {"width": "1"})
    assert near("zzz", ["a", "b"]) == "; there is a, b"


def test_sizes_then_overrides(registered: None) -> None:
    found = find("nad/registered")
    assert [found.values(size)["n"] for size in ("smoke", "laptop", "paper")] == [2, 10, 100]
    assert configure("nad/registered", "paper", overrides={"n": "3"})["options"]["n"] == 3
    with pytest.raises(InputError, match="size 'huge' is not one of smoke, laptop, paper"):
        found.values("huge")


def test_execute_writes_the_result(registered: None, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "r", configure("nad/registered", "smoke"))
    with pytest.raises(InputError, match="is not finished"):
        load_result(run.path)
    execute(run)
    back, result, raw = load_result(run.path)
    assert back.finished
    assert result.measured == "n = 2"
    assert raw["study"] == "nad/registered"
    assert raw["seconds"] >= 0


BEGAN = "from torch import nn\ndef net(): return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU())\n"


def stops(run: Run, *, net: str = "lenet", nets: tuple[str, ...] = (), reuse: str = "") -> StudyResult:
    """Stores one part of two and fails."""
    if run.arrays():
        return StudyResult(net)
    run.cached("first", lambda: {"x": 1})
    raise InputError("stopped")


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of an own network that has stored its first part."""
    monkeypatch.setattr(registry_module, "_STUDIES", studies())
    sizes: dict[str, dict[str, object]] = {"smoke": {}, "laptop": {}, "paper": {}}
    study("nad/stops", paper="nad", figure="99", statement="claim", sizes=sizes)(stops)
    (tmp_path / "mine.py").write_text(BEGAN)
    options = {"net": f"{tmp_path / 'mine.py'}:net", "nets": "lenet", "reuse": "no_module:at_all"}
    run = Run.create(tmp_path / "r", configure("nad/stops", overrides=options))
    with pytest.raises(InputError, match="stopped"):
        execute(run)
    return run


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("8, 3)", "1, 3)", r"0\.weight was a parameter float32 \[8, 1, 3, 3\] and is a .* \[1, 1, 3, 3\]"),
        ("nn.ReLU()", "nn.BatchNorm2d(8)", r"1\.weight is new, parameter float32 \[8\]"),
        ("nn.ReLU()", "nn.Tanh()", "the same parameters in other layers"),
        ("net(): return", "net(): nn.Linear(1, 1); return", "other initial values"),
        ("nn.ReLU())", "nn.ReLU()).requires_grad_(False)", "is a frozen parameter"),
        ("nn.Conv2d(1, 8, 3), ", "", "no parameters"),
    ],
)
def test_a_run_goes_on_with_the_network_it_began_with(begun: Run, old: str, new: str, said: str) -> None:
    script = begun.path.parent / "mine.py"
    script.write_text(BEGAN.replace(old, new))
    with pytest.raises(InputError, match=said) as refused:
        execute(Run.resume(begun.path))
    if "no parameters" not in said:
        assert "mine.py:net builds another network than when the run began (" in str(refused.value)
        assert "put it back or start a new run" in str(refused.value)
    script.write_text(BEGAN)
    assert execute(Run.resume(begun.path)).numbers == {}


def test_a_changed_source_of_the_same_network_is_a_warning(begun: Run) -> None:
    (begun.path.parent / "mine.py").write_text(BEGAN + "# a note\n")
    with pytest.warns(UserWarning, match=r"the file of .*mine\.py:net is another than when .* began"):
        execute(Run.resume(begun.path))


def test_other_initial_values_of_another_torch_are_a_warning(begun: Run) -> None:
    """The same seed can give other numbers there: the network need not be another."""
    stored = read_json(begun.path / NETWORKS)
    spec = next(iter(stored["networks"]))
    assert list(stored["networks"]) == [spec]  # what names no network of one's own is not noted
    stored["networks"][spec]["values"] += 1
    write_json(begun.path / NETWORKS, stored)
    with pytest.raises(InputError, match="other initial values"):
        execute(Run.resume(begun.path))
    write_json(begun.path / NETWORKS, {**stored, "made_with": {"torch": "1.0", "processor": "another"}})
    with pytest.warns(UserWarning, match="with another torch or processor"):
        execute(Run.resume(begun.path))


def test_runs_without_a_note_of_their_networks_go_on(begun: Run) -> None:
    (begun.path / NETWORKS).unlink()
    (begun.path.parent / "mine.py").write_text(BEGAN.replace("8, 3)", "1, 3)"))
    assert execute(Run.resume(begun.path)).numbers == {}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"networks": {"a:b": {"tensors": 3}}}'])
def test_a_damaged_note_of_networks_comes_with_a_way_out(begun: Run, text: str) -> None:
    (begun.path / NETWORKS).write_text(text)
    with pytest.raises(CorruptError, match=r"networks\.json .*delete it and resume"):
        execute(Run.resume(begun.path))


def test_a_run_that_stored_nothing_may_begin_with_another_network(begun: Run) -> None:
    for file in (begun.path / "arrays").iterdir():
        file.unlink()
    (begun.path.parent / "mine.py").write_text(BEGAN.replace("8, 3)", "1, 3)"))
    with pytest.raises(InputError, match="stopped"):
        execute(Run.resume(begun.path))
    assert execute(Run.resume(begun.path)).numbers == {}


def test_a_fingerprint_leaves_random_states_alone(begun: Run) -> None:
    states = torch.get_rng_state(), random.getstate()
    spec = f"{begun.path.parent / 'mine.py'}:net"
    assert fingerprint(spec) == fingerprint(spec)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_unknown_study_and_device() -> None:
    with pytest.raises(InputError, match="no study is called 'nad/fig4'; did you mean nad/fig4"):
        find("nad/fig4")
    with pytest.raises(InputError, match="'gpu' is not a torch device"):
        configure("nad/fig4a", device="gpu")


def test_mistakes_in_a_study_file_are_named() -> None:
    with pytest.raises(InputError, match="unknown paper 'nab'; did you mean nad"):
        study("x", paper="nab", figure="1", statement="", sizes=SIZES)(example)
    with pytest.raises(InputError, match="needs the sizes smoke, laptop, paper"):
        study("x", paper="nad", figure="1", statement="", sizes={"smoke": {}})(example)
    with pytest.raises(InputError, match="unknown option 'm'"):
        study("x", paper="nad", figure="1", statement="", sizes={**SIZES, "paper": {"m": 1}})(example)

    def untyped(run: Run, *, n=3) -> StudyResult:  # type: ignore[no-untyped-def]
        raise AssertionError

    with pytest.raises(InputError, match="option 'n' of untyped needs a type hint"):
        study("x", paper="nad", figure="1", statement="", sizes={**SIZES, "smoke": {}, "paper": {}})(untyped)


def test_one_broken_file_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_studies"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("import a_package_that_does_not_exist")
    (package / "sub" / "__init__.py").write_text("1 / 0")
    (package / "whole.py").write_text("LOADED = True")
    monkeypatch.syspath_prepend(tmp_path)
    broken = discover("fake_studies")
    assert "a_package_that_does_not_exist" in broken["fake_studies.broken"]
    assert "ZeroDivisionError" in broken["fake_studies.sub"]
    assert sys.modules["fake_studies.whole"].LOADED
    importlib.invalidate_caches()


def test_all_real_studies_import_and_are_ordered() -> None:
    assert discover() == {}
    names = list(studies())
    assert names.index("nad/fig4a") < names.index("nad/fig4b")


def test_results_survive_json() -> None:
    chart = Chart("c", "t", "x", "y", (Series.of("s", [1, 2], [3, 4], [0.1, 0.2]),), alt="a")
    result = StudyResult("m", {"a": Estimate(1.0, 0.1, 3)}, (chart,))
    assert StudyResult.from_json(result.to_json()) == result
    with pytest.raises(CorruptError, match="not a study result"):
        StudyResult.from_json({"measured": "m"})
    with pytest.raises(InputError, match="series 's': lengths differ"):
        Series.of("s", [1], [1, 2])


def test_figures_named_after_an_own_network_can_be_files() -> None:
    charts = [Chart(name, "t", "x", "y", (), alt="a") for name in ("sweep-a/b.py:cnn", "sweep-lenet_1.5")]
    result = StudyResult("m", {}, tuple(charts))
    assert [chart.name for chart in result.figures] == ["sweep-a-b.py-cnn", "sweep-lenet_1.5"]
    assert StudyResult.from_json(result.to_json()) == result


def test_estimates_show_their_errors() -> None:
    assert str(Estimate.of([1.0, 2.0, 3.0])) == "2.00 ± 0.58 (n = 3)"
    assert str(Estimate.of([1.0])) == "1"
    assert str(Estimate(123.456, 12.0, 4)) == "123 ± 12 (n = 4)"
    assert str(Estimate(1.0, 0.0, 2)) == "1 ± 0 (n = 2)"
    with pytest.raises(InputError, match="at least one sample"):
        Estimate.of([])


@dataclasses.dataclass(frozen=True)
class Shared:
    sigma: Annotated[float, "noise"] = 3.0
    n: int = 10


GIVEN = Shared(sigma=2.0)


def test_fields_of_a_dataclass_are_options_and_come_back_whole() -> None:
    def figure(run: Run, *, shared: Shared = GIVEN, net: str = "lenet") -> None: ...

    options = options_of(figure)
    assert [(o.name, o.default, o.help) for o in options] == [
        ("sigma", 2.0, "noise"),
        ("n", 10, ""),
        ("net", "lenet", ""),
    ]
    values = merge(options, {"n": "7"})
    assert arguments(figure, values) == {"shared": Shared(2.0, 7), "net": "lenet"}


def test_two_options_of_one_name_are_refused() -> None:
    def figure(run: Run, *, shared: Shared = GIVEN, n: int = 3) -> None: ...

    with pytest.raises(InputError, match="two options called n"):
        options_of(figure)


def test_files_that_fail_for_one_reason_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"a.one": "ImportError: no torch", "a.two": "ImportError: no torch", "a.three": "SyntaxError: x"}
    monkeypatch.setattr(registry_module, "discover", lambda: broken)
    with pytest.raises(InputError) as refused:
        find("nad/nothing")
    assert str(refused.value).endswith(
        "; a.one and 1 more failed to import (ImportError: no torch); a.three failed to import (SyntaxError: x)"
    )
