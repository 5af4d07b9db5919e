"""Proposition A.1: at initialisation Delta does not depend on the labels (squared error, last layer of mean zero).

With the squared error Delta is a part without labels plus one that is linear in them, and odd in the weights of the
last layer. Two tests of it. Pairs: every network is taken with its last layer as drawn and negated, which is as likely,
so their mean is an estimate of the same Delta, and in it labels must cancel to rounding. Networks as drawn: Delta with
true and with random labels, and with 1 for all images, against Delta with zeros, same networks and probes. What
independent groups of networks have in common of the difference d, <d_i, d_j> with i != j over <d_i, d_i>, has the
expectation 0 if the proposition holds and tends to 1 with the size of the groups if it does not. Its standard error is
that under the proposition, where every d_i is as likely as -d_i. Control: a last layer with a mean, all labels 1.
Neither test needs Gaussian weights: torch's uniform weights and biases are as symmetric.

Verdict rule, fixed before the first run above smoke size: for every network the difference over pairs is below 1e-6 of
||Delta||, for true, random and constant labels, and without pairs its common part is within 3 standard errors of 0.
Where that of the control is not above 0 by 3, nothing is tested: an effect of labels would not have been seen either.
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from biascope.arguments import check_count, check_number
from biascope.ensembles import Networks, record
from biascope.errors import UnsupportedError
from biascope.geometry import evolution_of
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.studies.invariance.averages import Averages, stacked
from biascope.studies.invariance.charts import decide, remark, restricted, together
from biascope.studies.invariance.images import Source, said, two_classes
from biascope.studies.invariance.networks import factory, shape_of
from biascope.studies.registry import study
from biascope.studies.result import Chart, Estimate, Series, StudyResult
from biascope.studies.runs import Run, Value

CLAIM = (
    "With the squared error and a last layer of independent weights of mean zero, the average geometry evolution at "
    "initialisation does not depend on the labels."
)
NETS = ("mlp", "lenet", "resnet18", "vit")
ROUNDING = 1e-6
COMMON = "common part of the difference to labels 0"


@study(
    "gih/proposition-a1",
    paper="invariance",
    figure="Proposition A.1",
    claim=CLAIM,
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
    check_count(groups, "groups", least=3)
    check_count(networks, "networks", least=groups)
    check_number(shift, "shift", above=0)
    shape = shape_of(3, side, nets)
    images = two_classes(run, source, side, per_class)[0]
    true = torch.where(images.y > 0, 1.0, -1.0)
    coin = torch.randint(2, true.shape, generator=generator(run.seed, "random labels"))
    labels = {"true": true, "random": 2.0 * coin - 1, "constant": torch.ones_like(true)}
    numbers: dict[str, Estimate] = {}
    charts: list[Chart] = []
    right: dict[str, bool | None] = {}
    for net in nets:
        size, sampled = networks // groups, Sampled(net, shape, probes, batch)

        def group(i: int, sampled: Sampled = sampled, size: int = size) -> dict[str, Value]:
            return sampled.group(run, i, size, images.x, labels, shift)

        made = run.cached_each(f"delta {net}", progress(range(groups), f"Delta of {net}", leave=False), group)
        parts = {name: stacked([torch.as_tensor(each[name]) for each in made]) for name in made[0]}
        found = {f"{name} labels, networks as drawn": common(parts[name]) for name in labels}
        found["constant labels, last layer with a mean"] = common(parts["control"])
        for name, value in found.items():
            numbers[f"{net}: {name}: {COMMON}"] = value
        pairs = {}
        for name in labels:
            pairs[name] = float(parts[f"{name} pairs"].mean.norm() / parts["zero"].mean.norm())
            numbers[f"{net}: {name} labels, pairs of opposite last layers: ||difference|| / ||Delta||"] = Estimate(
                pairs[name], None, networks
            )
        numbers[f"{net}: sampling noise, share of ||Delta||, labels 0"] = Estimate(
            parts["zero"].noise(), None, networks
        )
        right[net] = as_claimed(list(found.values()), list(pairs.values()))
        charts.append(_distances(net, parts, size))
    told = "; ".join(
        f"{net}: "
        + ", ".join(f"{name} {numbers[f'{net}: {name} labels, networks as drawn: {COMMON}']}" for name in labels)
        + f", control {numbers[f'{net}: constant labels, last layer with a mean: {COMMON}']}{remark(right[net])}"
        for net in nets
    )
    largest = max(value.value for name, value in numbers.items() if "pairs" in name)
    claim, untested = restricted(CLAIM, networks=(nets, NETS), images=([source], ["cifar10"]))
    return StudyResult(
        verdict=decide(together(right.values()), groups),
        claim=claim,
        measured=f"What independent groups of networks share of the difference to labels 0: {told}. Over pairs of "
        f"networks with opposite last layers the difference is at most {largest:.1g} of ||Delta||. "
        f"{said(source, side)}, {per_class} images per class, {networks} networks in {groups} groups.{untested}",
        numbers=numbers,
        figures=tuple(charts),
    )


class Sampled:
    """Evolutions of groups of networks, with different labels and last layers."""

    def __init__(self, net: str, shape: tuple[int, ...], probes: int, batch: int) -> None:
        self.net, self.shape, self.probes, self.batch = net, shape, probes, batch
        self.recorded = record(factory(net, shape, outputs=1, norm=False))

    def group(
        self, run: Run, i: int, size: int, x: Tensor, labels: dict[str, Tensor], shift: float
    ) -> dict[str, Value]:
        """Delta with labels 0, and differences to it: as drawn, over pairs, and of the control; [D, D] each."""
        seed = derive(run.seed, "labels", self.net)
        drawn = self.recorded.draw(seed, i * size, (i + 1) * size, torch.device(run.device), torch.float64)
        at = torch.randn(self.probes, *self.shape, generator=generator(seed, "probes", i))
        room = None if drawn.device.type == "cuda" else "1GB"

        def delta(networks: Networks, y: Tensor) -> Tensor:
            return evolution_of(networks, at, x, y, max_memory=room, batch=self.batch).matrix

        zeros = torch.zeros(len(x))
        opposite, moved = change_last(drawn, scale=-1.0), change_last(drawn, shift=shift)
        plain, lifted = delta(drawn, zeros), delta(moved, zeros)
        found: dict[str, Value] = {"zero": plain, "control zero": lifted}
        found["control"] = delta(moved, labels["constant"]) - lifted
        for name, y in labels.items():
            one = delta(drawn, y)
            found |= {name: one - plain, f"{name} pairs": (one + delta(opposite, y)) / 2 - plain}
        return found


def change_last(networks: Networks, scale: float = 1.0, shift: float = 0.0) -> Networks:
    """The same networks with the last layer scaled, and its weights moved by `shift` of their standard deviations.

    Example:
        >>> drawn = record(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))).draw(seed=0, start=0, stop=4)
        >>> bool((change_last(drawn, scale=-1.0).params["1.weight"] == -drawn.params["1.weight"]).all())
        True
    """
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

    Example:
        >>> same = stacked([torch.eye(2)] * 3)
        >>> common(same).value
        1.0
    """
    R = difference.R
    i, j = torch.triu_indices(R, R, 1)
    pairs, own = difference.gram[i, j], difference.gram.diagonal().mean()
    return Estimate(float(pairs.mean() / own), float(pairs.norm() / own) / len(pairs), R)  # signs of d_i at random


def as_claimed(shared: list[Estimate], pairs: list[float]) -> bool | None:
    """The rule in the module's docstring; `shared` of every set of labels, and of the control last.

    Example:
        >>> as_claimed([Estimate(0.1, 0.1), Estimate(0.5, 0.1)], [1e-12, 1e-12])
        True
        >>> as_claimed([Estimate(0.1, 0.1), Estimate(0.5, 0.1)], [1e-12, 1e-3])
        False
    """
    *as_drawn, control = ((each.value, 3 * (each.standard_error or 0.0)) for each in shared)
    noise = all(abs(value) <= doubt for value, doubt in as_drawn)
    seen = True if control[0] > control[1] else None
    return together([noise, max(pairs) < ROUNDING, seen])


def _distances(net: str, parts: dict[str, Averages], size: int) -> Chart:
    counts = range(1, parts["zero"].R + 1)

    def distances(name: str) -> list[float]:
        found = [float(parts[name].matrices[:r].mean(0).norm()) for r in counts]
        return [each / found[0] for each in found]

    x = [size * r for r in counts]
    return Chart(
        name=f"labels-{net}",
        title=f"Distance of Delta with labels to Delta with labels 0, {net}",
        x_label="networks averaged",
        y_label="distance / that of the first group",
        series=(
            *(Series.of(f"{name} labels", x, distances(name)) for name in ("true", "random", "constant")),
            Series.of("constant labels, last layer with a mean", x, distances("control")),
            Series.of("noise: 1 / sqrt(networks)", x, [(x[0] / n) ** 0.5 for n in x], style="dashed"),
        ),
        alt="Distance of Delta with labels to Delta without against the number of networks, on logarithmic axes.",
        caption="What is noise falls along the dashed line; with a last layer of mean not zero a difference stays.",
        log_x=True,
        log_y=True,
    )
