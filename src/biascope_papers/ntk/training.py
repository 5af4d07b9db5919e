"""The training loop of the kernel and alignment studies: data on the device, seeded order, SGD with momentum or Adam.

A step reads nothing from the host, so it runs eagerly on a CPU and is captured once as a CUDA graph on a GPU.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope import InputError, linearize
from biascope.ensembles import arithmetic, capture
from biascope.support import generator
from biascope_papers.ntk.initial import Init

BETAS, EPS = (0.9, 0.999), 1e-8  # Adam
FEW = 8  # steps, for which a capture does not pay
KINDS = {"f": "network", "lin": "linearised"}


@dataclass(frozen=True)
class Recipe:
    """How to train. `precision` is for CUDA only ("float32", "tf32", "bf16"); a CPU computes in float32."""

    steps: int
    batch: int = 128
    lr: float = 0.05
    momentum: float = 0.9
    schedule: Literal["linear", "constant"] = "linear"
    optimiser: Literal["sgd", "adam"] = "sgd"
    precision: str = "tf32"
    graph: bool = True

    def rates(self) -> Tensor:
        """Learning rate of every step [steps]; linear: lr (1 - step / steps)."""
        t = torch.arange(self.steps, dtype=torch.float64) / max(1, self.steps)
        return self.lr * (1 - t if self.schedule == "linear" else torch.ones_like(t))


@dataclass(frozen=True)
class Training:
    """The options of a study's trainings."""

    epochs: Annotated[float, "passes over the training examples"] = 60
    batch: Annotated[int, "examples per step"] = 128
    lr: Annotated[float, "first learning rate; it falls linearly to zero"] = 0.05
    seeds: Annotated[int, "initialisations (and subsets of images)"] = 1
    precision: Annotated[Literal["float32", "tf32", "bf16"], "while training on a GPU"] = "tf32"
    init: Init = "torch"
    norm: Annotated[Literal["off", "batch"], "BatchNorm of a network that trains; its linearisation has none"] = "off"

    def copy_of(self, net: nn.Module, kind: str) -> nn.Module:
        """A network to train from these weights: the network itself ("f"), or its linearisation ("lin")."""
        return copy.deepcopy(net).train(self.norm == "batch") if kind == "f" else linearize(net)

    def recipe(self, n: int, least: int = 1, optimiser: Literal["sgd", "adam"] = "sgd") -> Recipe:
        """For n examples; `least`: fewest steps."""
        steps = max(least, steps_of(self.epochs, n, self.batch))
        return Recipe(steps, self.batch, self.lr, optimiser=optimiser, precision=self.precision)


LONG = Training()


def expanded(net: nn.Module, start: nn.Module) -> nn.Module:
    """A trained network as its kernel sees it: in eval mode, the buffers those of the start, so BatchNorm is off."""
    made, old = copy.deepcopy(net).eval(), dict(start.named_buffers())
    for name, buffer in made.named_buffers():
        buffer.copy_(old[name])
    return made


def steps_of(epochs: float, n: int, batch: int) -> int:
    """Steps in so many epochs; batches that are not full are left out."""
    return max(1, round(epochs * per_epoch(n, batch)))


def per_epoch(n: int, batch: int) -> int:
    """Full batches in n examples (one, if there are fewer examples than the batch asks for)."""
    return max(1, n // batch)


def fit(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    seed: int,
    *,
    at: Iterable[int] = (),
    look: Callable[[int], bool | None] | None = None,
) -> Tensor:
    """Train `model` in place; the loss of every batch before its step, [steps done], on the CPU.

    One output: binary cross-entropy with y in {0, 1}; several: cross-entropy with classes y. `look(step)` is called in
    eval mode before the steps in `at` (and after the last one if `at` has `recipe.steps`); True from it ends training.
    """
    if len(x) != len(y):
        raise InputError(f"{len(x)} inputs but {len(y)} labels")
    wanted = set(at)
    stepper = _Stepper(model, x, y, recipe)
    advance = stepper.step
    for done in range(recipe.steps):
        if look is not None and done in wanted and _looked(model, look, done):
            return stepper.losses[:done].cpu()
        if done % stepper.epoch == 0:
            stepper.shuffle(generator(seed, "order", done // stepper.epoch))
        if done == 0 and recipe.graph and recipe.steps >= FEW:
            advance = capture(stepper.step, device=x.device, state=stepper.state(), optional=True)
        advance()
    if look is not None and recipe.steps in wanted:
        _looked(model, look, recipe.steps)
    return stepper.losses[: recipe.steps].cpu()


def _looked(model: nn.Module, look: Callable[[int], bool | None], step: int) -> bool:
    was = model.training
    model.eval()
    stop = bool(look(step))
    model.train(was)
    return stop


class _Stepper:
    """One step of training on tensors that stay where they are."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.precision: Any = recipe.precision if x.is_cuda else "float32"
        images = x.is_cuda and x.dim() == 4 and not hasattr(model, "linearized")
        if images:  # the layout the tensor cores of convolutions work in
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.layout = torch.channels_last if images else torch.contiguous_format
        self.x = x.contiguous(memory_format=self.layout)
        self.y = y
        self.size, self.epoch = min(recipe.batch, len(x)), per_epoch(len(x), recipe.batch)
        self.params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.moments = [[torch.zeros_like(p) for p in self.params] for _ in range(1 + (recipe.optimiser == "adam"))]
        rates, t = recipe.rates(), torch.arange(1, recipe.steps + 1, dtype=torch.float64)
        eps = torch.full_like(rates, EPS)
        if recipe.optimiser == "adam":  # both bias corrections, moved into the rate and into epsilon
            root = (1 - BETAS[1] ** t).sqrt()
            rates, eps = rates * root / (1 - BETAS[0] ** t), eps * root
        self.rates, self.eps = (v.to(x.device, torch.float32) for v in (rates, eps))
        self.order = torch.zeros(self.epoch, self.size, dtype=torch.long, device=x.device)
        self.count = torch.zeros(1, dtype=torch.long, device=x.device)
        self.losses = torch.zeros(recipe.steps, device=x.device)

    def state(self) -> list[Tensor]:
        """What a step changes and later steps read."""
        moments = [moment for group in self.moments for moment in group]
        return [*self.model.parameters(), *self.model.buffers(), *moments, self.count]

    def shuffle(self, rng: torch.Generator) -> None:
        """Another order of the examples."""
        n = len(self.x)
        self.order.copy_(torch.randperm(n, generator=rng)[: self.epoch * self.size].view(self.epoch, -1))

    def step(self) -> None:
        """One step on the batch whose turn it is."""
        batch = self.order.index_select(0, self.count % self.epoch)[0]
        with arithmetic(self.x.device, self.precision):  # here and not around `look`, which measures in full precision
            loss = criterion(self.model(self.x[batch].contiguous(memory_format=self.layout)), self.y[batch])
            gradients = list(torch.autograd.grad(loss, self.params, materialize_grads=True))
        with torch.no_grad():
            rate = self.rates.index_select(0, self.count)[0]
            if self.recipe.optimiser == "adam":
                first, second = self.moments
                torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
                torch._foreach_mul_(second, BETAS[1])
                torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
                eps = self.eps.index_select(0, self.count)[0]  # torch._foreach_add would bring it to the host
                below = torch.ops.aten._foreach_add.Tensor(torch._foreach_sqrt(second), eps)
                update = list(torch._foreach_div(first, below))
            else:
                torch._foreach_mul_(self.moments[0], self.recipe.momentum)
                torch._foreach_add_(self.moments[0], gradients)
                update = self.moments[0]
            torch._foreach_sub_(self.params, torch._foreach_mul(update, rate))
            self.losses.index_copy_(0, self.count, loss.detach()[None])
            self.count += 1


def criterion(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, binary for one output."""
    if out.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(out[:, 0].float(), y.float())
    return F.cross_entropy(out.float(), y)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch: int = 2000) -> tuple[float, float]:
    """Mean loss and accuracy of a model in eval mode."""
    was = model.training
    model.eval()
    loss, right = 0.0, 0
    for i in range(0, len(x), batch):
        out, target = model(x[i : i + batch]), y[i : i + batch]
        guess = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
        loss += float(criterion(out, target)) * len(target)
        right += int((guess == target).sum())
    model.train(was)
    return loss / len(x), right / len(x)


def iterations_to(losses: Tensor, level: float, window: int) -> float:
    """First iteration after which the mean of the last `window` batch losses is at most `level`; inf if never."""
    window = max(1, min(window, len(losses)))
    mean = losses.double().unfold(0, window, 1).mean(1)
    below = (mean <= level).nonzero()
    return float(below[0]) + window if len(below) else math.inf


def displacement(model: nn.Module, start: nn.Module) -> tuple[float, float]:
    """Distance ||theta - theta_0|| and 1 - cos(theta, theta_0) of two copies of a network."""
    one, two = (torch.cat([p.detach().double().flatten().cpu() for p in m.parameters()]) for m in (model, start))
    cosine = float(one @ two / (one.norm() * two.norm()).clamp_min(1e-300))
    return float((one - two).norm()), 1 - min(cosine, 1.0)


def spread_out(total: int, count: int, first: int = 1) -> list[int]:
    """About `count` whole numbers from 0 to total, evenly spaced in logarithm after 0."""
    if total <= first:
        return sorted({0, total})
    grid = [round(first * (total / first) ** (i / max(1, count - 1))) for i in range(count)]
    return sorted({0, *grid, total})
