"""Bounds on mutual information: closed forms at the optimal critic, enumeration of small tables, gradients of MINE."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from biascope.information.bounds import (
    MineObjective,
    donsker_varadhan,
    info_nce,
    jensen_shannon,
    log_mean_exp,
    mine_f,
    nwj,
    sample_size,
    smile,
    tangent,
)
from biascope.information.estimate import carriers
from biascope.information.problems import discrete_problem, gaussian_problem
from biascope.support.errors import InputError

F64 = torch.float64


def optimal_scores(dim: int, rho: float, n: int, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    problem = gaussian_problem(dim, rho)
    x, y = problem.sample(n, seed)
    other = problem.sample(n, seed + 1)[1]  # drawn independently: exactly the product of the marginals
    return problem.log_ratio(x, y), problem.log_ratio(x, other), problem.nats


def standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(values.numel())


@pytest.mark.parametrize(("dim", "rho"), [(1, 0.5), (1, -0.7), (3, 0.5), (10, 0.3)])
def test_optimal_critic_attains_every_bound(dim: int, rho: float) -> None:
    joint, marginal, nats = optimal_scores(dim, rho, 200_000)
    first, second = standard_error(joint), standard_error(marginal.exp())
    assert abs(float(joint.mean()) - nats) < 3 * first
    assert abs(float(marginal.exp().mean()) - 1) < 3 * second
    error = 3 * (first + second)
    assert abs(float(donsker_varadhan(joint, marginal)) - nats) < error
    assert abs(float(nwj(joint, marginal)) - nats) < error
    assert abs(float(mine_f(joint + 1, marginal + 1)) - nats) < error
    assert abs(float(smile(joint, marginal, clip=60.0)) - nats) < error


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.5, 0.7])
def test_optimal_critic_to_five_thousandths_on_a_million_samples(rho: float) -> None:
    joint, marginal, nats = optimal_scores(1, rho, 1_000_000)
    assert abs(float(donsker_varadhan(joint, marginal)) - nats) < 0.005
    assert float(marginal.exp().mean()) == pytest.approx(1, abs=0.01)


def test_constants_move_the_f_bound_and_not_donsker_varadhan() -> None:
    joint, marginal, _ = optimal_scores(1, 0.5, 1000)
    base = float(donsker_varadhan(joint, marginal))
    for c in (-3.0, 0.5, 200.0):
        assert float(donsker_varadhan(joint + c, marginal + c)) == pytest.approx(base, abs=1e-12)
    assert float(mine_f(joint + 0.5, marginal + 0.5)) != pytest.approx(float(mine_f(joint, marginal)), abs=1e-3)
    # where the mean of e^T is e, the two are one
    shift = 1 - log_mean_exp(marginal)
    assert float(mine_f(joint + shift, marginal + shift)) == pytest.approx(base, abs=1e-12)
    assert float(nwj(joint, marginal)) == pytest.approx(float(mine_f(joint + 1, marginal + 1)), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_any_critic_stays_below_the_truth_on_a_table(seed: int) -> None:
    """Everything by enumeration: E_P and E_Q are sums over the cells, no sampling."""
    rng = torch.Generator().manual_seed(seed)
    table = torch.rand(4, 5, generator=rng, dtype=F64)
    table /= table.sum()
    product = table.sum(1, keepdim=True) * table.sum(0)
    critic = 2 * torch.randn(4, 5, generator=rng, dtype=F64)
    truth = discrete_problem(table).nats
    dv = (table * critic).sum() - (product * critic.exp()).sum().log()
    f = (table * critic).sum() - (product * (critic - 1).exp()).sum()
    assert float(f) <= float(dv) <= truth
    tilted = product * critic.exp()
    tilted /= tilted.sum()
    gap = (table * (table / tilted).log()).sum()  # KL of P from the tilted product
    assert truth - float(dv) == pytest.approx(float(gap), abs=1e-12)
    # the functions of the library on scores that repeat each cell as often as its weight says
    counts_p, counts_q = (table * 4000).round().long(), (product * 4000).round().long()
    joint = critic.flatten().repeat_interleave(counts_p.flatten())
    marginal = critic.flatten().repeat_interleave(counts_q.flatten())
    assert float(donsker_varadhan(joint, marginal)) == pytest.approx(float(dv), abs=0.05)
    assert float(mine_f(joint, marginal)) <= float(donsker_varadhan(joint, marginal))


def test_no_scores_are_no_bound() -> None:
    none, some = torch.zeros(0), torch.zeros(3)
    for bound in (donsker_varadhan, mine_f, nwj, smile, jensen_shannon, MineObjective()):
        with pytest.raises(InputError, match="no scores"):
            bound(none, some)  # type: ignore[operator]
        with pytest.raises(InputError, match="no scores"):
            bound(some, none)  # type: ignore[operator]
    with pytest.raises(InputError, match="K >= 1"):
        info_nce(torch.zeros(0, 0))
    for clip in (math.nan, 0.0, -1.0):
        with pytest.raises(InputError, match=f"clip={clip}"):
            smile(some, some, clip=clip)


def test_no_overflow() -> None:
    joint, marginal = torch.full((4,), 1000.0), torch.tensor([1000.0, -1000.0])
    assert float(donsker_varadhan(joint, marginal)) == pytest.approx(math.log(2), abs=1e-4)
    objective = MineObjective()
    marginal.requires_grad_()
    for _ in range(2):
        objective(joint, marginal).backward()
    assert bool(torch.isfinite(marginal.grad).all())  # type: ignore[arg-type]


def test_info_nce_by_hand_its_cap_and_its_bound() -> None:
    T = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
    scores = T.numpy()
    expected = np.mean([scores[i, i] - np.log(np.mean(np.exp(scores[i]))) for i in range(6)])
    assert float(info_nce(T)) == pytest.approx(expected, abs=1e-12)
    assert float(info_nce(1e4 * torch.eye(6))) == pytest.approx(math.log(6))
    with pytest.raises(InputError, match=r"\[K, K\], got \[3, 4\]"):
        info_nce(torch.zeros(3, 4))
    problem = gaussian_problem(1, 0.9)
    values = []
    for seed in range(400):
        x, y = problem.sample(16, seed)
        grid = problem.log_ratio(x.repeat_interleave(16, 0), y.repeat(16, 1)).view(16, 16)
        values.append(info_nce(grid))
    found = torch.stack(values)
    assert float(found.mean()) < problem.nats  # K = 16 loses some, never gains
    assert float(found.mean()) > 0.75
    assert float(found.max()) <= math.log(16)


def test_smile_clips_the_partition_only() -> None:
    joint, marginal = torch.tensor([9.0, 11.0], dtype=F64), torch.tensor([7.0, -7.0], dtype=F64)
    expected = 10 - math.log((math.exp(2) + math.exp(-2)) / 2)
    assert float(smile(joint, marginal, clip=2.0)) == pytest.approx(expected, abs=1e-12)
    # and so it is no bound: clipping hides what makes the partition large
    table = torch.eye(2, dtype=F64) / 2
    critic = torch.tensor([[50.0, -50.0], [-50.0, 50.0]], dtype=F64)
    value = smile(critic.diagonal(), critic, clip=5.0)
    assert float(value) > discrete_problem(table).nats
    with pytest.raises(InputError, match="clip"):
        smile(joint, marginal, clip=0.0)


def test_jensen_shannon_on_a_table() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25], dtype=F64), torch.tensor([0.25, 0.25, 0.5], dtype=F64)
    middle = (p + q) / 2
    truth = ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2
    T = (p / q).log()
    joint, marginal = T[torch.tensor([0, 0, 1, 2])], T[torch.tensor([0, 1, 2, 2])]
    assert float(jensen_shannon(joint, marginal)) == pytest.approx(float(truth), abs=1e-12)
    assert float(jensen_shannon(joint + 0.3, marginal + 0.3)) < float(truth)


def test_jensen_lifts_the_plug_in_above_the_truth_but_not_the_tangent() -> None:
    """Why `mine` does not report the logarithm of a held-out mean: with few pairs it is above I on average."""
    problem = gaussian_problem(2, 0.9)
    trials, n = 4000, 16
    x, y = problem.sample(trials * n, 0)
    joint = problem.log_ratio(x, y).view(trials, n)
    marginal, other = (problem.log_ratio(x, problem.sample(trials * n, s)[1]).view(trials, n) for s in (1, 2))
    plug_in = torch.stack([donsker_varadhan(j, m) for j, m in zip(joint, marginal)])
    below = torch.stack([tangent(j, m, log_mean_exp(o)) for j, m, o in zip(joint, marginal, other)])
    assert float(plug_in.mean()) > problem.nats + 5 * standard_error(plug_in)
    assert float(below.mean()) < problem.nats + 3 * standard_error(below)


def test_the_tangent_touches_from_below() -> None:
    joint, marginal, _ = optimal_scores(1, 0.5, 100)
    dv, at = donsker_varadhan(joint, marginal), log_mean_exp(marginal)
    assert float(tangent(joint, marginal, at)) == pytest.approx(float(dv), abs=1e-12)
    for shift in (-1.0, 0.3):
        expected = float(dv) - (math.exp(-shift) + shift - 1)
        assert float(tangent(joint, marginal, at + shift)) == pytest.approx(expected, abs=1e-12)


def test_carriers_count_rows() -> None:
    even = torch.zeros(2, 3, 5, dtype=F64)
    assert carriers(even) == pytest.approx(6)
    one = even.clone()
    one[1, 2] = 300.0
    assert carriers(one) == pytest.approx(1)


# -------------------------------------------------------------------------------- the gradient of MINE


def linear_critic(theta: Tensor, z: Tensor) -> Tensor:
    return (z @ theta).tanh() * 2


def gradient(objective: MineObjective, theta: Tensor, joint: Tensor, marginal: Tensor) -> Tensor:
    leaf = theta.clone().requires_grad_()
    value = objective(linear_critic(leaf, joint), linear_critic(leaf, marginal))
    (found,) = torch.autograd.grad(value, leaf)
    return found


def test_ema_gradient_by_brute_force() -> None:
    """Sums over samples in plain numpy: E[dT] - E[e^T dT] / average, with the average of all batches so far."""
    rng = torch.Generator().manual_seed(0)
    theta = torch.randn(3, generator=rng, dtype=F64)
    objective, average = MineObjective(rate=0.2), None
    for _ in range(4):
        joint, marginal = torch.randn(2, 7, 3, generator=rng, dtype=F64)
        found = gradient(objective, theta, joint, marginal)

        def parts(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            t = np.tanh(z @ theta.numpy())
            return 2 * t, 2 * (1 - t**2)[:, None] * z

        _, dj = parts(joint.numpy())
        tm, dm = parts(marginal.numpy())
        mean = np.exp(tm).mean()
        average = mean if average is None else 0.8 * average + 0.2 * mean
        expected = dj.mean(0) - (np.exp(tm)[:, None] * dm).mean(0) / average
        assert found.numpy() == pytest.approx(expected, abs=1e-13)
        assert objective.log_average is not None
        assert float(objective.log_average) == pytest.approx(math.log(average), abs=1e-13)


def test_rate_one_and_full_batches_give_the_plain_gradient() -> None:
    rng = torch.Generator().manual_seed(1)
    theta = torch.randn(3, generator=rng, dtype=F64)
    always, slow = MineObjective(rate=1.0), MineObjective(rate=0.01)
    fixed = torch.randn(2, 50, 3, generator=rng, dtype=F64)
    for batch in (torch.randn(2, 5, 3, generator=rng, dtype=F64), fixed, fixed):
        leaf = theta.clone().requires_grad_()
        value = donsker_varadhan(linear_critic(leaf, batch[0]), linear_critic(leaf, batch[1]))
        (plain,) = torch.autograd.grad(value, leaf)
        assert torch.allclose(gradient(always, theta, batch[0], batch[1]), plain, atol=1e-13)
    for _ in range(3):  # the full batch every time: the average is its own mean
        assert torch.allclose(gradient(slow, theta, fixed[0], fixed[1]), plain, atol=1e-13)
    assert float(slow(linear_critic(theta, fixed[0]), linear_critic(theta, fixed[1]))) == pytest.approx(
        float(value.detach())
    )


def test_ema_gradient_is_less_biased_than_the_plain_one() -> None:
    rng = torch.Generator().manual_seed(2)
    theta = 1.5 * torch.randn(3, generator=rng, dtype=F64)
    joint, marginal = torch.randn(2, 2000, 3, generator=rng, dtype=F64)
    full = gradient(MineObjective(1.0), theta, joint, marginal)
    sums = {}
    for rate in (0.01, 1.0):
        objective, draws = MineObjective(rate), torch.Generator().manual_seed(3)
        objective(linear_critic(theta, joint), linear_critic(theta, marginal))  # the average starts where it belongs
        picks = torch.randint(2000, (4000, 2, 4), generator=draws)
        sums[rate] = torch.stack([gradient(objective, theta, joint[i], marginal[j]) for i, j in picks]).mean(0)
    assert float((sums[0.01] - full).norm()) < 0.5 * float((sums[1.0] - full).norm())


def test_rates_are_checked() -> None:
    for rate in (0.0, 1.5):
        with pytest.raises(InputError, match="rate"):
            MineObjective(rate)
    with pytest.raises(InputError, match="no scores"):
        log_mean_exp(torch.empty(0))


def test_sample_size_of_theorem_5_5() -> None:
    given = {"parameters": 100, "accuracy": 0.1, "confidence": 0.95, "bound": 1.0, "radius": 1.0, "lipschitz": 1.0}
    assert sample_size(**given) == 188_293  # type: ignore[arg-type]
    for name in ("parameters", "confidence", "bound", "radius", "lipschitz"):
        more = {**given, name: given[name] * 1.04 if name == "confidence" else given[name] * 2}
        assert sample_size(**more) > 188_293, name  # type: ignore[arg-type]
    assert sample_size(**{**given, "accuracy": 0.2}) < 188_293  # type: ignore[arg-type]
    with pytest.raises(InputError, match="confidence"):
        sample_size(**{**given, "confidence": 1.0})  # type: ignore[arg-type]
