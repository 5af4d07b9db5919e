"""Many small networks trained together by full-batch gradient descent in an alpha-scaled regime, each on its own data.

When a network's progress first falls to a threshold its parameters are kept, without waiting for the device; the
outputs at that moment are computed afterwards. On CUDA a step is captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from biascope.ensembles import Factory, record
from biascope.ensembles import capture as captured
from biascope.studies import Run
from biascope.support import progress as bar
from biascope.tangent import lazy_lr
from biascope_papers.lazy.training import exact_float32

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs [T, n], targets [T, n] -> one number per network [T]
CHECK = 100  # steps between checks whether all networks have arrived


def logistic(out: Tensor, y: Tensor) -> Tensor:
    """Mean binary cross-entropy [T] of one logit, labels 0 and 1."""
    return F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)


def squares(out: Tensor, y: Tensor) -> Tensor:
    """0.5 sum of squared errors [T], as in the quadratic model."""
    return 0.5 * (out - y).square().sum(1)


@dataclass(frozen=True, eq=False)
class Crossings:
    """Where T networks stood at K thresholds.

    steps [T, K]: first step with progress at or below the threshold, -1 where that never happened; outputs [T, K, m] at
    the places asked for (NaN where it never happened); progress [L, T] at the steps `times` [L].
    """

    steps: Tensor
    outputs: Tensor
    times: Tensor
    progress: Tensor

    @classmethod
    def cached(cls, run: Run, key: str, compute: Callable[[], Crossings]) -> Crossings:
        """Computed once, then read from the run."""
        return cls(**run.cached(key, lambda: vars(compute())))  # type: ignore[arg-type]


def cross(
    factory: Factory,
    x: Tensor,
    y: Tensor,
    at: Tensor,
    *,
    alpha: float,
    lr: float,
    steps: int,
    thresholds: Sequence[float],
    loss: Loss = logistic,
    measure: Loss | None = None,
    scale: float = 1.0,
    include_init_output: bool = True,
    seed: int = 0,
    capture: bool = True,
) -> Crossings:
    """Train T networks with one output on x [T, n, d], y [T, n] until all are below the last threshold.

    Network i is the i-th of the ensemble of `factory` ([n, d] -> [n, 1]) with this seed, its parameters times `scale`,
    trained with steps of lr / alpha^2. `at`: where the outputs are wanted, [m, d] for all, or [T, m, d]. `measure`:
    progress (None: the loss); the thresholds descend. include_init_output=False trains alpha (f - f0).
    """
    T, device = len(x), x.device
    networks = record(factory).draw(seed, 0, T, device, x.dtype)
    params = {k: (scale * v).requires_grad_(True) for k, v in networks.params.items()}
    template = networks.template

    def call(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
        one = vmap(lambda p, x: functional_call(template, p, (x,))[:, 0], in_dims=(0, 0 if inputs.dim() == 3 else None))
        found: Tensor = one(values, inputs)
        return found

    flat = list(params.values())
    kept = [[torch.full_like(p, torch.nan, requires_grad=False) for p in flat] for _ in thresholds]
    first = torch.full((T, len(thresholds)), -1, dtype=torch.long, device=device)
    limits = torch.tensor(thresholds, device=device, dtype=x.dtype)
    rate = lazy_lr(lr, alpha)
    with exact_float32(), torch.no_grad():
        start, start_at = call(params, x), call(params, at)

    def scaled(f: Tensor, f0: Tensor) -> Tensor:
        return alpha * (f - f0) + (f0 if include_init_output else 0.0)

    def step(now: Tensor) -> Tensor:
        out = scaled(call(params, x), start)
        gradients = torch.autograd.grad(loss(out, y).sum(), flat)
        with torch.no_grad():
            reached = (measure or loss)(out, y)
            hit = (reached[:, None] <= limits) & (first < 0)
            if device.type != "cpu" or bool(hit.any()):  # asking a CUDA device would make it wait
                first.copy_(torch.where(hit, now, first))
                for k, own in enumerate(kept):
                    for held, p in zip(own, flat):
                        held.copy_(torch.where(hit[:, k].view(-1, *[1] * (p.dim() - 1)), p, held))
            torch._foreach_add_(flat, list(gradients), alpha=-rate)
        return reached.detach()

    with exact_float32():
        clock, state = torch.arange(steps, device=device), [*flat, first, *(held for own in kept for held in own)]
        advance = captured(step, clock[0], device=device, state=state) if capture else step
        times, seen = [], []
        for now in bar(range(steps), f"alpha {alpha:g}", leave=False):
            reached = advance(clock[now])
            if now % CHECK == 0:
                times.append(now)
                seen.append(reached.clone())
                if bool((first >= 0).all()) or not bool(reached.isfinite().any()):
                    break
        with torch.no_grad():
            stages = [dict(zip(params, own)) for own in kept]
            outputs = torch.stack([scaled(call(stage, at), start_at) for stage in stages], 1)
    return Crossings(first.cpu(), outputs.cpu(), torch.tensor(times), torch.stack(seen).cpu())
