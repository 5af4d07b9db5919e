"""The orderings of the paper (check E9) on a stand-in: digits turned and inverted, one small network, one seed."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.editing import TaskVector, disentanglement, fine_tune, task_addition

TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "invert": torch.neg,
    "quarter": lambda v: torch.rot90(v, 1, (1, 2)),
    "half": lambda v: torch.rot90(v, 2, (1, 2)),
    "mirror": lambda v: v.flip(2),
    "upside": lambda v: v.flip(1),
    "plain": lambda v: v,
}
TASKS = ("invert", "quarter")


class Measured(NamedTuple):
    single: float  # mean test accuracy of theta0 + tau_t
    multi: float  # of the merged network
    xi: float  # mean over [0, 1]^2
    error: float  # its standard error


@pytest.fixture(scope="module", name="measured")
def _measured() -> dict[tuple[str, str], Measured]:
    """{(start, kind): Measured} for a pre-trained and a random start, and the three kinds of predictors."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16 - 0.3)[order]
    labels = torch.tensor(digits.target)[order]

    def data(turn: str, low: int, high: int) -> tuple[Tensor, Tensor]:
        return TURNS[turn](images[low:high]).reshape(high - low, 64), labels[low:high]

    torch.manual_seed(0)
    random = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    mixture = [data(turn, 0, 500) for turn in TURNS]
    pretrained = fine_tune(random, mixture, steps=200, lr=1e-3, weight_decay=0.0).model
    found = {}
    for start, net in (("pre-trained", pretrained), ("random", random)):
        vectors: list[dict[str, TaskVector]] = [
            {
                t: fine_tune(net, data(t, 500, 1100), tangent=k, steps=200, lr=1e-3, weight_decay=0.0).vector
                for t in TASKS
            }
            for k in (False, True)
        ]
        held_out, test = ({t: data(t, *span) for t in TASKS} for span in ((1100, 1300), (1300, 1797)))
        lin = bs.linearize(net)
        for kind, model, taus in (
            ("non-linear", net, vectors[0]),
            ("post-hoc", lin, vectors[0]),
            ("linear", lin, vectors[1]),
        ):
            added = task_addition(model, taus, held_out, test)
            single = sum(float(s.mean()) for s in added.single.values()) / 2
            inputs = {t: x for t, (x, _) in test.items()}
            xi, error = disentanglement(model, taus, inputs, [0, 0.25, 0.5, 0.75, 1]).box()
            found[start, kind] = Measured(single, added.absolute()[0], xi, error)
    return found


@pytest.mark.slow
def test_disentanglement_comes_from_pretraining(measured: dict[tuple[str, str], Measured]) -> None:
    for kind in ("non-linear", "post-hoc", "linear"):
        before, after = measured["random", kind], measured["pre-trained", kind]
        assert after.xi + 5 * (after.error + before.error) < 0.6 * before.xi
    assert measured["random", "non-linear"].single > 0.9
    assert measured["random", "non-linear"].multi < 0.7 < measured["pre-trained", "non-linear"].multi


@pytest.mark.slow
def test_orderings_of_the_predictors(measured: dict[tuple[str, str], Measured]) -> None:
    for start in ("pre-trained", "random"):
        plain, posthoc, linear = (measured[start, kind] for kind in ("non-linear", "post-hoc", "linear"))
        assert posthoc.single < min(plain.single, linear.single)
        assert linear.xi < plain.xi + 2 * (linear.error**2 + plain.error**2) ** 0.5
        assert posthoc.xi < plain.xi
    assert measured["random", "linear"].multi > measured["random", "non-linear"].multi
