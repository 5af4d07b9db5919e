"""Taylor residual and linearised prediction."""

import copy
import math

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError
from biascope.tangent import linearized_prediction, taylor_residual
from tangent.linearize_zoo import conv_net, displace, images, mlp


def test_prediction_is_the_tangent_model() -> None:
    net, x = conv_net(), images(7)
    moved = copy.deepcopy(net)
    displace(moved)
    expected = bs.tangent.posthoc(net, moved)(x)
    for state in (moved, moved.state_dict(), dict(moved.named_parameters())):
        torch.testing.assert_close(linearized_prediction(net, state, x), expected)
    torch.testing.assert_close(linearized_prediction(net, moved, [x[:3], x[3:]]), expected)


def test_residual_by_hand_and_linear_in_the_displacement() -> None:
    net, x = mlp(), torch.randn(6, 4, dtype=torch.float64)
    start = {k: p.detach().clone() for k, p in net.named_parameters()}
    tau = {k: torch.randn_like(p) for k, p in start.items()}
    J = bs.Jacobian(net, x, precision="float64")
    found = []
    for a in (1e-1, 1e-2, 1e-3):
        theta = {k: start[k] + a * tau[k] for k in start}
        Jv = J @ {k: a * tau[k] for k in start}
        change = torch.func.functional_call(net, theta, (x,)).detach() - net(x).detach()
        found.append(taylor_residual(net, theta, x, precision="float64"))
        assert found[-1] == pytest.approx(float((change - Jv).norm() / Jv.norm()), rel=1e-8)
        assert taylor_residual(net, theta, [x[:2], x[2:]]) == pytest.approx(found[-1], rel=1e-6)
    assert math.log10(found[1] / found[2]) == pytest.approx(1, abs=0.05)


def test_no_displacement_and_wrong_names() -> None:
    net = nn.Linear(3, 2)
    assert math.isnan(taylor_residual(net, net, torch.eye(3)))
    with pytest.raises(InputError, match="params: the model has no 'other'"):
        taylor_residual(net, {"other": torch.ones(1)}, torch.eye(3))
    with pytest.raises(InputError, match=r"'weight' has shape \[3\], the model has \[2, 3\]"):
        linearized_prediction(net, {"weight": torch.ones(3)}, torch.eye(3))
