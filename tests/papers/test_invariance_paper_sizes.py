"""The paper sizes of the geometric invariance studies have the numbers of the paper, and say where it gives none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from biascope.studies import Run, StudyResult, configure, execute, find, studies
from biascope_papers.gih import fig2_8, fig5, fig6, tables
from biascope_papers.gih.fig3_12_13 import Following
from biascope_papers.gih.fig10_14 import BOUNDARIES, Sweep, eps_of
from biascope_papers.gih.training import Protocol

ALL = ("mlp", "lenet", "resnet18", "vit")
STRUCTURED = ("lenet", "resnet18", "vit")
DRAWN = {"networks": 10_000, "heads": 1}  # for G at the start
IMAGES = {"side": 32, "source": "cifar10"}
# the synthetic protocol of the NAD paper (Figs 4 and 5), its sinusoidal boundary for 50 epochs instead of 20
SYNTHETIC = {"epochs": 20, "lr": 0.5, "clip_norm": 0.5}
SWEPT = {**SYNTHETIC, **DRAWN, "boundaries": BOUNDARIES, "more_epochs": 2.5}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gih/fig1": {**SYNTHETIC, **DRAWN, "nets": ("mlp", "resnet18"), "side": 32, "sigma": 0.5, "inner": 2.0,
                 "radius": 3.0, "n_train": 10_000, "n_test": 2000, "batch_size": 128},
    "gih/fig2": {**DRAWN, **IMAGES, "nets": ALL, "per_class": 5000, "runs": 25, "epochs": 100, "lr": 0.1,
                 "momentum": 0.9, "clip_norm": 5.0},
    "gih/fig3": {**DRAWN, "nets": ALL, "side": 32, "n": 10_000, "runs": 25, "epochs": 100, "large_epochs": 50,
                 "batch_size": 128, "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5},
    "gih/fig4": {**SWEPT, **IMAGES, "nets": STRUCTURED, "stride": 30, "noise": 0.2, "n_train": 10_000, "repeats": 5,
                 "sinusoid": "channel"},
    "gih/fig5": {**SYNTHETIC, **DRAWN, "nets": ALL, "side": 32, "stride": 10, "plane": (), "eps": 1.0,
                 "n_train": 10_000, "n_test": 2000, "repeats": 5, "batch_size": 128},
    "gih/fig6": {**DRAWN, **IMAGES, "nets": STRUCTURED, "per_class": 5000, "repeats": 5, "epochs": 50, "lr": 0.1,
                 "momentum": 0.9, "clip_norm": 0.5},
    "gih/fig7": {**IMAGES, "per_class": 5000},
    "gih/fig8": {**DRAWN, **IMAGES, "nets": ("mlp", "lenet", "vgg11", "resnet18"), "per_class": 5000, "runs": 25,
                 "epochs": 100, "lr": 1e-3, "large_lr": 0.0},
    "gih/fig9": {"nets": ALL, "side": 32, "networks": 10_000, "probe_std": 1e-3},
    "gih/fig10": {**SWEPT, "nets": ALL, "side": 32, "stride": 10, "n_train": 10_000, "n_test": 2000,
                  "batch_size": 128, "angle": "text"},
    "gih/fig11": {**SWEPT, **IMAGES, "noise": 0.2, "n_train": 50_000, "sinusoid": "channel"},
    "gih/fig12": {**DRAWN, "net": "resnet18", "side": 32, "sizes": (10_000, 20_000, 40_000, 60_000, 80_000, 100_000),
                  "batch_size": 128, "runs": 25, "epochs": 50, "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5},
    "gih/fig14": {**DRAWN, "net": "resnet18", "rates": (1.0, 0.1, 0.01, 0.001), "side": 32, "stride": 10,
                  "n_train": 10_000, "n_test": 2000, "boundaries": BOUNDARIES, "epochs": 20, "more_epochs": 2.5},
    "gih/fig15": {},
    "gih/table1": {**DRAWN, **IMAGES, "nets": STRUCTURED, "rates": (30, 50, 70, 90), "n_train": 50_000, "repeats": 5,
                   "epochs": 50, "lr": 0.2, "clip_norm": 0.5, "per_class": False},
    "gih/table2": {**DRAWN, **IMAGES, "nets": STRUCTURED, "rates": (10, 20, 30, 40, 50, 60, 70, 80, 90),
                   "n_train": 50_000, "repeats": 5, "epochs": 50, "lr": 0.2, "clip_norm": 0.5, "per_class": False},
}  # fmt: skip
PUBLISHED["gih/conjecture1"] = {**IMAGES, "nets": ALL, "per_class": 5000}
PUBLISHED["gih/conjecture2"] = PUBLISHED["gih/fig2"]
PUBLISHED["gih/curvature"] = {**IMAGES, "nets": ALL, "channels": 3, "runs": 25}
PUBLISHED["gih/probes"] = {**SYNTHETIC, **DRAWN, "nets": STRUCTURED, "side": 32, "n_train": 10_000, "n_test": 2000}
PUBLISHED["gih/proposition-a1"] = {**IMAGES, "nets": ALL}
PUBLISHED["gih/theory"] = {}
PUBLISHED["gih/fig13"] = PUBLISHED["gih/fig12"]
# what the paper does not state, nor its published code: the study's own choice, which its options must say
UNSTATED = {
    "gih/conjecture1": ("networks", "probes"),
    "gih/conjecture2": ("energy", "probes"),
    "gih/curvature": ("per_class",),
    "gih/probes": ("repeats",),
    "gih/fig3": ("n", "probes"),
    "gih/fig2": ("probes",),
    "gih/fig10": ("repeats",),
    "gih/fig7": ("kernel",),
}


def test_paper_sizes_are_the_papers() -> None:
    assert set(PUBLISHED) == {name for name, study in studies().items() if study.paper == "invariance"}
    for name, wanted in PUBLISHED.items():
        found = find(name).values("paper")
        for option, value in wanted.items():
            assert found[option] == value, (name, option)


def test_what_the_paper_does_not_state_is_said() -> None:
    for name, options in UNSTATED.items():
        told = {option.name: option.help for option in find(name).options}
        for option in options:
            assert "not stated" in told[option], (name, option)


def test_signals_of_figure_10() -> None:
    """The caption: 0.9 linear, 2.0 quadratic; sinusoidal 2.1 for MLP and LeNet, 5.0 for ResNet18 and ViT."""
    table = {net: tuple(eps_of(net, boundary) for boundary in BOUNDARIES) for net in ALL}
    assert table["mlp"] == table["lenet"] == (0.9, 2.0, 2.1)
    assert table["resnet18"] == table["vit"] == (0.9, 2.0, 5.0)


def test_protocols_are_made_of_the_options() -> None:
    sweep = Sweep()
    for boundary, epochs in (("linear", 20), ("quadratic", 20), ("sinusoidal", 50)):
        made = sweep.along(boundary, 0.5)  # type: ignore[arg-type]
        assert (made.epochs, made.batch_size, made.lr, made.momentum, made.weight_decay) == (epochs, 128, 0.5, 0.0, 0.0)
        assert (made.clip_norm, made.schedule) == (0.5, "linear")
    descent = Following().descent(100, 128)
    assert (descent.epochs, descent.lr, descent.batch_size, descent.momentum) == (100, 0.1, 128, 0.9)
    assert (descent.optimiser, descent.clip_norm) == ("sgd", 0.5)


def test_gradient_descent_of_figure_2_takes_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(run: Run, networks: Any, options: Any, descent_of: Any, **more: Any) -> StudyResult:
        seen.append(descent_of("lenet"))
        return StudyResult()

    monkeypatch.setattr(fig2_8, "correlations", spy)
    for name in ("gih/fig2", "gih/fig8"):
        execute(Run.create(tmp_path / name.replace("/", "-"), configure(name, "paper")))
    plain, adam = seen
    assert (plain.epochs, plain.lr, plain.momentum, plain.batch_size, plain.optimiser) == (100, 0.1, 0.9, 0, "sgd")
    assert plain.clip_norm == 5.0
    assert (adam.epochs, adam.lr, adam.batch_size, adam.optimiser, adam.clip_norm) == (100, 1e-3, 0, "adam", None)


SMALL: dict[str, Any] = {"nets": "lenet", "side": 16, "networks": 8, "heads": 8}


@pytest.mark.parametrize(
    ("name", "module", "options", "wanted"),
    [
        ("gih/fig5", fig5, {"n_train": 50, "n_test": 20, "stride": 255}, Protocol(20, 128, 0.5, 0.0, 0.0, 0.5)),
        ("gih/fig6", fig6, {"source": "synthetic", "per_class": 40}, Protocol(50, 128, 0.1, 0.9, 0.0, 0.5)),
        ("gih/table1", tables, {"source": "synthetic", "n_train": 200}, Protocol(71, 128, 0.2, 0.9, 5e-4, 0.5)),
    ],
)
def test_training_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: Any, options: Any, wanted: Protocol
) -> None:
    """What the paper sizes hand to the trainer; Table 1 at 30 % removed takes 50 / 0.7 epochs, for as many steps."""
    seen: list[Protocol] = []

    def spy(run: Run, key: str, factory: Any, tasks: Any, tests: Any, protocol: Protocol, **more: Any) -> Any:
        seen.append(protocol)
        return torch.full((len(tasks),), 0.5), torch.full((len(tasks), len(tests)), 0.5)

    monkeypatch.setattr(module, "train_tasks", spy)
    execute(Run.create(tmp_path / "r", configure(name, "paper", overrides={**SMALL, **options})))
    for field in ("epochs", "batch_size", "lr", "momentum", "weight_decay", "clip_norm", "schedule"):
        assert getattr(seen[0], field) == getattr(wanted, field), field
