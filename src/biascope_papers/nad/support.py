"""Fig. 5 with Fig. 1: do the first directions live at the frequencies that a network learns well?

The strongest bins of u_1 to u_3 and as many bins drawn from all the others are trained on, with the protocol of Fig. 1.
Every frequency takes part, odd ones too, which the public maps leave out.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from biascope import InputError
from biascope.data.fourier import FourierBasis, dft_basis
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import difference
from biascope.support import derive
from biascope_papers.nad import anisotropy as a
from biascope_papers.nad import directional as d
from biascope_papers.nad import frequencies as f


@study(
    "nad/fig5-support",
    sizes={
        "smoke": {**d.SMOKE, "networks": 64, "count": 6},
        "laptop": {**d.LAPTOP, "networks": 256, "count": 16},
        "paper": {},
    },
)
def fig5_support(
    run: Run,
    *,
    source: a.Source = a.SOURCE,
    first: Annotated[int, "leading directions whose energy counts"] = 3,
    count: Annotated[int, "strongest bins, and as many others"] = 32,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy at the frequencies of the first directions, and at other frequencies."""
    net, side = source.net, source.image_size
    basis = dft_basis((side, side)).part("re")
    if not (2 <= count <= len(basis) // 2 and 1 <= first <= side**2):
        raise InputError(
            f"count = {count}, first = {first}: from 2 to {len(basis) // 2} bins and from 1 to {side**2} directions"
        )
    shares = energy_of_bins(a.directions_of(run, source, protocol.precision)[0][:first], basis)
    chosen = strongest_and_others(shares, count, run.seed)
    factory = d.architecture(net, side, width=source.width)
    trained = d.train_directions(run, net, factory, basis.vectors[chosen], protocol)
    weight, test = shares[chosen].numpy(), trained.test
    strong, other = Estimate.of(test[:count]), Estimate.of(test[count:])
    held = float(weight[:count].sum())
    numbers = {
        f"accuracy at the {count} strongest bins": strong,
        f"accuracy at {count} other bins": other,
        "difference": difference(strong, other),
        "share of the energy in the strongest bins": Estimate(held),
        "mean training accuracy": Estimate.of(trained.train),
    }
    run.save_arrays("support", frequencies=basis.frequencies[chosen], energy=shares[chosen], test=torch.tensor(test))
    names = f"u_1 to u_{first}" if first > 1 else "u_1"
    positive = np.maximum(weight, 1e-12)  # bins without any energy have a place on the axis too
    chart = Chart(
        "accuracy",
        "Accuracy and energy of the first directions, one point per frequency",
        f"share of the energy of {names}",
        "test accuracy",
        (
            Series.of("strongest bins", positive[:count], test[:count], style="points"),
            Series.of("other bins", positive[count:], test[count:], style="points"),
        ),
        alt=f"Accuracy from {test[:count].min():.2f} to {test[:count].max():.2f} at the strongest bins, from "
        f"{test[count:].min():.2f} to {test[count:].max():.2f} at the others.",
        caption="One network per frequency.",
        log_x=True,
    )
    caption = "A bin and its conjugate together; the value is copied to both."
    energy_map = f.heat_map("energy", f"Energy of {names}", shares.numpy(), basis, z_label="share of energy",
                            caption=caption, low=0.0, high=None)  # fmt: skip
    return StudyResult(
        measured=f"{net}, {protocol}: the {count} strongest frequencies of {names} hold {held:.2f} of their energy and "
        f"are learnt with accuracy {strong}, {count} others with {other}.",
        numbers=numbers,
        figures=(chart, energy_map),
    )


def energy_of_bins(directions: Tensor, basis: FourierBasis) -> Tensor:
    """Share [bins] of the energy of directions [k, side, side] in each bin and its conjugate; they add up to 1."""
    mean = a.energy(directions).mean(0)
    conjugate = (-basis.bins) % mean.shape[-1]
    own, twin = (mean[tuple(bins.T)] for bins in (basis.bins, conjugate))
    return torch.where((basis.bins == conjugate).all(1), own, own + twin)


def strongest_and_others(shares: Tensor, count: int, seed: int) -> Tensor:
    """Positions [2 count]: the `count` largest shares, largest first, then as many of the rest, drawn at random."""
    order = shares.argsort(descending=True, stable=True)
    rest = np.random.default_rng(derive(seed, "other bins")).choice(len(shares) - count, count, replace=False)
    return torch.cat([order[:count], order[count:][torch.as_tensor(np.sort(rest))]])
