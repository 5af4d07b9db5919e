"""Geometric invariance with the user's own networks: taken as they are, tried out first, named safely."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from biascope.geometry import correlation
from biascope.reports import keep, write_study_page
from biascope.studies import Run, StudyResult, configure, execute
from biascope.support.errors import InputError
from biascope_papers.gih.geometries import initial_geometry
from biascope_papers.gih.networks import factory, named, shape_of

SCRIPT = """
import torch
from torch import nn

def cnn(channels=1, outputs=2):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
                         nn.Linear(196, outputs))
def colour(): return cnn(3)
def ten(): return cnn(3, 10)
def one(): return cnn(1, 1)
def three(): return cnn(1, 3)
def line(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
def scaled():
    made = line()
    nn.init.normal_(made[1].weight)
    with torch.no_grad():
        made[1].weight[:, :128] *= 10
    return made
class Item(nn.Module):  # vmap cannot
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.net = line()
    def forward(self, x):
        return self.net(self.scale.item() * x)
class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = line()
    def forward(self, x):
        return type("Output", (), {"logits": self.net(x)})()
"""
FEW = {"networks": "8", "heads": "2"}
OPTIONS = {  # what makes a smoke run of a small network smaller still
    "gih/fig1": {"n_train": "64", "n_test": "64", "epochs": "2"},
    "gih/fig2": {"per_class": "20", "epochs": "2", "runs": "2"},
    "gih/fig3": {"n": "64", "runs": "3", "large_epochs": "2"},
    "gih/fig4": {"n_train": "64", "n_test": "64", "epochs": "1"},
    "gih/fig5": {"n_train": "64", "n_test": "64", "epochs": "1"},
    "gih/fig6": {"per_class": "20", "epochs": "1", "counts": "2"},
    "gih/fig8": {"per_class": "20", "epochs": "2", "runs": "2"},
    "gih/fig9": {"networks": "64"},
    "gih/fig10": {"n_train": "64", "n_test": "64", "epochs": "1"},
    "gih/fig12": {"sizes": "32,64", "epochs": "2"},
    "gih/fig13": {"sizes": "32,64", "epochs": "2"},
    "gih/fig14": {"n_train": "64", "n_test": "64", "epochs": "1"},
    "gih/table1": {"n_train": "100", "epochs": "1", "rates": "50"},
}
COLOURED = {"gih/fig2": "colour", "gih/fig4": "colour", "gih/fig6": "colour", "gih/fig8": "colour", "gih/table1": "ten"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    where = tmp_path / "somewhere" / "lenet.py"  # a name that must not be taken for the paper's LeNet
    where.parent.mkdir()
    where.write_text(SCRIPT)
    return where


def begun(folder: Path, name: str, net: str, **options: Any) -> Run:
    few = {} if name == "gih/fig9" else FEW
    one = "net" if name in ("gih/fig12", "gih/fig13", "gih/fig14") else "nets"
    overrides = {**few, **OPTIONS[name], one: net, **options}
    return Run.create(folder / "r", configure(name, "smoke", overrides=overrides))


def run_with(folder: Path, name: str, net: str, **options: Any) -> tuple[Run, StudyResult]:
    run = begun(folder, name, net, **options)
    return run, execute(run)


@pytest.mark.parametrize("name", OPTIONS)
def test_studies_take_an_own_network(tmp_path: Path, script: Path, name: str) -> None:
    net = COLOURED.get(name, "cnn")
    run, result = run_with(tmp_path, name, f"{script}:{net}")
    short = f"lenet.py:{net}"
    assert " Not tested: networks " in result.measured
    assert f"taken as it is, with its own activations, normalisation and output layer: {short}." in result.measured
    assert not any(math.isnan(number.value) for number in result.numbers.values())
    shown = [result.measured, *result.numbers, *run.arrays(), *(c.title for c in result.figures)]
    assert not any("somewhere" in text for text in shown)  # nobody's business, and too long for a figure
    assert not any(set(":/ ") & set(chart.name) for chart in result.figures)
    assert (run.path / "networks.json").exists()


@pytest.mark.parametrize("name", ["gih/fig1", "gih/fig10"])
def test_pages_and_kept_runs_have_safe_names(tmp_path: Path, script: Path, name: str) -> None:
    run, _ = run_with(tmp_path, name, f"{script}:cnn,lenet")
    write_study_page(run.path)
    kept = keep(run.path, tmp_path / "kept").path
    assert "somewhere" not in kept.name
    for file in [*run.path.rglob("*"), *kept.rglob("*")]:
        inside = file.relative_to(tmp_path).parts[-1]
        assert not set(":/") & set(inside), inside
        assert "somewhere" not in inside
    assert "somewhere" not in (kept / "result.json").read_text()


def test_own_and_paper_networks_are_judged_together_and_said_so(tmp_path: Path, script: Path) -> None:
    run, result = run_with(tmp_path, "gih/fig1", f"mlp,{script}:cnn,lenet", n_train="32", epochs="1", seeds="2")
    assert "output layer: lenet.py:cnn." in result.measured
    assert result.measured.endswith("Not tested: networks resnet18.")
    assert "lenet.py:cnn, A: test accuracy, %" in result.numbers
    data, classes = (run.load_arrays("circles lenet.py:cnn B")[key] for key in ("data", "classes"))
    assert torch.allclose(data.norm(dim=1), torch.where(classes > 0, 3.0, 2.0), atol=1e-5)  # on the plane: circles
    radius = result.numbers["lenet.py:cnn: best accuracy from the first axis alone, %"].value
    assert radius == result.numbers["mlp: best accuracy from the first axis alone, %"].value


@pytest.mark.parametrize(
    ("name", "net", "match"),
    [
        ("gih/fig1", "one", r"lenet\.py:one gives 1 output; this study needs 2 logits, one for each class"),
        ("gih/fig3", "three", r"lenet\.py:three gives 3 outputs; this study needs 2 logits"),
        ("gih/fig10", "colour", r"\[1, 1, 16, 16\].*This study gives .*lenet\.py:colour inputs \[n, 1, 16, 16\] and"),
        ("gih/fig4", "cnn", r"This study gives .*lenet\.py:cnn inputs \[n, 3, 16, 16\] and needs 2 logits"),
        ("gih/table1", "colour", r"lenet\.py:colour gives 2 outputs; this study needs 10 logits"),
        ("gih/fig14", "one", r"lenet\.py:one gives 1 output"),
        ("gih/fig12", "none", "none"),
    ],
)
def test_networks_that_do_not_fit_are_refused_at_once(
    tmp_path: Path, script: Path, name: str, net: str, match: str
) -> None:
    run = begun(tmp_path, name, f"{script}:{net}")
    with pytest.raises(InputError, match=match):
        execute(run)
    assert not run.arrays()


def test_a_wrong_name_says_how_to_name_an_own_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"choose from mlp.*or name your own as module:factory or script\.py:factory"):
        shape_of(1, 16, ["resnet"])


def test_two_networks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"two networks are called nets\.py:cnn"):
        named(["a/nets.py:cnn", "lenet", "b/nets.py:cnn"])


def test_a_changed_network_is_not_resumed(tmp_path: Path, script: Path) -> None:
    run, result = run_with(tmp_path, "gih/table1", f"{script}:ten")
    assert execute(Run.resume(run.path)) == result
    script.write_text(SCRIPT.replace("nn.Conv2d(channels, 4, 3)", "nn.Conv2d(channels, 4, 3, bias=False)"))
    with pytest.raises(InputError, match=r"lenet\.py:ten builds another network than when the run began"):
        execute(Run.resume(run.path))


def test_geometry_of_an_own_network_is_sampled_as_it_is(tmp_path: Path, script: Path) -> None:
    """Independent normal weights, ten times as large in the upper half of the image: G is diagonal."""
    run = Run.create(tmp_path / "r", {"seed": 0})
    net = named([f"{script}:scaled"])[0]
    found = initial_geometry(run, net, (1, 16, 16), networks=1000, heads=4, groups=2)
    truth = torch.ones(256, dtype=torch.float64)
    truth[:128] = 100
    assert found.rows == 4000
    assert torch.allclose(found.matrix.diagonal(), 2 * truth, rtol=0.15)  # of the difference of two logits
    assert correlation(found.matrix, truth.diag()) > 0.97


def test_results_do_not_depend_on_where_the_script_lies(tmp_path: Path, script: Path) -> None:
    other = tmp_path / "elsewhere" / "lenet.py"
    other.parent.mkdir()
    other.write_text(SCRIPT)
    (_, first), (_, second) = (
        run_with(tmp_path / str(i), "gih/fig10", f"{where}:line") for i, where in enumerate((script, other))
    )
    assert first.numbers == second.numbers


@pytest.mark.parametrize("net", ["Held", "Item"])
def test_networks_that_hold_their_logits_or_do_not_stack_are_followed(tmp_path: Path, script: Path, net: str) -> None:
    _, result = run_with(tmp_path, "gih/fig3", f"{script}:{net}")
    assert result.numbers[f"lenet.py:{net}: mean velocity, G covariance"].value > 0


def test_factory_of_an_own_network_ignores_what_is_the_papers(script: Path) -> None:
    made = factory(f"{script}:cnn", (1, 16, 16), outputs=7, norm=False, activation="gelu")()
    assert made(torch.zeros(1, 1, 16, 16)).shape == (1, 2)
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in made)
