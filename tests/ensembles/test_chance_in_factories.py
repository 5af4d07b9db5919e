"""Factories whose chance the recorder cannot see, or would see by luck: called for each network, or refused."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import record, train_ensemble
from biascope.ensembles.recorder import Program
from biascope.support.errors import InputError


def layer_with(change: Callable[[nn.Linear], None]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        change(layer)
        return layer

    return build


def zero_by(chance: Callable[[nn.Linear], bool]) -> Callable[[], nn.Module]:
    """Zero the weight if chance wants it."""
    return layer_with(lambda layer: nn.init.zeros_(layer.weight) if chance(layer) else None)


@pytest.mark.parametrize(
    "chance",
    [
        lambda layer: random.random() < 0.1,
        lambda layer: np.random.rand() < 0.1,  # noqa: NPY002
        lambda layer: max(layer.bias.tolist()) > 0.54,
        lambda layer: layer.bias.detach().numpy().max() > 0.54,
        lambda layer: np.asarray(layer.bias.detach()).max() > 0.54,
    ],
    ids=["python", "numpy", "tolist", "to numpy", "array"],
)
def test_a_rare_branch_is_taken_as_often_as_in_the_factory(chance: Callable[[nn.Linear], bool]) -> None:
    """About one network in ten has a zero weight; two builds that agree are no proof that there is no branch.

    The bias is uniform within 3^-1/2 = 0.577: the largest of three exceeds 0.54 with probability 1 - (1.117/1.155)^3.
    """
    initialiser = record(zero_by(chance))
    assert not initialiser.recorded
    weights = initialiser.draw(seed=0, start=0, stop=500).params["weight"]
    zero = float((weights == 0).flatten(1).all(1).float().mean())
    assert 0.05 < zero < 0.15  # 0.095 to 0.1, with a standard deviation of 0.013


class Chosen(nn.Module):
    """One of two constant vectors, by a coin."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        torch.rand(skip)
        self.weight = nn.Parameter(torch.ones(3) if torch.rand(1) < 0.5 else torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, None]


@pytest.mark.parametrize("skip", range(4))
def test_chance_that_only_chooses_among_constants_is_seen(skip: int) -> None:
    """No tensor is filled at random, and two builds may choose alike: then all networks came out the same."""
    weights = record(lambda: Chosen(skip)).draw(seed=0, start=0, stop=200).params["weight"]
    assert 0.35 < float(weights.mean()) < 0.65  # 0.5 with a standard deviation of 0.035


def test_a_tensor_that_noise_is_added_to_keeps_what_it_held() -> None:
    """Uninitialised memory passed for zeros wherever it happened to hold some, in the check and not in the draws."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((40, 40), 5.0))
            with torch.no_grad():
                self.weight.add_(torch.randn(40, 40))

    initialiser = record(Noisy)
    assert initialiser.recorded
    weights = initialiser.draw(seed=0, start=0, stop=20).params["weight"]
    assert abs(float(weights.mean()) - 5) < 0.03  # 5.4 standard errors of 32,000 numbers
    assert abs(float(weights.std()) - 1) < 0.02


def test_what_a_step_reads_is_kept_and_what_it_overwrites_is_not() -> None:
    program, tensor = Program(), torch.arange(3.0)
    program.touch(tensor, overwritten=False)
    other = torch.arange(3.0)
    program.touch(other)
    kept = [program.storages[program.view(t).storage].before for t in (tensor, other)]
    assert kept[0] is not None
    assert kept[0].tolist() == [0.0, 1.0, 2.0]
    assert kept[1] is None


def test_factories_with_randomness_of_their_own_are_refused() -> None:
    """Their networks depend on how often they were called before, so no seed gives them back."""
    own, calls = torch.Generator().manual_seed(0), iter(range(100))

    def drawn(layer: nn.Linear) -> None:
        layer.weight.data.normal_(generator=own)

    def counted(layer: nn.Linear) -> None:
        layer.bias.data.fill_(next(calls))

    for change, name in ((drawn, "weight"), (counted, "bias")):
        with pytest.raises(InputError, match=f"'{name}' other numbers with the same seed"):
            record(layer_with(change))


def test_lazy_layers_are_refused_until_they_have_a_shape() -> None:
    with pytest.raises(InputError, match=r"'0\.weight' has no shape yet \(a lazy"):
        record(lambda: nn.Sequential(nn.LazyLinear(2)))

    def called() -> nn.Module:
        net = nn.Sequential(nn.LazyLinear(2))
        net(torch.ones(1, 3))
        return net

    initialiser = record(called)
    assert initialiser.recorded
    assert initialiser.draw(0, 0, 4).params["0.weight"].shape == (4, 2, 3)
    assert initialiser.variance_of("0.weight") == pytest.approx(1 / 9)


def test_draws_that_are_overwritten_are_no_seed() -> None:
    """A start from zero, and one that is zero nineteen times in twenty, were refused as if the factory set a seed."""

    def zeros(layer: nn.Linear) -> None:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)

    def mostly_zeros(layer: nn.Linear) -> None:
        for parameter in layer.parameters():
            parameter.data *= torch.rand(1) < 0.05

    done = train_ensemble(layer_with(zeros), [(torch.eye(3), torch.arange(3))] * 2, epochs=1, lr=0.1, clip_norm=None)
    assert done.losses[:, 0].tolist() == pytest.approx([math.log(3)] * 2)
    initialiser = record(layer_with(mostly_zeros))
    weights = initialiser.draw(seed=0, start=0, stop=2000).params["weight"]
    assert initialiser.recorded
    assert 0.03 < float((weights != 0).float().mean()) < 0.07  # 0.05 with a standard deviation of 0.005
