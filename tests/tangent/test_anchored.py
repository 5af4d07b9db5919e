"""States that are handed over by name: what the model does not have is said."""

import warnings

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError
from biascope.tangent import linearized_prediction
from biascope.tangent.anchored import state_of


def test_unknown_names_are_refused_where_known_ones_are_missing() -> None:
    """A misspelt name was left out without a word, and the parameter stayed where it was."""
    net, w = nn.Linear(3, 2), torch.zeros(2, 3)
    with pytest.raises(InputError, match="params: the model has no 'bais'; what it has and is not given: 'bias'"):
        linearized_prediction(net, {"weight": w, "bais": torch.zeros(2)}, torch.eye(3))
    partial = linearized_prediction(net, {"weight": w}, torch.eye(3))  # left out on purpose
    assert torch.equal(partial, net.bias.detach().expand(3, 2))
    with pytest.raises(InputError, match=r"the model has no '1\.weight'"):
        state_of(nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2)), {"0.weight": w, "0.bias": w[:, 0]}, "at")


def test_names_beyond_a_whole_state_are_named() -> None:
    net = nn.Linear(3, 2)
    state = {**net.state_dict(), "head.weight": torch.ones(2)}
    with pytest.warns(UserWarning, match="finetuned: the model has no 'head.weight'; 1 such"):
        lin = bs.tangent.posthoc(net, state)
    assert torch.allclose(lin(torch.eye(3)), net(torch.eye(3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x)))


def test_buffers_and_tied_names_are_not_unknown() -> None:
    net = Tied().eval()
    state = net.state_dict()
    assert {"b.weight", "norm.running_mean"} <= set(state) - set(dict(net.named_parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (net, state, {k: v for k, v in state.items() if k.startswith("norm")}):
            assert torch.allclose(linearized_prediction(net, source, torch.eye(3)), net(torch.eye(3)))
