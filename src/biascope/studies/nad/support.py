"""Fig. 5 with Fig. 1: do the first directions live at the frequencies that a network learns well?

The strongest bins of u_1 to u_3 and as many bins drawn from all the others are trained on, with the protocol of Fig. 1.
Every frequency takes part, odd ones too, which the public maps leave out.

Rule for the verdict, set before any run of this study (but the kept maps and directions, which a test compares, were
known): the strongest bins are learnt better than the others by more than 0.1 even two standard errors down.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from biascope.data.fourier import FourierBasis, dft_basis
from biascope.errors import InputError
from biascope.seeds import derive
from biascope.studies.estimates import above, difference, rank_correlation
from biascope.studies.nad import directional as d
from biascope.studies.nad import frequencies as f
from biascope.studies.nad.anisotropy import SOURCE, Source, directions_of
from biascope.studies.nad.fig5 import energy
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.studies.runs import Run

CLAIM = "The first anisotropy directions live at the Fourier frequencies on which the network is accurate in Fig. 1."


@study(
    "nad/fig5-support",
    paper="nad",
    figure="5, with 1",
    claim=CLAIM,
    sizes={
        "smoke": {**d.SMOKE, "networks": 64, "count": 6},
        "laptop": {**d.LAPTOP, "networks": 256, "count": 16},
        "paper": {},
    },
)
def fig5_support(
    run: Run,
    *,
    source: Source = SOURCE,
    first: Annotated[int, "leading directions whose energy counts"] = 3,
    count: Annotated[int, "strongest bins, and as many others"] = 32,
    protocol: d.Protocol = d.PAPER,
) -> StudyResult:
    """Accuracy at the frequencies of the first directions, and at other frequencies."""
    basis = dft_basis((source.image_size,) * 2).part("re")
    if not (2 <= count <= len(basis) // 2 and 1 <= first <= source.image_size**2):
        raise InputError(
            f"count = {count}, first = {first}: from 2 to {len(basis) // 2} bins and from 1 to {source.image_size**2} "
            "directions"
        )
    directions, _ = directions_of(run, source, protocol.precision)
    shares = energy_of_bins(directions[:first], basis)
    chosen = strongest_and_others(shares, count, run.seed)
    factory = d.architecture(source.net, source.image_size, width=source.width)
    trained = d.train_directions(run, source.net, factory, basis.vectors[chosen], protocol)
    weight, test = shares[chosen].numpy(), trained.test
    strong, other = Estimate.of(test[:count]), Estimate.of(test[count:])
    better = difference(strong, other)
    held, seen = float(weight[:count].sum()), float(weight[:count] @ test[:count] / weight[:count].sum())
    numbers = {
        f"accuracy at the {count} strongest bins": strong,
        f"accuracy at {count} other bins": other,
        "difference": better,
        "accuracy at the strongest bins, weighted by their energy": Estimate(seen),
        "share of the energy in the strongest bins": Estimate(held),
        "highest accuracy at the other bins": Estimate(float(test[count:].max())),
        "rank correlation of energy and accuracy": rank_correlation(weight, test),
        "mean training accuracy": Estimate.of(trained.train),
    }
    run.save_arrays("support", frequencies=basis.frequencies[chosen], energy=shares[chosen], test=torch.tensor(test))
    names = f"u_1 to u_{first}" if first > 1 else "u_1"
    return StudyResult(
        "confirmed" if above(better, 0.1) else "not confirmed",
        CLAIM,
        f"{source.net}, {protocol}: the {count} strongest frequencies of {names} hold {held:.2f} of their energy and "
        f"are learnt with accuracy {strong} (weighted by energy {seen:.3f}), {count} others with {other}; difference "
        f"{better}. Rank correlation of energy and accuracy {numbers['rank correlation of energy and accuracy']}.",
        numbers,
        (accuracy_chart(weight, test, count, names), energy_map(shares, basis, names)),
    )


def energy_of_bins(directions: Tensor, basis: FourierBasis) -> Tensor:
    """Share [bins] of the energy of directions [k, side, side] in each bin and its conjugate; they add up to 1.

    Example:
        >>> basis = dft_basis((4, 4)).part("re")
        >>> energy_of_bins(basis.vectors[2:3], basis).argmax().item()
        2
    """
    mean = energy(directions).mean(0)
    side = mean.shape[-1]
    conjugate = (-basis.bins) % side
    own, twin = (mean[tuple(bins.T)] for bins in (basis.bins, conjugate))
    return torch.where((basis.bins == conjugate).all(1), own, own + twin)


def strongest_and_others(shares: Tensor, count: int, seed: int) -> Tensor:
    """Positions [2 count]: the `count` largest shares, largest first, then as many of the rest, drawn at random.

    Example:
        >>> strongest_and_others(torch.tensor([0.1, 0.5, 0.0, 0.4]), 2, seed=0)[:2].tolist()
        [1, 3]
    """
    order = shares.argsort(descending=True, stable=True)
    rest = np.random.default_rng(derive(seed, "other bins")).choice(len(shares) - count, count, replace=False)
    return torch.cat([order[:count], order[count:][torch.as_tensor(np.sort(rest))]])


def accuracy_chart(weight: d.Array, test: d.Array, count: int, names: str) -> Chart:
    """Accuracy over the share of energy, one point per bin."""
    positive = np.maximum(weight, 1e-12)  # bins without any energy have a place on the axis too
    return Chart(
        name="accuracy",
        title="Accuracy and energy of the first directions, one point per frequency",
        x_label=f"share of the energy of {names}",
        y_label="test accuracy",
        series=(
            Series.of("strongest bins", positive[:count], test[:count], None, "points"),
            Series.of("other bins", positive[count:], test[count:], None, "points"),
        ),
        alt=f"Accuracy from {test[:count].min():.2f} to {test[:count].max():.2f} at the strongest bins, from "
        f"{test[count:].min():.2f} to {test[count:].max():.2f} at the others.",
        caption="One network per frequency.",
        log_x=True,
    )


def energy_map(shares: Tensor, basis: FourierBasis, names: str) -> HeatMap:
    """Where the energy is, in the layout of Fig. 1."""
    caption = "A bin and its conjugate together; the value is copied to both."
    return f.heat_map("energy", f"Energy of {names}", shares.numpy(), basis, z_label="share of energy",
                      caption=caption, low=0.0, high=None)  # fmt: skip
