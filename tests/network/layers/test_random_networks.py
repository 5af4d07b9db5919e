"""Random networks against the Jacobian by torch.func, example by example right or refused by name."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.support.errors import UnsupportedError
from random_networks import DOUBLE, Attention, Mean, Tokens, drawn


def brute_force(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def f(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, (p, buffers), (x,))

    rows = torch.func.jacrev(f)(params)
    return torch.cat([row.flatten(2) for row in rows.values()], 2).detach(), f(params).detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [*(range(40 * block, 40 * block + 40) for block in range(8)), (100280, 101254)])
def test_right_for_random_networks(seeds: Iterable[int]) -> None:
    for seed in seeds:
        net, x = drawn(seed)
        J, z = brute_force(net, x)
        n, c, p = J.shape
        gen = torch.Generator().manual_seed(seed)
        v, u = (torch.randn(size, generator=gen, dtype=DOUBLE) for size in (p, n * c))
        probabilities = torch.softmax(z, -1)
        H = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None]
        fisher = torch.einsum("iap,iab,ibq->pq", J, H, J) / n
        flat = J.reshape(n * c, p)
        operator = bs.Jacobian(net, x, precision="float64")
        kernel = bs.ntk(net, x, precision="float64").tensor.reshape(n * c, n * c)
        pairs = {
            "kernel": (kernel, flat @ flat.T),
            "J v": (operator @ v, flat @ v),
            "J^T u": (operator.T @ u, flat.T @ u),
            "dense": (bs.fisher(net, x, "dense", precision="float64").to_dense(), fisher),
            "diagonal": (bs.fisher(net, x, "diagonal", precision="float64").diagonal(), fisher.diagonal()),
            "two at a time": (
                bs.fisher(net, x, "diagonal", precision="float64", batch_size=2).diagonal(),
                fisher.diagonal(),
            ),
            "trace": (bs.fisher(net, x, "ekfac", precision="float64").trace(), fisher.trace()),
        }
        for what, (found, expected) in pairs.items():
            error, size = float((found.reshape(expected.shape) - expected).norm()), max(float(expected.norm()), 1e-12)
            assert error <= 1e-8 * size, f"seed {seed}, {what}:\n{net}"


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True)])
def test_gradients_in_another_order_reach_normalisations_rightly(n: int, norm) -> None:  # type: ignore[no-untyped-def]
    """Where torch's own backward pass is wrong: the truth is by finite differences."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 3, padding=1), norm(2), nn.Tanh(), Tokens(), Attention(2), Mean(), nn.Linear(2, 2))
    net = nn.Sequential(*layers).double().eval()
    for p in net[3:].parameters():
        p.requires_grad_(False)
    x = torch.randn(n, 1, 4, 4, dtype=DOUBLE)
    wanted = [p for p in net.parameters() if p.requires_grad]
    columns = []
    with torch.no_grad():
        for p in wanted:
            for i in range(p.numel()):
                ends = []
                for step in (1e-5, -1e-5):
                    p.view(-1)[i] += step
                    ends.append(net(x))
                    p.view(-1)[i] -= step
                columns.append((ends[0] - ends[1]).flatten() / 2e-5)
    J = torch.stack(columns, 1)
    u = torch.randn(2 * n, dtype=DOUBLE)
    torch.testing.assert_close(bs.Jacobian(net, x, precision="float64").T @ u, J.T @ u, rtol=1e-6, atol=1e-8)
    kernel = bs.ntk(net, x, precision="float64").tensor.reshape(2 * n, 2 * n)
    torch.testing.assert_close(kernel, J @ J.T, rtol=1e-6, atol=1e-8)


class Severed(nn.Module):
    """One example alone has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.detach() if len(x) == 1 else h)


def test_a_gradient_that_no_longer_arrives_is_no_zero() -> None:
    net, x = Severed(), torch.randn(3, 3)
    bs.fisher(net, x, "diagonal")
    with pytest.raises(UnsupportedError, match=r"no gradient reached the layer of a\.weight and a\.bias"):
        bs.fisher(net, x, "diagonal", batch_size=1)
