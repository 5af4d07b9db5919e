"""The optimisers of Fig. 4.3 as the contest builds them, against dense matrices."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from biascope import data, nets
from biascope_papers.ekfac import autoencoder, contest
from biascope_papers.ekfac.common import reconstruction
from biascope_papers.ekfac.contest import Setting

TINY = Setting("ekfac", lr=0.03, second=1e-3, size=40, steps=3, refresh=2, every=1)


def tiny() -> tuple[nn.Module, Tensor]:
    """An auto-encoder of six pixels, 120 examples."""
    net = nets.build("autoencoder", seed=0, in_features=6, hidden=(5, 3)).double()
    autoencoder.glorot(net, torch.Generator().manual_seed(0))
    return net, data.load("digits", "train").x[:120].flatten(1)[:, 18:24].double()


def flows(net: nn.Module, x: Tensor) -> dict[nn.Linear, tuple[Tensor, Tensor]]:
    """Inputs with a last 1 [n, i + 1] and gradients of the individual losses [n, o] of every layer, by autograd."""
    seen: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
    handles = [
        m.register_forward_hook(lambda m, i, o: seen.update({m: (i[0].detach(), o)}))
        for m in net.modules()
        if isinstance(m, nn.Linear)
    ]
    total = reconstruction(net, x) * len(x)
    for handle in handles:
        handle.remove()
    grads = torch.autograd.grad(total, [out for _, out in seen.values()])
    return {m: (torch.cat([a, a.new_ones(len(a), 1)], 1), g) for (m, (a, _)), g in zip(seen.items(), grads)}


class Dense:
    """W - lr (Q diag(s) Q^T + eps I)^-1 g with the whole matrix of a layer, as the spec writes EKFAC and EKFAC-ra."""

    def __init__(self) -> None:
        self.Q: Tensor | None = None
        self.s = torch.empty(0)

    def step(self, a: Tensor, g: Tensor, setting: Setting, at: int) -> Tensor:
        rows = (g[:, :, None] * a[:, None, :]).flatten(1)  # gradients of the individual losses
        if at % setting.refresh == 0 or self.Q is None:
            s_B, U_B = torch.linalg.eigh(g.T @ g / len(g))
            s_A, U_A = torch.linalg.eigh(a.T @ a / len(a))
            self.Q, self.s = torch.kron(U_B, U_A), torch.outer(s_B, s_A).flatten()
        mean = rows.mean(0)
        if setting.name == "ekfac":
            self.s = (rows @ self.Q).square().mean(0)
        else:
            self.s = 0.75 * self.s + 0.25 * len(a) * (self.Q.T @ mean).square()
        F = self.Q @ torch.diag(self.s) @ self.Q.T
        return -setting.lr * torch.linalg.solve(F + setting.second * torch.eye(len(F)).double(), mean)


@pytest.mark.parametrize("name", ["ekfac", "ekfac-ra"])
def test_three_steps_are_those_of_the_dense_metric(name: str) -> None:
    """The first (one batch is all that is known), one in an old basis, one in a new one; no momentum."""
    setting = replace(TINY, name=name)
    net, x = tiny()
    opt, oracles = contest.optimiser(setting, net, {}, {}), {}
    for at, batch in enumerate(x.split(setting.size)):
        told = {}
        for m, (a, g) in flows(net, batch).items():
            move = oracles.setdefault(m, Dense()).step(a, g, setting, at).view(g.shape[1], a.shape[1])
            told[m] = (m.weight.detach() + move[:, :-1], m.bias.detach() + move[:, -1])
        opt.zero_grad()
        reconstruction(net, batch).backward()
        opt.step()
        for m, (weight, bias) in told.items():
            torch.testing.assert_close(m.weight.detach(), weight, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(m.bias.detach(), bias, rtol=1e-8, atol=1e-10)
