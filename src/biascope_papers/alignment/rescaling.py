"""Propositions 4.3 and B.7: the rescaling of tangent features that makes a complexity bound least.

Both bounds are a product ||w||_A ||A^-1 Phi^T||_F over A_nu = sum_j sqrt(nu_j) v_j v_j^T + identity elsewhere: w is the
gradient step (4.3), or the interpolator of least norm (B.7). A general optimiser's minimum is compared with the closed
form.
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope.studies import Estimate, Run, StudyResult, study
from biascope.support import derive, generator
from biascope_papers.spectral.fitting import stacked

CASES = ("proposition 4.3", "proposition B.7")


@study("alignment/proposition4.3", sizes={"smoke": {"draws": 3}, "laptop": {}, "paper": {}})
def proposition4_3(
    run: Run,
    *,
    draws: Annotated[int, "random feature matrices"] = 50,
    n: Annotated[int, "samples"] = 8,
    features: Annotated[int, "P, features"] = 20,
) -> StudyResult:
    """Numerical minimisers of both bounds beside the closed forms."""

    def one(i: int) -> dict[str, Tensor]:
        rng = generator(run.seed, "draw", i)
        Phi, g = (torch.randn(n, m, generator=rng, dtype=torch.float64) for m in (features, 2))
        Phi = Phi * torch.logspace(0, -2, n, dtype=torch.float64)[:, None]  # an anisotropic spectrum
        U, S, Vt = torch.linalg.svd(Phi, full_matrices=False)
        c = (U.T @ g).abs()
        cases = ((Phi.T @ g[:, 0], 1 / c[:, 0]), (Phi.T @ torch.linalg.solve(Phi @ Phi.T, g[:, 1]), S**2 / c[:, 1]))
        apart, lowest = [], []
        for w, best in cases:
            start = torch.randn(n, generator=generator(derive(run.seed, "start", i), "nu"), dtype=torch.float64)
            found = minimise(Phi, w, Vt, start)
            gap = (found - found.mean()) - (best.log() - best.log().mean())
            apart.append(gap.abs().max())
            lowest.append(bound(Phi, w, Vt, found) / bound(Phi, w, Vt, best.log()))
        return {"apart": torch.stack(apart), "lowest": torch.stack(lowest)}

    parts = run.cached_each("draw", range(draws), one)
    apart, lowest = stacked(parts, "apart"), stacked(parts, "lowest")
    numbers = {}
    for i, case in enumerate(CASES):
        numbers[f"largest |log nu - log nu*|, {case}"] = Estimate(float(apart[:, i].max()))
        numbers[f"least bound found over that of nu*, {case}"] = Estimate(float(lowest[:, i].min()))
    text = "; ".join(f"{name}: {value.value:.2g}" for name, value in numbers.items())
    return StudyResult(measured=f"{text}. {draws} draws of {n} x {features} features.", numbers=numbers)


def bound(Phi: Tensor, w: Tensor, Vt: Tensor, log_nu: Tensor) -> Tensor:
    """||w||_A ||A^-1 Phi^T||_F for A_nu, from the matrices; ||w||_A^2 = w^T A A^T w."""
    A = torch.eye(len(w), dtype=w.dtype) + Vt.T @ torch.diag((log_nu / 2).exp() - 1) @ Vt
    out: Tensor = (A.T @ w).norm() * torch.linalg.solve(A, Phi.T).norm()
    return out


def minimise(Phi: Tensor, w: Tensor, Vt: Tensor, start: Tensor) -> Tensor:
    """log nu at the minimum of log bound, which is convex in it."""
    log_nu = start.clone().requires_grad_(True)
    search = torch.optim.LBFGS([log_nu], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16,
                               line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        search.zero_grad()
        value = bound(Phi, w, Vt, log_nu).log()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(closure)  # type: ignore[no-untyped-call]
    return log_nu.detach()
