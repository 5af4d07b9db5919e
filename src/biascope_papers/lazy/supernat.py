"""Fig. 6.5 (4.5 of the other thesis): SuperNat against gradient descent on a noisy linear regression.

Labels y = phi + P_noise eps of features [phi, phi_noise]. The printed P_noise = phi_noise phi_noise^T is no projector
(its eigenvalues are about n / d); `literal` takes it as printed, otherwise the orthogonal projector on the span is
used. Test error is that of the clean target phi.
"""

import math
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from biascope.optim import SuperNat
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import generator, progress

METHODS = {"gradient descent": "gd", "SuperNat": "supernat"}


@study("lazy/fig6.5", sizes={"smoke": {"seeds": 10, "steps": 300}, "laptop": {}, "paper": {"seeds": 100}})
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

    def regress(seed: int) -> dict[str, Any]:
        train, y, test = regression(run.seed, seed, n, d, noise, literal)
        lr = rate / float(torch.linalg.matrix_norm(train, 2) ** 2)
        w = torch.zeros(d + 1, dtype=torch.float64)
        v = torch.nn.Parameter(torch.zeros(d + 1, dtype=torch.float64))
        opt = SuperNat(v, train, lr=lr)
        errors = [(test_error(w, test), test_error(v.detach(), test))]
        for _ in range(steps):
            w -= lr * train.T @ (train @ w - y)
            opt.step(train @ v.detach() - y)
            errors.append((test_error(w, test), test_error(v.detach(), test)))
        gd, supernat = (torch.stack(row) for row in zip(*errors))
        return {"gd": gd, "supernat": supernat, "gd_noise": float(w[1:].norm()), "supernat_noise": float(v[1:].norm())}

    every = progress(range(seeds), "regressions")
    parts: list[dict[str, Any]] = [run.cached(f"seed={seed}", partial(regress, seed)) for seed in every]
    curves = {name: torch.stack([part[key] for part in parts]) for name, key in METHODS.items()}  # [seeds, steps + 1]
    gaps = curves["gradient descent"][:, -1] - curves["SuperNat"][:, -1]
    numbers = {"final test error, gradient descent minus SuperNat": Estimate.of(gaps)}
    for name, rows in curves.items():
        numbers[f"final test error, {name}"] = Estimate.of(rows[:, -1])
        numbers[f"weight on the noise features, {name}"] = Estimate.of(part[f"{METHODS[name]}_noise"] for part in parts)
    return StudyResult(
        measured=f"Final test error {numbers['final test error, gradient descent']} with gradient descent, "
        f"{numbers['final test error, SuperNat']} with SuperNat.",
        numbers=numbers,
        figures=(_chart(curves),),
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


def test_error(w: Tensor, features: Tensor) -> Tensor:
    """Mean squared distance from the clean target, which is the first feature."""
    return (features @ w - features[:, 0]).square().mean()


def _chart(curves: dict[str, Tensor]) -> Chart:
    count = next(iter(curves.values())).shape[1]
    shown = sorted(step for step in {round(count ** (i / 80)) for i in range(81)} | {1} if step < count)
    series = tuple(curve(name, shown, rows[:, shown]) for name, rows in curves.items())
    return Chart("test-error", "Test error", "step", "mean squared error on the clean target", series,
                 alt="Gradient descent falls and then rises as it fits the noise; SuperNat stays low.",
                 caption="Mean over seeds, band: standard error.", log_x=True, log_y=True)  # fmt: skip
