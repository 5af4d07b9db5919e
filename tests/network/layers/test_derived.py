"""Parameters that are used through tensors made of them alone have rules, and right ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import biascope as bs

D, T, H = 6, 4, 2


class Net(nn.Module):
    """Examples [n, T, D] through one layer of interest, then a head."""

    def __init__(self, forward: Callable[["Net", Tensor], Tensor], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self._forward, self.head = forward, nn.Linear(D, 2)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self._forward(self, x).tanh().flatten(1, -2).mean(1))
        return out


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def relative(m: Net, x: Tensor) -> Tensor:
    """Attention whose scores have a bias from a small table, as in Swin and T5."""
    at = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    bias = F.embedding(at, m.table).permute(2, 0, 1)[None]
    q = heads(m.q(x))
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias).transpose(1, 2).flatten(2)


def in_place(m: Net, x: Tensor) -> Tensor:
    made = F.linear(torch.arange(3.0).to(x)[:, None], m.w)
    return x + F.relu(made, inplace=True).sum(0)


NETS: dict[str, Callable[[], Net]] = {
    "one plus weight": lambda: Net(lambda m, x: rms(x) * (1 + m.w), w=t(D)),
    "positions": lambda: Net(lambda m, x: x + m.table(torch.arange(T)[None]), table=nn.Embedding(T + 2, D)),
    "sliced table": lambda: Net(lambda m, x: x + m.table[:T], table=t(T + 2, D)),
    "exponential": lambda: Net(lambda m, x: x * -torch.exp(m.a), a=t(D)),
    "transposed": lambda: Net(lambda m, x: x @ m.w.T, w=t(D, D)),
    "transposed for linear": lambda: Net(lambda m, x: F.linear(x, m.w.t()), w=t(D, D)),
    "scaled matrix": lambda: Net(lambda m, x: F.linear(x, m.w * m.g), w=t(D, D), g=t(D, 1)),
    "weight norm": lambda: Net(lambda m, x: m.c(x.mT).mT, c=weight_norm(nn.Conv1d(D, D, 3, padding=1))),
    "joined biases": lambda: Net(
        lambda m, x: F.linear(x, m.w, torch.cat([m.a, m.b])), w=t(D, D), a=t(2), b=t(D - 2)
    ),
    "relative positions": lambda: Net(relative, table=t(T, H), q=nn.Linear(D, D)),
    "network of constants": lambda: Net(
        lambda m, x: x + m.mlp(torch.linspace(0, 1, T).to(x)[:, None]),
        mlp=nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, D)),
    ),
    "changed in place before it is used": lambda: Net(in_place, w=t(D, 1)),
    "repeated": lambda: Net(lambda m, x: torch.cat([m.token.sin().repeat(len(x), 1, 1), x], 1), token=t(1, 1, D)),
    "addcmul": lambda: Net(lambda m, x: torch.addcmul(m.b, m.w, x), b=t(D), w=t(D)),
    "matrix first": lambda: Net(lambda m, x: (m.w @ x.mT).mT, w=t(D, D)),
    "derived twice": lambda: Net(lambda m, x: x * m.w.exp() + m.w.exp(), w=t(D)),
}  # fmt: skip


def routed(m: Net, x: Tensor) -> Tensor:
    """Two experts in one tensor; each is called for the tokens that chose it."""
    out, chosen = torch.zeros_like(x), x[..., 0] > 0
    for expert, mine in enumerate((chosen, ~chosen)):
        if mine.any():
            out[mine] = F.linear(x[mine], m.experts[expert])
    return out


LEFT: dict[str, Callable[[], Net]] = {  # to autograd
    "experts": lambda: Net(routed, experts=t(2, D, D)),
    "indices of examples": lambda: Net(lambda m, x: m.table[(x[..., 0] > 0).long()] * x, table=t(2, D)),
    "cast and changed in place": lambda: Net(lambda m, x: (lambda p: x + p + p.mul_(2))(m.w.clone()), w=t(D)),
    "changed in place after it was used": lambda: Net(lambda m, x: (lambda p: x + p + p.mul_(2))(m.w.sin()), w=t(D)),
}  # fmt: skip


def examples(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_force(net: Net, x: Tensor) -> Tensor:
    params = list(net.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(net(x[i : i + 1])[0, c], params, materialize_grads=True)])
        for i in range(len(x))
        for c in range(2)
    ]
    return torch.stack(rows).view(len(x), 2, -1)


@pytest.mark.parametrize("name", [*NETS, *LEFT])
def test_kernel_and_diagonal(name: str) -> None:
    torch.manual_seed(0)
    net, x = (NETS | LEFT)[name]().double(), examples(5)
    J = brute_force(net, x)
    torch.testing.assert_close(bs.ntk(net, x).tensor, torch.einsum("icp,jdp->icjd", J, J))
    torch.testing.assert_close(bs.ntk(net, x[:2], x[2:]).tensor, torch.einsum("icp,jdp->icjd", J[:2], J[2:]))
    F = bs.fisher(net, x, "diagonal", likelihood="gaussian")
    torch.testing.assert_close(F.diagonal(), J.square().sum((0, 1)) / 5)
    torch.testing.assert_close(bs.Jacobian(net, x).rows(), J)


@pytest.mark.parametrize("name", NETS)
def test_nothing_is_left_to_autograd(name: str) -> None:
    assert bs.Jacobian(NETS[name](), examples(3).float()).coverage().fallback == ()


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_rule_is_left_to_autograd(name: str) -> None:
    first = next(n for n, _ in LEFT[name]().named_parameters() if not n.startswith("head"))
    assert bs.Jacobian(LEFT[name](), examples(3).float()).coverage().fallback == (first,)


@pytest.mark.parametrize("name", ["transposed", "transposed for linear", "matrix first"])
def test_transposed_matrices_have_kronecker_factors(name: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name]().double(), examples(5)
    E = bs.fisher(net, x, "ekfac", likelihood="gaussian")
    assert E.plan["w"] == "ekfac"
    R = brute_force(net, x).flatten(0, 1)
    product = (R * (E @ R.T).T).sum() / 5  # <E, F> = <E, E>, as E is a projection of F
    torch.testing.assert_close(product, E.frobenius_norm() ** 2)


@pytest.mark.parametrize("cast", [lambda w: 1.0 + w.float(), lambda w: w.to(torch.float32), lambda w: w.float().exp()])
def test_float32_and_float64_agree_where_a_cast_is_one_more_step(cast: Callable[[Tensor], Tensor]) -> None:
    net, x = Net(lambda m, x: rms(x) * cast(m.w), w=t(D)), examples(4).float()
    assert bs.Jacobian(net, x).coverage().fallback == ()
    single, double = bs.ntk(net, x).tensor, bs.ntk(net, x, precision="float64").tensor
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


def test_examples_on_another_route_than_the_first_ones() -> None:
    """The pilot sees both experts; a later batch may see one only."""
    torch.manual_seed(0)
    net, x = LEFT["experts"]().double(), examples(5)
    bs.ntk(net, x)
    one = x.clone()
    one[..., 0] = one[..., 0].abs()
    J = brute_force(net, one)
    torch.testing.assert_close(bs.ntk(net, one).tensor, torch.einsum("icp,jdp->icjd", J, J))


def test_a_layer_in_lower_precision_has_factors_in_the_precision_of_the_rest() -> None:
    """As the routers of mixtures of experts."""
    net = Net(lambda m, x: x * F.linear(x.float(), m.w.float()).sigmoid(), w=t(D, D)).double()
    x = examples(5)
    J = brute_force(net, x)
    E = bs.fisher(net, x, "ekfac", likelihood="gaussian")
    assert E.plan["w"] == "ekfac"
    torch.testing.assert_close(E.trace(), J.square().sum() / 5, rtol=1e-5, atol=0)
    torch.testing.assert_close(bs.ntk(net, x).tensor, torch.einsum("icp,jdp->icjd", J, J), rtol=1e-5, atol=1e-5)
