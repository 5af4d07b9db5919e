"""Linearised random networks against the Jacobian by torch.func: outputs away from the start, and gradients there.

And embeddings, of which forward and backward mode of torch say different things.
"""

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import biascope as bs
from biascope.network.derivatives import RightGradients, differentiable_attention
from biascope.support.errors import UnsupportedError
from random_networks import DOUBLE, drawn


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(40), range(40, 80), (339, 357)])  # the last two: norms that torch misreads
def test_right_for_random_networks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        net, x = drawn(seed)
        start = {name: p.detach().clone() for name, p in net.named_parameters()}
        with differentiable_attention(), RightGradients():
            rows = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(start)  # noqa: B023
        J = torch.cat([row.flatten(2) for row in rows.values()], 2)
        before = net(x).detach()
        rng = torch.Generator().manual_seed(seed)
        step, u = (
            0.1 * torch.randn(J.shape[2], generator=rng, dtype=DOUBLE),
            torch.randn(J.shape[:2], generator=rng, dtype=DOUBLE),
        )
        for engine in ("vjp", "jvp"):
            tangent = bs.linearize(net, engine=engine)
            parameters = [dict(tangent.named_parameters())[name] for name in start]
            vector_to_parameters(parameters_to_vector(parameters).detach() + step, parameters)
            out = tangent(x)
            out.backward(u)
            torch.testing.assert_close(out, before + J @ step, rtol=1e-8, atol=1e-9, msg=f"seed {seed}: {net}")
            gradient = torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
            expected = torch.einsum("iap,ia->p", J, u)
            torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-8, msg=f"seed {seed}, {engine}: {net}")


def test_tables_whose_gradients_mix_examples_are_refused() -> None:
    for options, word in (({"scale_grad_by_freq": True}, "scale_grad_by_freq"), ({"max_norm": 1.0}, "max_norm")):
        net = nn.Sequential(nn.Embedding(5, 3, **options), nn.Flatten(), nn.Linear(6, 2))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=word):
            bs.linearize(net)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_padding_rows_have_no_tangent(device: str) -> None:
    """Moving the padding row moves the network, but by torch's definition it has no gradient: so says J v, too."""
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double().to(device)
    x = torch.tensor([[1, 2], [3, 0], [0, 0]], device=device)
    lin = bs.linearize(net)
    with torch.no_grad():
        for p in lin.parameters():
            p.add_(0.1)
    moved = {name: torch.full_like(p, 0.1) for name, p in net.named_parameters()}
    rows = []
    for i in range(3):
        for k in range(2):
            grads = torch.autograd.grad(net(x[i : i + 1])[0, k], list(net.parameters()))
            rows.append(sum(float((g * m).sum()) for g, m in zip(grads, moved.values())))
    expected = net(x).detach() + torch.tensor(rows, device=device, dtype=torch.float64).view(3, 2)
    torch.testing.assert_close(lin(x).detach(), expected)
