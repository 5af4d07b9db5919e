"""Linearised random networks against the Jacobian by torch.func: outputs away from the start, and gradients there."""

from collections.abc import Iterable

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import biascope as bs
from biascope.derivatives import RightGradients, differentiable_attention
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
