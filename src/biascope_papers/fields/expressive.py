"""Theorem 5.1: which frequencies a network of sines with polynomial activations can have, checked to rounding.

The energy at frequencies outside H(Omega), by an exact DFT in float64, and, as a control, outside the smaller set that
one layer less would allow.
"""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from biascope.fields import Polynomial, coordinates, missing_bins
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, generator


@study("fields/theorem5.1", sizes={"smoke": {"networks": 2}, "laptop": {}, "paper": {}})
def theorem5_1(
    run: Run,
    *,
    frequencies: Annotated[tuple[float, ...], "Omega, whole numbers of cycles"] = (7.0, 40.0),
    degrees: Annotated[tuple[int, ...], "K of the activation"] = (2, 3),
    layers: Annotated[int, "L, linear layers behind the sines"] = 3,
    networks: Annotated[int, "drawn networks for each degree"] = 5,
    samples: Annotated[int, "of the DFT; more than twice K^(L-1) times the largest frequency"] = 1024,
) -> StudyResult:
    """Energy of networks of sines outside the harmonics that theorem 5.1 allows."""
    omega = torch.tensor(frequencies, dtype=torch.float64)

    def outside(degree: int, i: int) -> dict[str, Tensor]:
        net = _network(omega, degree, layers, derive(run.seed, degree, i))
        power = torch.fft.fft(net(coordinates(samples, 0.0, 1.0, dtype=torch.float64))).abs().square()
        power = power / power.sum()
        beyond = [power[missing_bins(omega, degree, count, samples)].sum() for count in (layers, layers - 1)]
        return {"power": power[: samples // 2], "outside": beyond[0], "one layer less": beyond[1]}

    made = {k: run.cached_each(f"degree {k}", range(networks), partial(outside, k)) for k in degrees}

    def shares(which: str) -> list[float]:
        return [float(torch.as_tensor(row[which])) for rows in made.values() for row in rows]

    largest, smallest = max(shares("outside")), min(shares("one layer less"))
    return StudyResult(
        measured=f"At most {largest:.1e} of the energy lies outside H; outside the harmonics of one layer less at "
        f"least {smallest:.1e}. Degrees {', '.join(map(str, degrees))}, {layers} layers, {networks} networks each.",
        numbers={
            "largest share of energy outside H": Estimate(largest),
            "smallest share of energy outside H of one layer less": Estimate(smallest),
        },
        figures=(
            Chart(
                "spectrum", f"A network with sines of {' and '.join(f'{f:g}' for f in frequencies)} cycles",
                "frequency (cycles)", "share of energy",
                tuple(
                    Series.of(f"degree {k}", range(1, samples // 2), torch.as_tensor(each[0]["power"])[1:] + 1e-32)
                    for k, each in made.items()
                ),
                alt="Lines at sums and differences of harmonics, rounding elsewhere.", log_y=True,
            ),
        ),
    )  # fmt: skip


def _network(omega: Tensor, degree: int, layers: int, seed: int) -> nn.Module:
    """r [n, 1] -> [n]: sines of these frequencies with random phases, then linear layers with polynomials between."""
    rng = generator(seed, "weights")
    width, phases = 5, 2 * torch.pi * torch.rand(len(omega), generator=rng, dtype=torch.float64)
    parts, fan_in = list[nn.Module](), len(omega)
    for i in range(layers):
        linear = nn.Linear(fan_in, 1 if i == layers - 1 else width).double()
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=rng, dtype=p.dtype) / fan_in**0.5)
        parts += [linear] if i == layers - 1 else [linear, Polynomial([1.0 / (k + 1) for k in range(degree + 1)])]
        fan_in = width
    rest = nn.Sequential(*parts)

    class Sines(nn.Module):
        def forward(self, r: Tensor) -> Tensor:
            out: Tensor = rest(torch.sin(2 * torch.pi * r * omega + phases))[..., 0].detach()
            return out

    return Sines()
