"""Slips of the hand with task vectors: none turns training round, and none scores a broken network."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from biascope import editing
from biascope.editing import TaskVector, merging, zeroshot
from biascope.support.errors import InputError

X, Y = torch.linspace(-1, 1, 18).reshape(6, 3).sin(), torch.tensor([0, 1, 1, 0, 1, 0])


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 2)


def tau() -> TaskVector:
    return TaskVector(net(), net(1))


def broken() -> nn.Module:
    model = net()
    with torch.no_grad():
        model.get_parameter("bias")[0] = torch.nan
    return model


@pytest.mark.parametrize("tangent", [False, True])
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y - 1, "labels must be classes from 0 to 1, or -100"),
        (Y + 1, "labels must be classes from 0 to 1"),
        (Y[0], r"labels are needed, one for each of 6 examples, not \[\]"),
        (Y[:4], r"one for each of 6 examples, not \[4\]"),
    ],
)
def test_labels_of_fine_tuning(y: Any, message: str, tangent: bool) -> None:
    with pytest.raises(InputError, match=message):
        editing.fine_tune(net(), (X, y), steps=2, batch_size=3, tangent=tangent)


def test_probabilities_and_ignored_labels_are_what_cross_entropy_takes() -> None:
    soft = nn.functional.one_hot(Y).float()
    hard = editing.fine_tune(net(), (X, Y), steps=2, batch_size=3, lr=0.1).losses
    torch.testing.assert_close(editing.fine_tune(net(), (X, soft), steps=2, batch_size=3, lr=0.1).losses, hard)
    some = torch.where(torch.arange(6) == 5, -100, Y)
    assert bool(editing.fine_tune(net(), (X, some), steps=2, batch_size=3, lr=0.1).losses.isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": -1.0}, "clip=-1.0: a finite number above 0 is needed"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"steps": 2.0}, "steps must be an integer"),
        ({"batch_size": None}, "batch_size must be an integer"),
        ({"tangent": "yes"}, "tangent='yes': True or False"),
    ],
)
def test_options_of_fine_tuning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        editing.fine_tune(net(), (X, Y), **({"steps": 2, "batch_size": 3} | options))


def test_inputs_that_do_not_fit_are_explained() -> None:
    with pytest.raises(InputError, match=r"cannot take inputs \[n, 2\]"):
        editing.fine_tune(net(), (X[:, :2], Y), steps=2, batch_size=3)


def test_a_broken_network_has_no_score_to_begin_with() -> None:
    """Its predictions would all count as wrong: the best negation there is."""
    with pytest.raises(InputError, match="target: the outputs of theta0 have a NaN"):
        editing.task_negation(broken(), tau(), (X, Y), (-X, Y), alphas=[0.0, 1.0])


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (X, Y[:1], "labels must be 6 integers between 0 and 2"),  # would broadcast
        (X, Y.float(), "labels must be 6 integers"),
    ],
)
def test_accuracies(outputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        merging.accuracy(outputs, labels)


@pytest.mark.parametrize("bad", [None, {"weight": torch.zeros(2, 3)}, net(), TaskVector])
def test_what_is_no_task_vector(bad: Any) -> None:
    for call in (lambda: tau().dot(bad), lambda: editing.posthoc(net(), bad)):
        with pytest.raises(InputError, match="expected a TaskVector"):
            call()


def test_devices_there_are_not() -> None:
    with pytest.raises(InputError, match="device 'cpuu' is not a torch device"):
        tau().to("cpuu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": "X"}, "texts: expected a tensor, got str"),
        ({"temperature": torch.tensor([0.1, 0.2])}, "one number is needed"),
        ({"temperature": 0.0}, "temperature=0.0: a finite number above 0"),
    ],
)
def test_contrasts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        zeroshot.contrastive_loss(**({"images": X, "texts": X + 1} | change))
    whole = torch.arange(6)
    loss = [float(zeroshot.contrastive_loss(X, X + 1, target)) for target in (None, whole, whole.int())]
    assert loss[0] == loss[1] == loss[2]


def test_heads_of_texts() -> None:
    with pytest.raises(InputError, match="prompts of 'x': expected a tensor, got ndarray"):
        zeroshot.zero_shot_head({"x": np.ones((2, 3))})  # type: ignore[dict-item]
