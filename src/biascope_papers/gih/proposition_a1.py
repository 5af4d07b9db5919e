"""Proposition A.1: at initialisation Delta does not depend on the labels (squared error, last layer of mean zero).

Pairs: every network is taken with its last layer as drawn and negated; in their mean labels must cancel to rounding.
Networks as drawn: Delta with true, random and constant labels, against Delta with zeros. What independent groups have
in common of the difference d, <d_i, d_j> with i != j over <d_i, d_i>, has the expectation 0 if the proposition holds;
its standard error is that under the proposition, where every d_i is as likely as -d_i. Control: a last layer with a
mean.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from biascope import UnsupportedError
from biascope.ensembles import Networks, record
from biascope.geometry import evolution_of
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.support import derive, generator, progress
from biascope_papers.gih.averages import Averages, stacked
from biascope_papers.gih.networks import at_least, factory, scope, shape_of
from biascope_papers.gih.sets import Source, describe, two_classes

NETS = ("mlp", "lenet", "resnet18", "vit")
COMMON = "common part of the difference to labels 0"
CONTROL = "constant labels, last layer with a mean"


@study(
    "gih/proposition-a1",
    sizes={
        "smoke": {"nets": ("mlp", "lenet"), "source": "synthetic", "side": 16, "per_class": 20, "networks": 32,
                  "groups": 4, "probes": 2},
        "laptop": {"nets": ("mlp", "lenet", "vit-small"), "side": 16, "per_class": 30, "networks": 320},
        "paper": {},
    },
)  # fmt: skip
def proposition_a1(
    run: Run,
    *,
    nets: Annotated[tuple[str, ...], "architectures, without normalisation"] = NETS,
    source: Annotated[Source, "cifar10, or a synthetic stand-in"] = "cifar10",
    side: Annotated[int, "side of the images"] = 32,
    per_class: Annotated[int, "training images per class"] = 500,
    networks: Annotated[int, "networks drawn"] = 1000,
    groups: Annotated[int, "independent groups of networks, for errors"] = 8,
    probes: Annotated[int, "probe inputs N(0, I) that a group of networks shares"] = 4,
    shift: Annotated[float, "mean of the last layer of the control, in standard deviations of its weights"] = 2.0,
    batch: Annotated[int, "images per pass; sets the memory, not the result"] = 100,
) -> StudyResult:
    """Delta at initialisation with true, random and zero labels."""
    at_least(3, groups=groups)
    at_least(groups, networks=networks)
    at_least(1e-12, shift=shift)
    shape, size = shape_of(3, side, nets), networks // groups
    images = two_classes(run, source, side, per_class)[0]
    true = torch.where(images.y > 0, 1.0, -1.0)
    coin = torch.randint(2, true.shape, generator=generator(run.seed, "random labels"))
    labels = {"true": true, "random": 2.0 * coin - 1, "constant": torch.ones_like(true)}
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    text: list[str] = []
    largest = 0.0
    for net in nets:
        recorded, seed = record(factory(net, shape, outputs=1, norm=False)), derive(run.seed, "labels", net)

        def group(i: int, recorded=recorded, seed: int = seed) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
            drawn = recorded.draw(seed, i * size, (i + 1) * size, torch.device(run.device), torch.float64)
            at = torch.randn(probes, *shape, generator=generator(seed, "probes", i))
            return differences(drawn, at, images.x, labels, shift, batch)

        made = run.cached_each(f"delta {net}", progress(range(groups), f"Delta of {net}", leave=False), group)
        parts = {name: stacked([torch.as_tensor(each[name]) for each in made]) for name in made[0]}
        found = {name: common(parts[name]) for name in (*labels, "control")}
        for name in labels:
            numbers[f"{net}: {name} labels, networks as drawn: {COMMON}"] = found[name]
        numbers[f"{net}: {CONTROL}: {COMMON}"] = found["control"]
        for name in labels:
            off = float(parts[f"{name} pairs"].mean.norm() / parts["zero"].mean.norm())
            what = f"{name} labels, pairs of opposite last layers: ||difference|| / ||Delta||"
            numbers[f"{net}: {what}"], largest = Estimate(off, None, networks), max(largest, off)
        noise = Estimate(parts["zero"].noise(), None, networks)
        numbers[f"{net}: sampling noise, share of ||Delta||, labels 0"] = noise
        text.append(f"{net}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        charts.append(_distances(net, parts, size))
    return StudyResult(
        measured=f"What independent groups of networks share of the difference to labels 0: {'; '.join(text)}. Over "
        f"pairs of networks with opposite last layers the difference is at most {largest:.1g} of ||Delta||. "
        f"{describe(source, side)}."
        f"{scope(networks=(nets, NETS), images=([source], ['cifar10']))}",
        numbers=numbers,
        figures=tuple(charts),
    )


def differences(
    drawn: Networks, at: Tensor, x: Tensor, labels: dict[str, Tensor], shift: float, batch: int
) -> dict[str, Tensor]:
    """Delta with labels 0, and differences to it: as drawn, over pairs, and of the control; [D, D] each."""
    room = None if drawn.device.type == "cuda" else "1GB"

    def delta(networks: Networks, y: Tensor) -> Tensor:
        return evolution_of(networks, at, x, y, max_memory=room, batch=batch).matrix

    zeros = torch.zeros(len(x))
    opposite, moved = change_last(drawn, scale=-1.0), change_last(drawn, shift=shift)
    plain, lifted = delta(drawn, zeros), delta(moved, zeros)
    found = {"zero": plain, "control zero": lifted, "control": delta(moved, labels["constant"]) - lifted}
    for name, y in labels.items():
        one = delta(drawn, y)
        found |= {name: one - plain, f"{name} pairs": (one + delta(opposite, y)) / 2 - plain}
    return found


def change_last(networks: Networks, scale: float = 1.0, shift: float = 0.0) -> Networks:
    """The same networks with the last layer scaled, and its weights moved by `shift` of their standard deviations."""
    linear = [name for name, module in networks.template.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError("this network has no fully connected layer at its end")
    params = dict(networks.params)
    for part in ("weight", "bias"):
        name = f"{linear[-1]}.{part}"
        if name in params:
            params[name] = scale * params[name]
            if part == "weight" and shift:
                params[name] = params[name] + shift * params[name].std()
    return Networks(networks.template, params, networks.buffers)


def common(difference: Averages) -> Estimate:
    """<d_i, d_j> with i != j over <d_i, d_i>: what independent estimates of a difference share; 0 for noise alone.

    The error is the spread of this number over random signs of the d_i.
    """
    R = difference.R
    i, j = torch.triu_indices(R, R, 1)
    pairs, own = difference.gram[i, j], difference.gram.diagonal().mean()
    return Estimate(float(pairs.mean() / own), float(pairs.norm() / own) / len(pairs), R)


def _distances(net: str, parts: dict[str, Averages], size: int) -> Chart:
    counts = range(1, parts["zero"].R + 1)

    def distances(name: str) -> list[float]:
        found = [float(parts[name].matrices[:r].mean(0).norm()) for r in counts]
        return [each / found[0] for each in found]

    x = [size * r for r in counts]
    names = {**{name: f"{name} labels" for name in ("true", "random", "constant")}, "control": CONTROL}
    noise = Series.of("noise: 1 / sqrt(networks)", x, [(x[0] / n) ** 0.5 for n in x], style="dashed")
    return Chart(
        f"labels-{net}", f"Distance of Delta with labels to Delta with labels 0, {net}", "networks averaged",
        "distance / that of the first group",
        (*(Series.of(label, x, distances(name)) for name, label in names.items()), noise),
        "Distance of Delta with labels to Delta without against the number of networks, on logarithmic axes.",
        "What is noise falls along the dashed line; with a last layer of mean not zero a difference stays.",
        log_x=True, log_y=True,
    )  # fmt: skip
