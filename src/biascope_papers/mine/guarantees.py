"""Theorem 5.5, Eq. 12 and Fig. 5.2: enough samples for MINE, the bias of its gradient, and whether f matters.

Theorem 5.5: x, z in {-1, 1}, equal with probability 0.8, critics T = theta x z with |theta| <= 1/2, so the supremum is
known. Eq. 12: the mean of batch gradients against the gradient on all pairs, plain and with MINE's moving average.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from biascope.information import MineObjective, gaussian_problem, noisy_function_problem
from biascope.information.bounds import sample_size
from biascope.studies import Estimate, Run, StudyResult, study
from biascope.support import derive, generator, progress
from biascope_papers.mine.estimation import FUNCTIONS
from biascope_papers.spectral.fitting import stacked

EQUAL, RADIUS = 0.8, 0.5


@study("mine/theorem5.5", sizes={"smoke": {"draws": 100, "accuracies": (0.2, 0.1)}, "laptop": {}, "paper": {}})
def theorem5_5(
    run: Run,
    *,
    accuracies: Annotated[tuple[float, ...], "epsilon"] = (0.2, 0.1, 0.05),
    delta: Annotated[float, "one minus the confidence"] = 0.05,
    draws: Annotated[int, "data sets of the size that the theorem asks for"] = 2000,
) -> StudyResult:
    """The share of data sets of the theorem's size on which the estimate is as accurate as it says."""
    theta = torch.linspace(-RADIUS, RADIUS, 2001, dtype=torch.float64)

    def supremum(pairs: Tensor, product: Tensor) -> Tensor:
        """sup E_P[theta x z] - log E_Q[e^{theta x z}] for means of x z under both."""
        values = pairs[:, None] * theta - (theta.cosh() + product[:, None] * theta.sinh()).log()
        return values.amax(1)

    truth = supremum(torch.tensor([2 * EQUAL - 1], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    numbers: dict[str, Estimate] = {"information over the class of critics": Estimate(float(truth))}
    texts = []
    for accuracy in accuracies:
        n = sample_size(1, accuracy, 1 - delta, math.exp(RADIUS), RADIUS, 1.0)
        rng = generator(run.seed, "draws", accuracy)
        means = []
        for _ in range(draws):
            x = torch.randint(2, (n,), generator=rng) * 2 - 1
            z = torch.where(torch.rand(n, generator=rng) < EQUAL, x, -x)
            means.append(torch.stack([(x * z).double().mean(), x.double().mean() * z.double().mean()]))
        pairs, product = torch.stack(means).T
        off = (supremum(pairs, product) - truth).abs()
        within = (off <= accuracy).double()
        numbers[f"share of estimates within eps, eps = {accuracy:g}"] = Estimate.of(within)
        numbers[f"samples, eps = {accuracy:g}"] = Estimate(n)
        numbers[f"largest error over eps, eps = {accuracy:g}"] = Estimate(float(off.max()) / accuracy)
        texts.append(f"{float(within.mean()):.4f} of {draws} estimates from {n} samples are within {accuracy:g}")
    return StudyResult(measured=f"{'; '.join(texts)} (at least {1 - delta:g} is claimed).", numbers=numbers)


@study("mine/equitability", sizes={"smoke": {}, "laptop": {}, "paper": {}})
def equitability(
    run: Run, *, sigmas: Annotated[tuple[float, ...], "levels of noise (not given)"] = (0.1, 0.3, 0.5, 0.7, 0.9)
) -> StudyResult:
    """The information between x and f(x) + noise over that for f(x) = x at equal noise, by quadrature (Fig. 5.2)."""
    numbers = {
        f"exact information of {label} over that of x, sigma = {sigma:g}": Estimate(
            noisy_function_problem(f, sigma).nats / noisy_function_problem("linear", sigma).nats, 0.0
        )
        for f, label in FUNCTIONS.items()
        if f != "linear"
        for sigma in sigmas
    }
    text = ", ".join(f"{each.value:.2f}" for each in numbers.values())
    return StudyResult(measured=f"Of the information at f(x) = x, x^3 and sin x have {text}.", numbers=numbers)


@study("mine/gradient-bias", sizes={"smoke": {"batches": 800, "seeds": 2}, "laptop": {}, "paper": {}})
def gradient_bias(
    run: Run,
    *,
    rho: Annotated[float, "correlation of the two Gaussians"] = 0.7,
    pool: Annotated[int, "pairs of the full batch; the product of marginals is all their combinations"] = 500,
    batch: Annotated[int, "pairs in a batch"] = 32,
    batches: Annotated[int, "batches, of which the first tenth only starts the average"] = 5000,
    rate: Annotated[float, "of the moving average"] = 0.01,
    seeds: Annotated[int, "pools"] = 5,
) -> StudyResult:
    """Distance of the mean batch gradient from the gradient on the full batch, relative to the latter's first term."""
    critic = torch.tensor([rho / (1 - rho**2), -(rho**2) / (2 * (1 - rho**2))], dtype=torch.float64)

    def one(i: int) -> dict[str, Tensor]:
        x, z = (v[:, 0].double() for v in gaussian_problem(1, rho).sample(pool, derive(run.seed, "pool", i)))
        features = torch.stack([x[:, None] * z, x[:, None].square() + z.square()], -1)  # T = theta . features
        joint, weights = features.diagonal().T, (features @ critic).flatten().softmax(0)
        first = joint.mean(0)
        full = first - weights @ features.flatten(0, 1)
        rng, biases = generator(run.seed, "batches", i), []
        rows, left, right = (torch.randint(pool, (batches, batch), generator=rng) for _ in range(3))
        for how in (1.0, rate):
            objective, total = MineObjective(how), torch.zeros(2, dtype=torch.float64)
            for b in range(batches):
                theta = critic.clone().requires_grad_(True)
                value = objective(joint[rows[b]] @ theta, features[left[b], right[b]] @ theta)
                (gradient,) = torch.autograd.grad(value, theta)
                total = total + gradient * (b >= batches // 10)
            biases.append((total / (batches - batches // 10) - full).norm() / first.norm())
        return {"bias": torch.stack(biases)}

    plain, moving = stacked(run.cached_each("pool", progress(range(seeds), "pools"), one), "bias").T
    numbers = {
        "bias of the plain gradient": Estimate.of(plain),
        "bias with the moving average": Estimate.of(moving),
        "plain minus moving average": Estimate.of(plain - moving),
    }
    return StudyResult(
        measured=f"Relative bias {numbers['bias of the plain gradient']} plain, "
        f"{numbers['bias with the moving average']} with the moving average.",
        numbers=numbers,
    )
