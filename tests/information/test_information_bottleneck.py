"""The discrete bottleneck against descent on the same objective, and its limits."""

import math

import pytest
import torch
from torch import Tensor

from biascope.information import discrete_bottleneck
from biascope.support.errors import InputError


def table(seed: int = 0, x: int = 5, y: int = 3) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    p = torch.rand(x, y, generator=rng, dtype=torch.float64) ** 3
    return p / p.sum()


def objective(joint: Tensor, encoder: Tensor, beta: float) -> Tensor:
    """H(y|z) + beta I(x; z), from the joint tables by the definitions."""
    p_xz = joint.sum(1, keepdim=True) * encoder
    p_yz = joint.T @ encoder
    outer = p_xz.sum(1, keepdim=True) * p_xz.sum(0, keepdim=True)
    information = (p_xz * (p_xz / outer).log()).sum()
    return -(p_yz * (p_yz / p_yz.sum(0)).log()).sum() + beta * information


@pytest.mark.parametrize("beta", [0.05, 0.2, 0.5])
def test_equals_the_best_of_many_descents(beta: float) -> None:
    joint = table()
    found = discrete_bottleneck(joint, beta)
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 5, 5, generator=rng, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(1500):
        values = torch.vmap(lambda row: objective(joint, row.softmax(1).clamp_min(1e-12), beta))(logits)
        optimizer.zero_grad()
        values.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    values = values.detach()
    assert found.lagrangian == pytest.approx(float(values.min()), abs=1e-4)
    assert found.lagrangian <= float(values.min()) + 1e-9
    again = objective(joint, found.encoder.clamp_min(1e-300), beta)
    assert found.lagrangian == pytest.approx(float(again), abs=1e-12)


def test_a_higher_price_buys_less() -> None:
    joint = table(3)
    nats = [discrete_bottleneck(joint, beta).nats for beta in (0.01, 0.1, 0.3, 0.6, 1.0)]
    assert nats == sorted(nats, reverse=True)
    assert nats[-1] == pytest.approx(0, abs=1e-6)
    p_y, p_x = joint.sum(0), joint.sum(1)
    h_y_x = -float(torch.xlogy(joint, joint / p_x[:, None]).sum())
    free = discrete_bottleneck(joint, 1e-3)
    assert free.uncertainty == pytest.approx(h_y_x, abs=2e-3)  # the plain classifier: nothing is thrown away
    assert discrete_bottleneck(joint, 2.0).uncertainty == pytest.approx(-float(torch.xlogy(p_y, p_y).sum()), abs=1e-6)
    assert nats[0] > math.log(2) / 2


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InputError, match="table"):
        discrete_bottleneck(torch.ones(3), 0.1)
    for beta in (0.0, math.nan):
        with pytest.raises(InputError, match=f"beta={beta}"):
            discrete_bottleneck(torch.ones(3, 2), beta)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(InputError, match="finite, not negative"):
            discrete_bottleneck(torch.tensor([[1.0, bad]]), 0.1)
    with pytest.raises(InputError, match="not all 0"):
        discrete_bottleneck(torch.ones(0, 2), 0.1)


def test_rows_of_the_encoder_stay_those_of_x() -> None:
    joint = table()
    without = discrete_bottleneck(joint, 0.1)
    found = discrete_bottleneck(torch.cat([joint[:2], torch.zeros(1, 3), joint[2:]]), 0.1)  # x = 2 never occurs
    assert found.encoder.shape == (6, 5)
    assert torch.equal(found.encoder[[0, 1, 3, 4, 5]], without.encoder)
    torch.testing.assert_close(found.encoder[2], joint.sum(1) @ without.encoder)
    assert found.lagrangian == pytest.approx(without.lagrangian)
