"""How linear the beginning of training is, and how complex the function it finds: a few steps of gradient descent.

Along the way: the Taylor residual ||f - f_lin|| / ||f_lin - f_0|| of the outputs, the share of activation signs that
are as at initialisation, and the path complexity C = sum_t ||dw_t|| ||Phi_t||_F with the tangent features Phi_t.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import data
from biascope.curvature.complexity import PathComplexity, feature_norm
from biascope.reports import figures
from biascope.reports.html import Html, figure, table, tag
from biascope.reports.panels import input_geometry
from biascope.reports.panels.base import Panel, Subject, all_outputs, card_panel, output_count, refuse_dense
from biascope.reports.panels.pace import timed
from biascope.reports.panels.tangent_kernel import kernel_facts
from biascope.reports.study_page import fact_list
from biascope.support.bars import progress
from biascope.support.errors import BiascopeError, UnsupportedError
from biascope.support.seeds import derive
from biascope.tangent import taylor_residual

TITLE = "Linear or not"
READ = (
    "A network in the linear regime changes as its tangent model predicts (residual near 0) and keeps its activation "
    "pattern (signs near 100 %); with a residual of about 1 or more the tangent model predicts nothing. The complexity "
    "sums the lengths of the steps, weighted by how strongly the outputs respond."
)
EXAMPLES, SEEN = (128, 64, 32, 16, 8), (1, 2, 4, 8, 16, 32)
RESPONSES, OUTPUTS = (64, 32, 16, 8, 4, 2), 10  # the complexity: on so many examples and at most so many outputs
LITTLE = 0.02  # share of the loss below which training has not begun
SMALLER = (1, 4, 16)  # the learning rate is divided by these, until the loss does not rise
WILD = 10.0  # times the first loss: no use going on


@dataclass(frozen=True)
class Seen:
    """What was measured after a step."""

    step: int
    loss: float
    residual: float
    signs: float
    complexity: float


@card_panel(order=60)
def panel(subject: Subject) -> Panel:
    """Taylor residual, sign similarity and complexity over the first steps."""
    refuse_dense(subject)
    subject.check_memory()
    n, responses = sizes(subject)
    x, y, task = examples(subject, n)
    responses = min(responses, len(x))  # the data may have fewer
    seen, lr = train(subject, x, y, responses)
    last = seen[-1]
    facts: list[tuple[str, object]] = [
        ("Task", f"{len(x)} of {task}"),
        ("Steps", f"{last.step}, learning rate {lr:.2g}"),
        ("Loss", f"{seen[0].loss:.3g} to {last.loss:.3g}"),
        ("Residual", f"{last.residual:.2g}"),
        ("Signs kept", "no activations" if math.isnan(last.signs) else f"{last.signs:.1%}"),
        ("Complexity", f"{last.complexity:.3g}, {measured_on(subject, responses)}"),
    ]
    rows = [(s.step, s.loss, s.residual, s.signs, s.complexity) for s in seen]
    header = ["step", "loss", "Taylor residual", "signs kept", "complexity"]
    numbers = table(header, rows, "linear-regime", fold=True)
    columns = tag("div", tag("div", _figure(seen)), tag("div", _complexity(seen)), class_="columns")
    headline = (
        f"After {last.step} training steps the error of its tangent model is {last.residual:.0%} of the change of the "
        "outputs."
    )
    return Panel(TITLE, READ, _meaning(seen), [fact_list(facts), columns, numbers], headline=headline)


def sizes(subject: Subject) -> tuple[int, int]:
    """Examples of the steps, and examples on which the complexity is measured: what the time allows.

    In units of a training step on one example: a step takes 1.4, a kernel 3, a Taylor residual with its signs 5 (each
    measured on networks from LeNet to DenseNet-121). A feature norm takes 1.7 per output where all layers have a rule,
    and far longer where autograd must help out, so it is timed.
    """
    train, steps = subject.pace().train, SEEN[-1]
    quick = 1.7 * min(output_count(subject), OUTPUTS) * train

    def seconds(n: int, responses: int, norm: float) -> float:
        return n * train * (1.4 * steps + 3 + 5 * len(SEEN)) + steps * responses * norm

    allowed, least = subject.seconds(TITLE), seconds(EXAMPLES[-1], RESPONSES[-1], quick)
    if least <= allowed:
        norm = max(quick, subject.once("feature norm", lambda: norm_seconds(subject)))
        for n in EXAMPLES:
            for responses in RESPONSES:
                if responses <= n and seconds(n, responses, norm) <= allowed:
                    return n, responses
        least = seconds(EXAMPLES[-1], RESPONSES[-1], norm)
    what = f"{steps} steps on {EXAMPLES[-1]} examples"
    raise subject.too_long(what, least, TITLE)


def norm_seconds(subject: Subject) -> float:
    """Seconds of a feature norm, per example."""
    head, x = FirstOutputs(subject.network), subject.inputs(4)
    feature_norm(head, x)  # the first call finds out how each layer is handled
    return timed(lambda: feature_norm(head, x), x.device) / len(x)


def examples(subject: Subject, n: int) -> tuple[Tensor, Tensor, str]:
    """n inputs, classes and the name of the task: the data, or D(v) along the first anisotropy direction."""
    if subject.data is not None and subject.data.kind != "places":
        x = subject.examples(n)
        return x, subject.data.y[: len(x)].to(x.device), subject.data.name
    spectrum = input_geometry.shared(subject)[2]
    v = torch.from_numpy(spectrum.vectors[0].copy()).float().reshape(subject.input_shape)
    made = data.directional(v, n, sigma=1.0, seed=derive(subject.seed, "card regime"))
    return made.x.to(subject.device), made.y.to(subject.device), "D(v), first direction"


def train(subject: Subject, x: Tensor, y: Tensor, responses: int = RESPONSES[0]) -> tuple[list[Seen], float]:
    """What was seen along full-batch gradient descent from network 0, and the learning rate.

    The complexity is measured on the first `responses` examples. A descent that raises the loss or breaks off says
    nothing about the network, so it is made again with smaller steps; what rises with the smallest too is refused.
    """
    largest = len(x) / float(kernel_facts(subject.network, x).values[0])  # half of what is stable for squares
    for divisor in SMALLER:
        lr = largest / divisor
        seen, through = descend(subject, x, y, lr, responses)
        if through and seen[-1].loss <= seen[0].loss:
            return seen, lr
    if not through or seen[-1].loss > (1 + LITTLE) * seen[0].loss:
        tried = ", ".join(f"{largest / divisor:.2g}" for divisor in SMALLER)
        raise UnsupportedError(
            f"gradient descent diverged: with every learning rate that was tried ({tried}) the loss rose above its "
            f"{seen[0].loss:.3g} at the start or was not finite, so nothing is concluded"
        )
    return seen, lr


def descend(
    subject: Subject, x: Tensor, y: Tensor, lr: float, responses: int = RESPONSES[0]
) -> tuple[list[Seen], bool]:
    """What was seen with one learning rate, and whether all steps could be made."""
    start = subject.network
    network = copy.deepcopy(start)
    parameters = [p for p in network.parameters() if p.requires_grad]

    def loss() -> Tensor:
        out = all_outputs(subject, network, x)
        if y.is_floating_point():  # a regression
            if out.shape != y.shape:
                raise UnsupportedError(f"{subject.name} has {out.shape[1]} outputs and the data {y.shape[1]} targets")
            return F.mse_loss(out, y)
        if out.shape[1] == 1:
            return F.binary_cross_entropy_with_logits(out[:, 0], (y > 0).to(out.dtype))
        return F.cross_entropy(out, y.clamp_max(out.shape[1] - 1))

    with torch.no_grad():
        value = float(loss())
    path, head = PathComplexity(x[:responses]), FirstOutputs(network)
    path.update(head)
    seen = [Seen(0, value, 0.0, 1.0, 0.0)]
    for step in progress(range(1, SEEN[-1] + 1), "steps"):
        gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                if gradient is not None:
                    parameter.sub_(lr * gradient)
        with torch.no_grad():
            now = float(loss())
        if not now <= WILD * value:  # nan too, and before the complexity, which refuses such a network
            return seen, False
        complexity = path.update(head)
        if step in SEEN:
            residual = taylor_residual(start, network.state_dict(), x)
            seen.append(Seen(step, now, residual, signs_kept(start, network, x), complexity))
    return seen, True


class FirstOutputs(nn.Module):
    """The first few outputs of a network, which stays what it is: a thousand classes would take minutes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] to [n, at most OUTPUTS]."""
        out: Tensor = self.network(x)
        return out.reshape(len(x), -1)[:, :OUTPUTS]


def measured_on(subject: Subject, examples: int) -> str:
    """What the complexity is about, in words."""
    outputs = output_count(subject)
    return f"on {examples} examples" + (f" and {OUTPUTS} of {outputs} outputs" if outputs > OUTPUTS else "")


def signs_kept(start: nn.Module, network: nn.Module, x: Tensor) -> float:
    """Share of (unit, example) pairs that are active or not as at the start; NaN without activations.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> signs_kept(net, net, torch.ones(4, 2))
        1.0
    """
    from biascope.probes.activations import activation_signs

    try:
        before = activation_signs(lambda: start(x), len(x))
        now = activation_signs(lambda: network(x), len(x))
    except BiascopeError:
        return math.nan
    return sum(int((a == b).sum()) for a, b in zip(before, now)) / sum(a.numel() for a in before)


def _meaning(seen: list[Seen]) -> str:
    last = seen[-1]
    drop = 1 - last.loss / seen[0].loss
    regime = (
        "training starts in the linear regime, and the tangent model predicts it"
        if last.residual < 0.1
        else "the tangent model predicts the direction of the change, but not its size"
        if last.residual < 0.5
        else "training is not linear, and the tangent model at initialisation soon fails"
    )
    signs = "" if math.isnan(last.signs) else f" {last.signs:.0%} of the activations kept their sign."
    change = f"{'lower' if drop >= 0 else 'raise'} the loss by {abs(drop):{'.0%' if abs(drop) >= 0.01 else '.1%'}}"
    off = f"{last.residual:.0%} of" if last.residual < 2 else f"{last.residual:.2g} times"
    off = "less than 1% of" if last.residual < 0.01 else off
    if drop < LITTLE:
        regime = "the loss hardly changed, so this describes the first steps only, not training"
    return (
        f"After {last.step} steps that {change}, the error of the tangent model is {off} the change of the outputs: "
        f"{regime}.{signs}"
    )


def _figure(seen: list[Seen]) -> Html:
    steps = [s.step for s in seen[1:]]
    residual, signs = [s.residual for s in seen[1:]], [1 - s.signs for s in seen[1:]]
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.plot(steps, residual, "o-", color="C0", label="Taylor residual")
        if not any(map(math.isnan, signs)):
            axes.plot(steps, signs, "s-", color="C1", label="share of signs that changed")
        axes.set(xlabel="step", ylabel="departure from linear", ylim=(0, None))
        figures.log_scale(axes, "x")
        axes.legend()
    svg = figures.inline_svg(drawing, "regime")
    lines = [("Taylor residual", steps, residual), ("signs changed", steps, signs)]
    alt = f"The residual goes from {residual[0]:.2g} to {residual[-1]:.2g} in {steps[-1]} steps."
    return figure(svg, alt, hover=figures.hover(axes, lines))


def _complexity(seen: list[Seen]) -> Html:
    loss, complexity = [s.loss for s in seen], [s.complexity for s in seen]
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.plot(complexity, loss, "o-", color="C2")
        axes.set(xlabel="complexity C", ylabel="training loss")
    svg = figures.inline_svg(drawing, "complexity")
    alt = f"The loss falls from {loss[0]:.3g} to {loss[-1]:.3g} while the complexity grows to {complexity[-1]:.3g}."
    return figure(svg, alt, "Path complexity spent for the loss.", figures.hover(axes, [("", complexity, loss)]))
