"""Propositions A.2 and A.3: how fast the gradient of the spectrum, and the rate of learning one frequency, fall with k.

A.2: the spectrum of a random network of one input, and its derivative along a random direction of the parameters, by
central differences of exact transforms. A.3: networks at initialisation, on the target cos(2 pi k_0 z + phi) and the
sampled squared loss: |d h~(k_0) / dt| under gradient flow, from the exact Jacobian.
"""

import copy
import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from biascope.spectral import fourier_transform, linear_regions_1d
from biascope.spectral.decay import decay_exponent
from biascope.studies import Chart, Estimate, Run, StudyResult, study
from biascope.studies.estimates import curve
from biascope.support import derive, generator, progress
from biascope_papers.spectral.fitting import draw_mlps, stacked, tensors
from biascope_papers.spectral.flowers import log_slope

STEP = 1e-7  # of the central difference: breakpoints move by far less than a wave


@study("spectral/propositionA.2", sizes={"smoke": {"networks": 3, "width": 6}, "laptop": {}, "paper": {}})
def proposition_a_2(
    run: Run,
    *,
    networks: Annotated[int, "random networks"] = 20,
    depth: Annotated[int, "Linear layers"] = 3,
    width: Annotated[int, "units in a hidden layer"] = 10,
    k_min: Annotated[float, "lower end of the fit"] = 1e2,
    k_max: Annotated[float, "upper end of the fit"] = 1e4,
) -> StudyResult:
    """Exponents of the exact spectrum of a random network and of its derivative by the parameters."""

    def one(i: int) -> dict[str, Tensor]:
        net = draw_mlps(1, 1, depth, width, derive(run.seed, "network", i)).module(0).double()
        rng = generator(run.seed, "direction", i)
        way = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in net.parameters()]
        length = math.sqrt(sum(float(v.square().sum()) for v in way))
        ahead, behind = (_moved(net, [sign * STEP / length * v for v in way]) for sign in (1, -1))

        def spectrum(k: Tensor, of: nn.Module = net) -> Tensor:
            return fourier_transform(linear_regions_1d(of, -3.0, 3.0), k[:, 0], boundary=False)

        def derivative(k: Tensor) -> Tensor:
            return (spectrum(k, ahead) - spectrum(k, behind)) / (2 * STEP)

        found = [decay_exponent(f, k_min=k_min, k_max=k_max) for f in (spectrum, derivative)]
        return {"exponents": torch.tensor([d.exponent for d in found]), "k": torch.stack([d.k for d in found]),
                "envelope": torch.stack([d.envelope for d in found])}  # fmt: skip

    parts = run.cached_each("network", progress(range(networks), "networks"), one)
    of_f, of_gradient = stacked(parts, "exponents").double().T
    numbers = {
        "exponent of the spectrum": Estimate.of(of_f),
        "exponent of its gradient": Estimate.of(of_gradient),
        "gradient minus spectrum": Estimate.of(of_gradient - of_f),
    }
    envelopes = stacked(parts, "envelope")
    at = tensors(parts[0])["k"]
    lines = (curve("|f~|", at[0], envelopes[:, 0]), curve("|d f~ / d theta|", at[1], envelopes[:, 1]))
    values = list(numbers.values())
    return StudyResult(
        measured=f"Exponents: {values[0]} of the spectrum, {values[1]} of its gradient, difference {values[2]}.",
        numbers=numbers,
        figures=(Chart("decay", "Envelopes of the spectrum and of its gradient", "k", "size", lines, log_x=True,
                       log_y=True, alt="Two straight lines, that of the gradient less steep by one power."),),
    )  # fmt: skip


def _moved(net: nn.Module, by: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p, step in zip(other.parameters(), by):
            p.add_(step)
    return other


@study("spectral/propositionA.3", sizes={"smoke": {"networks": 3, "samples": 512}, "laptop": {}, "paper": {}})
def proposition_a_3(
    run: Run,
    *,
    networks: Annotated[int, "random networks"] = 20,
    depth: Annotated[int, "Linear layers"] = 3,
    width: Annotated[int, "units in a hidden layer"] = 16,
    samples: Annotated[int, "N, points z = j/N; frequencies go from 4 to N/8"] = 2048,
    phases: Annotated[int, "phases of the target, over which squares are averaged"] = 8,
) -> StudyResult:
    """The rate at which the residual at k_0 changes under gradient flow, over k_0."""
    z = torch.arange(samples, dtype=torch.float64)[:, None] / samples
    spaced = torch.logspace(math.log10(4), math.log10(samples / 8), 48, dtype=torch.float64)
    k = torch.tensor(sorted({round(v) for v in spaced.tolist()}), dtype=torch.float64)

    def one(i: int) -> dict[str, Tensor]:
        net = draw_mlps(1, 1, depth, width, derive(run.seed, "network", i)).module(0).double()
        params = {name: p.detach() for name, p in net.named_parameters()}

        def output(p: dict[str, Tensor], at: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(net, p, (at[None],))[0, 0]
            return out

        rows = torch.func.vmap(partial(torch.func.jacrev(output), params))(z)
        J = torch.cat([row.flatten(1) for row in rows.values()], 1)  # [N, P]
        shift = 2 * math.pi * torch.rand(phases, generator=generator(run.seed, "phase", i), dtype=torch.float64)
        angle = 2 * math.pi * k[:, None] * z[:, 0]  # [k, N]
        target = (angle[:, None] + shift[:, None]).cos()
        with torch.no_grad():
            change = -2 * (net(z)[:, 0] - target) @ J @ J.T  # [k, phases, N]
        wave = torch.polar(torch.ones_like(angle), -angle)
        rate = torch.einsum("kpn,kn->kp", change.to(wave.dtype), wave).abs() / samples
        return {"rate": rate.square().mean(1).sqrt()}

    parts = run.cached_each("network", progress(range(networks), "networks"), one)
    rates = stacked(parts, "rate").double()
    slope = Estimate.of(log_slope(k, rates))
    lines = (curve("rate", k, rates / rates[:, :1]),)
    return StudyResult(
        measured=f"The rate falls like k_0 to the power {slope}, k_0 from {int(k[0])} to {int(k[-1])}.",
        numbers={"exponent of the rate": slope},
        figures=(Chart("rate", "Rate of learning one frequency, over that of the lowest", "k_0", "relative rate",
                       lines, log_x=True, log_y=True, alt="A straight falling line."),),
    )  # fmt: skip
