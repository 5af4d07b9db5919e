"""Slips of the hand with probes: refused before anything is recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from biascope import probes
from biascope.probes.function_metrics import group_losses
from biascope.probes.groups import example_losses
from biascope.probes.kernel_metrics import spectrum
from biascope.probes.weight_metrics import input_velocity
from biascope.support.errors import BiascopeError, InputError

X, Y = torch.linspace(-1, 1, 18).reshape(6, 3).sin(), torch.tensor([0, 1, 1, 0, 1, 0])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def view(**options: Any) -> probes.View:
    return probes.View.of(net(), X, **({"y": Y} | options))


@pytest.mark.parametrize("y", [1.0, Y[:4], Y[0]])
def test_labels_are_one_tensor_for_the_batch(y: Any) -> None:
    with pytest.raises(InputError, match="y: expected a tensor"):
        view(y=y)
    with pytest.raises(InputError, match="y_probe: expected a tensor"):
        probes.Probe(net(), X, y)
    with pytest.raises(InputError, match=r"groups\['a'\]: expected a tensor of 6 labels, got"):
        view(groups={"a": (X, y)})


@pytest.mark.parametrize("groups", [{"a": 1.5}, {"a": [-1]}])
def test_groups_are_named_indices(groups: Any) -> None:
    with pytest.raises(InputError, match="groups"):
        view(groups=groups)
    with pytest.raises(InputError, match="groups"):
        probes.Probe(net(), X, Y, groups=groups)


def test_a_group_there_is_not() -> None:
    with pytest.raises(InputError, match="group='esay' is not known; did you mean easy"):
        view(groups={"easy": [0]}).group_labels("esay")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (nn.functional.one_hot(Y), r"cross_entropy loss of 2 outputs: y has shape \[6, 2\]; 1 value"),
        (Y[:, None].expand(6, 3), r"y has shape \[6, 3\]"),
        (Y - 1, "y must be classes, whole numbers from 0 to 1"),
        (Y[:4], "y: expected a tensor of 6 labels"),
    ],
)
def test_classes(y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        example_losses(torch.zeros(6, 2), y)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_classes_of_any_whole_type_are_the_same(kind: torch.dtype) -> None:
    out = X[:, :2]
    assert torch.equal(example_losses(out, Y[:, None].to(kind)), example_losses(out, Y))
    assert torch.equal(example_losses(out, Y.to(kind)), example_losses(out, Y))


def test_a_loss_of_ones_own_gives_a_tensor() -> None:
    with pytest.raises(InputError, match="loss_fn must return a tensor of one loss per example"):
        example_losses(X, Y, lambda out, y: 0.5)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("bad", [None, "0.1", [0.1], float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize(
    "make",
    [
        probes.EveryEpochs,
        lambda v: probes.LogSteps(5, v),
        probes.LossGrid,
        lambda v: probes.LossGrid(0.5, "1" if v is None else v),  # type: ignore[arg-type]  # None is the default
        lambda v: probes.LossGrid(0.5, 1.0, v),
    ],
)
def test_numbers_of_schedules(make: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InputError, match=r"every|factor|start|smoothing"):
        make(bad)


@pytest.mark.parametrize("bad", [None, "10", 1.5, True, 0, -1])
def test_counts_of_schedules(bad: Any) -> None:
    for make in (probes.EverySteps, lambda v: probes.LogSteps(v), lambda v: probes.LossGrid.decades(v)):
        with pytest.raises(InputError, match=r"every|first|per_decade"):
            make(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": None}, "metrics=None"),
        ({"groups": [0, 1]}, "groups: expected a dict"),
        ({"metrics": ["ntk_aligment"]}, "did you mean ntk_alignment"),
        ({"max_overhead": "0.1"}, "max_overhead"),
        ({"out": 3}, "out=3"),
        ({"params": 0}, "params=0"),
    ],
)
def test_options_of_a_probe(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        probes.Probe(net(), X, Y, **options)


@pytest.mark.parametrize("bad", ["1", [1], float("nan"), -1, torch.ones(2)])
def test_epochs_and_steps_are_numbers(bad: Any) -> None:
    probe = probes.Probe(net(), X, metrics=["sign_similarity"], schedule=1)
    with pytest.raises(InputError, match="epoch="):
        probe.step(0.5, epoch=bad)
    with pytest.raises(InputError, match="step must be"):
        probe.step(0.5, step=bad)
    assert [record.step for record in probe.finish()] == [0]


def test_records_go_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(BiascopeError, match=r"cannot write .*run: File exists"):
        probes.Probe(net(), X, metrics=["sign_similarity"], out=tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"records\.jsonl"):
        probes.read_records(tmp_path)


@pytest.mark.parametrize("metric", [probes.ntk_alignment, spectrum, group_losses])
def test_metrics_are_of_views(metric: Callable[[Any], Any]) -> None:
    for bad in (None, net(), X):
        with pytest.raises(InputError, match="view: expected a View"):
            metric(bad)


def test_deviations_and_grids() -> None:
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="std="):
            input_velocity(view(previous=view(), step=1), std=bad)


def test_paths_through_inputs_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"cannot take inputs \[n, 5\].*layer '0'"):
        probes.path_norm(net(), torch.ones(2, 5))


def test_divergences_of_nan() -> None:
    with pytest.raises(InputError, match="mean: expected a tensor"):
        probes.bounds.gaussian_kl("0", 1.0, 0.0, 1.0)  # type: ignore[arg-type]
