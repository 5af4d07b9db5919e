"""Fig. 6.5: SuperNat against gradient descent on a noisy linear regression.

Features [phi, phi_noise] with phi ~ N(0, 1), phi_noise ~ N(0, I_d / d); labels y = phi + P_noise eps, eps ~ N(0, 0.1).
The thesis prints P_noise = phi_noise phi_noise^T, which is no projector (its eigenvalues are about n / d); `literal`
takes it as printed, otherwise the orthogonal projector on the span of the noise features is used. The algorithm box of
the thesis is an image; `biascope.optim.SuperNat` follows its text. Test error is that of the clean target phi.

Verdict: confirmed if the final test error of SuperNat is below that of gradient descent by two standard errors of the
paired difference, and in at least 90 % of the seeds.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from biascope.optim import SuperNat
from biascope.progress import progress
from biascope.seeds import generator
from biascope.studies.estimates import above, curve
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "On the noisy linear regression SuperNat ends with a lower test error than gradient descent. (That gradient "
    "descent overfits the noise features and SuperNat freezes them is shown, not judged.)"
)


@study(
    "lazy/fig6.5",
    paper="linearization",
    figure="6.5",
    claim=CLAIM,
    sizes={"smoke": {"seeds": 10, "steps": 300}, "laptop": {}, "paper": {"seeds": 100}},
)
def fig6_5(
    run: Run,
    *,
    seeds: Annotated[int, "draws of features and labels"] = 20,
    n: Annotated[int, "training examples"] = 50,
    d: Annotated[int, "noise features"] = 10,
    noise: Annotated[float, "variance of the label noise"] = 0.1,
    literal: Annotated[bool, "P_noise as printed (not a projector)"] = True,
    rate: Annotated[float, "learning rate times the largest eigenvalue of the kernel"] = 1.0,
    steps: Annotated[int, "steps of both algorithms"] = 1000,
) -> StudyResult:
    """Test error of gradient descent and of SuperNat over the steps."""
    gd, supernat, weights = [], [], []
    for seed in progress(range(seeds), "regressions"):
        found = run.cached(f"seed={seed}", partial(_regress, run, seed, n, d, noise, literal, rate, steps))
        gd.append(torch.as_tensor(found["gd"]))
        supernat.append(torch.as_tensor(found["supernat"]))
        weights.append({"gradient descent": float(found["gd_noise"]), "SuperNat": float(found["supernat_noise"])})  # type: ignore[arg-type]
    curves = {"gradient descent": torch.stack(gd), "SuperNat": torch.stack(supernat)}
    gap = Estimate.of(curves["gradient descent"][:, -1] - curves["SuperNat"][:, -1])
    wins = float((curves["gradient descent"][:, -1] > curves["SuperNat"][:, -1]).double().mean())
    numbers = {"final test error, gradient descent minus SuperNat": gap, "share of seeds SuperNat wins": Estimate(wins)}
    for name, rows in curves.items():
        numbers[f"final test error, {name}"] = Estimate.of(rows[:, -1])
        numbers[f"lowest test error, {name}"] = Estimate.of(rows.min(1).values)
        numbers[f"weight on the noise features, {name}"] = Estimate.of([w[name] for w in weights])
    return StudyResult(
        "confirmed" if above(gap) and wins >= 0.9 else "not confirmed",
        CLAIM,
        f"Final test error {numbers['final test error, gradient descent']} with gradient descent (lowest on the way "
        f"{numbers['lowest test error, gradient descent']}), {numbers['final test error, SuperNat']} with SuperNat, "
        f"which wins in {wins:.0%} of {seeds} seeds. {'P_noise as printed' if literal else 'True projector'}.",
        numbers,
        (_chart(curves),),
    )


def regression(
    seed: int, index: int, n: int, d: int, noise: float, literal: bool, tests: int = 500
) -> tuple[Tensor, Tensor, Tensor]:
    """(features [n, d + 1], labels [n], test features [tests, d + 1]); the first feature is the clean target."""
    rng = generator(seed, "regression", index)
    features = torch.randn(n + tests, d + 1, generator=rng, dtype=torch.float64)
    features[:, 1:] /= math.sqrt(d)
    train, test = features[:n], features[n:]
    eps = math.sqrt(noise) * torch.randn(n, generator=rng, dtype=torch.float64)
    noisy = train[:, 1:]
    added = noisy @ (noisy.T @ eps) if literal else noisy @ torch.linalg.lstsq(noisy, eps[:, None]).solution[:, 0]
    return train, train[:, 0] + added, test


def _regress(
    run: Run, seed: int, n: int, d: int, noise: float, literal: bool, rate: float, steps: int
) -> dict[str, Value]:
    train, y, test = regression(run.seed, seed, n, d, noise, literal)
    lr = rate / float(torch.linalg.matrix_norm(train, 2) ** 2)
    curves = {}
    w = torch.zeros(d + 1, dtype=torch.float64)
    errors = [test_error(w, test)]
    for _ in range(steps):
        w -= lr * train.T @ (train @ w - y)
        errors.append(test_error(w, test))
    curves["gd"], gd_noise = torch.stack(errors), float(w[1:].norm())
    w = torch.nn.Parameter(torch.zeros(d + 1, dtype=torch.float64))
    opt = SuperNat(w, train, lr=lr)
    errors = [test_error(w.detach(), test)]
    for _ in range(steps):
        opt.step(train @ w.detach() - y)
        errors.append(test_error(w.detach(), test))
    curves["supernat"] = torch.stack(errors)
    return {**curves, "gd_noise": gd_noise, "supernat_noise": float(w.detach()[1:].norm())}


def test_error(w: Tensor, features: Tensor) -> Tensor:
    """Mean squared distance from the clean target, which is the first feature."""
    return (features @ w - features[:, 0]).square().mean()


def _chart(curves: dict[str, Tensor]) -> Chart:
    count = next(iter(curves.values())).shape[1]
    shown = sorted({round(count ** (i / 80)) for i in range(81)} | {1})
    shown = [step for step in shown if step < count]
    return Chart(
        "test-error",
        "Test error",
        "step",
        "mean squared error on the clean target",
        tuple(curve(name, shown, rows[:, shown]) for name, rows in curves.items()),
        alt="Gradient descent falls and then rises as it fits the noise; SuperNat stays low.",
        caption="Mean over seeds, band: standard error.",
        log_x=True,
        log_y=True,
    )
