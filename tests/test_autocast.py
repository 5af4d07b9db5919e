"""An autocast around a call ends at its door; one inside the network is part of the network."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs

X = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def net() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 1))


def probed() -> Tensor:
    probe = bs.Probe(net(), X, Y)  # measures at once
    return torch.tensor([value for value in probe.records[0].values.values() if isinstance(value, float)])


def information() -> Tensor:
    pairs = torch.randn(200, 2, generator=torch.Generator().manual_seed(3))
    return torch.tensor(float(bs.mutual_information(pairs[:, :1], pairs.sum(1, keepdim=True), steps=20).nats))


def fisher(kind: str, estimator: str) -> Callable[[], object]:
    return lambda: bs.fisher(net(), X, kind, estimator=estimator)


def direction() -> Tensor:
    return torch.randn(sum(p.numel() for p in net().parameters()), generator=torch.Generator().manual_seed(2))


CALLS: dict[str, Callable[[], object]] = {
    **{
        f"fisher {kind} {estimator}": fisher(kind, estimator)
        for kind in ("diagonal", "kfac", "ekfac", "dense", "lowrank")
        for estimator in ("exact", "monte-carlo")
    },
    "implicit": lambda: bs.fisher(net(), X, "implicit") @ direction(),
    "ggn": lambda: bs.ggn(net(), (X, Y), "kfac"),
    "hessian": lambda: bs.hessian(net(), (X, Y)) @ direction(),
    "ntk": lambda: bs.ntk(net(), X).tensor,
    "trace": lambda: bs.ntk(net(), X, outputs="trace").tensor,
    "Jacobian": lambda: bs.Jacobian(net(), X) @ direction(),
    "nads": lambda: bs.nads(small, (1, 6, 6), 20, seed=0).eigenvalues,
    "nads by autograd": lambda: bs.nads(small, (1, 6, 6), 20, seed=0, method="autograd").eigenvalues,
    "average geometry": lambda: bs.average_geometry(small, (1, 6, 6), 20, seed=0).eigh(3).values,
    "mutual information": information,
    "probe": probed,
}


@pytest.mark.parametrize("name", CALLS)
def test_measured_in_full_precision(name: str) -> None:
    with torch.random.fork_rng():  # what is drawn from torch's own state by the factories is drawn twice
        torch.manual_seed(0)
        expected = CALLS[name]()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            found = CALLS[name]()
            assert torch.is_autocast_enabled("cpu")  # still there for the caller
    if isinstance(expected, bs.curvature.Metric):
        v = direction()
        expected, found = expected @ v, found @ v  # type: ignore[operator]
    assert isinstance(expected, Tensor)
    assert isinstance(found, Tensor)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """A network with an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x).float()


def test_an_autocast_of_the_network_is_the_network() -> None:
    model, x = Mixed(), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found = bs.Jacobian(model, x) @ torch.ones(8)
    exact = torch.cat([x, torch.ones(4, 1)], 1).sum(1, keepdim=True).expand(4, 2)
    error = float((found.view(4, 2) - exact).abs().max() / exact.abs().max())
    assert 1e-5 < error < 1e-2  # rounded to eight bits
