"""Fig. 3.1: three lines of code do the same for every representation of the Fisher matrix.

    F = bs.fisher(net, x, representation)
    v = dict(net.named_parameters())
    F.quadratic_form(v)

The lines run for every representation there is; so do product, trace and damped solve. (The document's second snippet
is titled "implicit" but makes a dense matrix; here it is the implicit one.)

Verdict: confirmed if everything runs for every representation, and the representations that are the same matrix (dense,
implicit, low-rank) agree with the dense one to 1e-6 in float64. What the approximations give is shown, not judged (see
ekfac/fig3.3 for how good they are).
"""

from typing import Annotated

import torch
from torch import Tensor

from biascope import nets
from biascope.curvature import Metric, fisher
from biascope.curvature.plan import REPRESENTATIONS
from biascope.errors import BiascopeError
from biascope.progress import progress
from biascope.seeds import derive
from biascope.studies.ekfac.common import images
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = "The same three lines of code work for every representation of the metric."
EXACT = ("dense", "implicit", "lowrank")
TOLERANCE = 1e-6


@study(
    "ekfac/fig3.1",
    paper="linearization",
    figure="3.1",
    claim=CLAIM,
    sizes={"smoke": {"n": 50, "width": 8}, "laptop": {"n": 500, "width": 24}, "paper": {"n": 1000, "width": 32}},
)
def fig3_1(
    run: Run,
    *,
    dataset: Annotated[str, "images of ten classes"] = "digits",
    n: Annotated[int, "images"] = 100,
    width: Annotated[int, "units in each of the two hidden layers"] = 12,
    damping: Annotated[float, "of the solve, relative to the mean eigenvalue"] = 1.0,
) -> StudyResult:
    """Quadratic form, product, trace and solve, by the same code for nine representations."""
    x = images(dataset, n, run)[0].double()
    seed = derive(run.seed, "init")
    net = (
        nets.build("mlp", seed=seed, in_features=x.shape[1], hidden=(width, width), outputs=10).to(run.device).double()
    )
    v = {name: p.detach() for name, p in net.named_parameters()}
    found: dict[str, dict[str, Value]] = {}
    failed: dict[str, str] = {}
    for kind in progress(REPRESENTATIONS, "representations"):
        try:
            found[kind] = run.cached(kind, lambda kind=kind: uses(fisher(net, x, kind), v, damping))  # type: ignore[misc]
        except BiascopeError as error:
            failed[kind] = str(error)
    truth = found["dense"]
    errors = {kind: {what: _error(row[what], truth[what]) for what in USES} for kind, row in found.items()}
    numbers = {
        f"relative error of {what}, {kind}": Estimate(error)
        for kind, row in errors.items()
        for what, error in row.items()
    }
    worst = max(error for kind in EXACT if kind in errors for error in errors[kind].values())
    agree = worst < TOLERANCE and all(kind in found for kind in EXACT)
    tail = "".join(f" {kind} failed: {why}." for kind, why in failed.items())
    return StudyResult(
        "confirmed" if agree and not failed else "not confirmed",
        CLAIM,
        f"{len(found)} of {len(REPRESENTATIONS)} representations run on {sum(p.numel() for p in v.values())} "
        f"parameters and {n} images of {dataset}; {', '.join(EXACT)} agree to {worst:.1e}.{tail}",
        numbers,
        (
            Chart(
                "errors",
                "The same code, nine representations",
                "representation (" + ", ".join(f"{i}: {kind}" for i, kind in enumerate(errors)) + ")",
                "relative error against dense",
                tuple(
                    Series.of(
                        what, range(len(errors)), [max(row[what], 1e-16) for row in errors.values()], None, "points"
                    )
                    for what in USES
                ),
                alt="Exact representations have errors near rounding, the others have larger ones.",
                log_y=True,
            ),
        ),
    )


USES = ("quadratic form", "product", "trace", "solve")


def uses(F: Metric, v: dict[str, Tensor], damping: float) -> dict[str, Value]:
    """The four uses, with the vector as a dict of parameters; nothing here depends on the representation."""
    trace = F.trace()
    lam = damping * float(trace) / F.shape[0]
    return {
        "quadratic form": F.quadratic_form(v).double(),
        "product": F.space.flatten(F @ v).double(),
        "trace": trace.double(),
        "solve": F.space.flatten(F.solve(v, damping=lam)).double(),
    }


def _error(value: Value, truth: Value) -> float:
    a, b = torch.as_tensor(value), torch.as_tensor(truth)
    return float((a - b).norm() / b.norm())
