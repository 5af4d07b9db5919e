"""Information as a term of a loss: clipping, gradients, and the bottleneck of Gaussians in closed form."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from biascope.information import JointCritic, MineTerm, adaptive_clip, clipped_backward
from biascope.information.bounds import donsker_varadhan
from biascope.support.errors import InputError

RNG = 20


def gradients(scale: float, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (4,), (2, 2, 2))
    return [scale * torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]


def whole(tensors: object) -> Tensor:
    return torch.cat([g.flatten() for g in tensors])  # type: ignore[attr-defined]


@pytest.mark.parametrize("scale", [0.01, 0.9, 1.1, 100.0, 0.0])
def test_adaptive_clip_has_the_smaller_norm_and_the_direction_of_the_information(scale: float) -> None:
    own, mine = gradients(1.0, 1), gradients(scale, 2)
    clipped = whole(adaptive_clip(mine, own))
    assert float(clipped.norm()) == pytest.approx(min(float(whole(own).norm()), float(whole(mine).norm())), rel=1e-12)
    assert float(clipped @ whole(mine)) == pytest.approx(float(clipped.norm() * whole(mine).norm()), rel=1e-12)
    if whole(mine).norm() <= whole(own).norm():
        assert torch.equal(clipped, whole(mine))  # the identity, bit for bit


def test_adaptive_clip_without_a_loss_gradient_is_zero_and_batches() -> None:
    own, mine = gradients(1.0, 1), gradients(5.0, 2)
    assert float(whole(adaptive_clip(mine, [torch.zeros_like(g) for g in own])).abs().max()) == 0
    several = [gradients(s, 3) for s in (0.1, 10.0)]
    stacked = torch.vmap(adaptive_clip)(
        [torch.stack(g) for g in zip(*several)], [torch.stack([g, g]) for g in own]
    )  # one norm for every network of a stack
    for i, one in enumerate(several):
        torch.testing.assert_close(whole([g[i] for g in stacked]), whole(adaptive_clip(one, own)))
    with pytest.raises(InputError, match=r"gradients of the information are \[\[3, 4\], \[4\]\], of the loss"):
        adaptive_clip(mine[:2], own)


@pytest.mark.parametrize(
    ("dtype", "mine", "own"),
    [
        (torch.float16, 300.0, 1.0),  # squares pass 65,504
        (torch.float16, 1e-4, 1e-5),  # and squares of these are 0
        (torch.float32, 1e20, 1.0),
        (torch.float32, 1e-25, 1e-26),
        (torch.bfloat16, 1e30, 1e-30),
        (torch.float64, 1e200, 1e198),
        (torch.float64, 1e-200, 1e-201),
    ],
)
def test_adaptive_clip_of_any_size_and_dtype(dtype: torch.dtype, mine: float, own: float) -> None:
    g, u = torch.tensor([3.0, 0.0, -4.0], dtype=dtype) * mine, torch.tensor([0.0, 5.0, 0.0], dtype=dtype) * own
    (clipped,) = adaptive_clip([g], [u])
    assert clipped.dtype == dtype
    # both norms are 5 times their size: exact in float64 by numbers that need no squares
    expected = g.double() / float(g.double().abs().max()) * 4 / 5 * float(u.double()[1])
    # one rounding of the result, and that of 3 x and 4 x in the dtype
    rtol, tiny = 4 * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(clipped.double(), expected, rtol=rtol, atol=tiny)
    (kept,) = adaptive_clip([u], [g])  # the shorter one is left as it is, bit for bit
    assert torch.equal(kept, u)


def test_adaptive_clip_by_a_norm_that_is_not_finite_is_nan() -> None:
    for bad in (math.inf, math.nan):
        g, u = [torch.tensor([1.0, 2.0])], [torch.tensor([bad, 0.0])]
        assert bool(adaptive_clip(g, u)[0].isnan().all())
        assert bool(adaptive_clip(u, g)[0].isnan().all())


def test_adaptive_clip_of_empty_gradients() -> None:
    none = torch.zeros(0, 3)
    assert adaptive_clip([none], [none])[0].shape == (0, 3)
    clipped = adaptive_clip([none, torch.tensor([4.0])], [none, torch.tensor([2.0])])
    assert clipped[1].tolist() == [2.0]


def test_clipped_backward_is_the_sum_of_the_two_gradients() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(RNG), dtype=torch.float64)
    loss, information = net(x).square().mean(), 50 * net[0](x).sum()  # the last layer does not see the information
    own = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    mine = torch.autograd.grad(information, list(net.parameters()), retain_graph=True, allow_unused=True)
    mine = tuple(torch.zeros_like(p) if g is None else -g for g, p in zip(mine, net.parameters()))
    clipped_backward(loss, information, net.parameters(), beta=0.3)
    expected = whole(own) + 0.3 * whole(mine) * float(whole(own).norm() / whole(mine).norm())
    torch.testing.assert_close(whole([p.grad for p in net.parameters()]), expected)


def test_the_estimate_gives_gradients_to_the_samples_and_none_to_the_critic() -> None:
    rng = torch.Generator().manual_seed(RNG)
    x, y = torch.randn(50, 2, generator=rng), torch.randn(50, 1, generator=rng, requires_grad=True)
    critic = JointCritic(2, 1)
    before = copy.deepcopy(critic.state_dict())
    term = MineTerm(critic)
    value = term(x, y)
    value.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in critic.parameters())
    assert y.grad is not None
    plain = donsker_varadhan(critic(x, y), critic(x, y.roll(1, 0)))
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(y.grad, torch.autograd.grad(plain, y)[0])
    y.grad = None
    assert term.fit(x, y) == pytest.approx(float(plain.detach()), abs=1e-6)
    assert y.grad is None  # and fitting gives none to the samples
    assert not torch.equal(before["network.0.weight"], critic.state_dict()["network.0.weight"])


def test_bad_batches_are_named() -> None:
    term = MineTerm(JointCritic(1, 1))
    with pytest.raises(InputError, match=r"x and y are \[3, 1\] and \[4, 1\]"):
        term(torch.zeros(3, 1), torch.zeros(4, 1))
    with pytest.raises(InputError, match="at least 2"):
        term.fit(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(InputError, match="rate"):
        MineTerm(JointCritic(1, 1), rate=0.0)
    with pytest.raises(InputError, match=r"are \[\] and \[\]"):
        term(torch.tensor(1.0), torch.tensor(1.0))


def test_a_batch_with_nan_leaves_the_critic_as_it_was() -> None:
    term = MineTerm(JointCritic(1, 1))
    good = torch.randn(8, 1, generator=torch.Generator().manual_seed(RNG))
    term.fit(good, good)
    before, average = copy.deepcopy(term.critic.state_dict()), term.objective.log_average
    with pytest.raises(InputError, match="NaN in x and y"):
        term.fit(good, torch.full((8, 1), math.nan))
    assert all(torch.equal(t, before[name]) for name, t in term.critic.state_dict().items())
    assert term.objective.log_average is average


def test_gradients_that_do_not_belong_together_are_named() -> None:
    with pytest.raises(InputError, match=r"information are \[\[2\]\], of the loss \[\[3\]\]"):
        adaptive_clip([torch.ones(2)], [torch.ones(3)])


class Quadratic(nn.Module):
    """All critics that are optimal for some pair of Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x * z, x**2, z**2], 1) @ self.w


@pytest.mark.parametrize("beta", [0.25, 0.4])
def test_bottleneck_of_gaussians_finds_the_closed_form(beta: float) -> None:
    """x, y standard with corr^2 = r; z = a x + noise. H(y|z) + beta I(x; z) is least at s = (r - beta) / (r (1 - beta))
    for s = a^2 / (1 + a^2), the squared correlation of x and z.
    """
    r, rng = 0.5, torch.Generator().manual_seed(RNG)
    best = (r - beta) / (r * (1 - beta))
    a = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    term = MineTerm(Quadratic(), lr=0.02, rate=0.1)
    optimizer = torch.optim.Adam([a], lr=0.02)
    seen = []
    for step in range(600):
        x, noise = torch.randn(2, 1024, 1, generator=rng, dtype=torch.float64)
        for _ in range(2):
            term.fit(x, a * x + noise)
        left = 0.5 * torch.log(1 - r * a**2 / (1 + a**2))  # H(y|z) but for a constant
        optimizer.zero_grad()
        (left + beta * term(x, a * x + noise)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= 400:
            seen.append(float(a.detach() ** 2 / (1 + a.detach() ** 2)))
    assert sum(seen) / len(seen) == pytest.approx(best, abs=0.04)
    assert float(term(x, a * x + noise).detach()) == pytest.approx(-0.5 * math.log(1 - best), abs=0.12)
