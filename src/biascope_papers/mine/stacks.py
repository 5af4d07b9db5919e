"""Networks of all seeds side by side: one tensor operation trains them all, each as it would be trained alone."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, leaky_relu, relu
from torch.optim import Optimizer

from biascope import InputError
from biascope.ensembles import capture
from biascope.information import adaptive_clip
from biascope.support import generator, progress

EPSILON = 1e-5  # of batch normalisation
BETAS = (0.5, 0.999)  # of Adam, as in ALI (the text gives only the rate)
LEAKY = partial(leaky_relu, negative_slope=0.2)  # the text gives no slope
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "elu": elu, "leaky": LEAKY}


class Stack(nn.Module):
    """S fully connected networks: x [S, n, in] -> [S, n, out], each drawn from its own seed (torch's default ranges).

    With `batch_norm`, hidden layers are normalised over the batch at hand, also when samples are drawn: give it many.
    """

    def __init__(
        self, widths: Sequence[int], activation: str, seeds: Sequence[int], name: str, batch_norm: bool = False
    ) -> None:
        super().__init__()
        self.activation, self.batch_norm = ACTIVATIONS[activation], batch_norm
        sources = [generator(seed, name) for seed in seeds]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            drawn = torch.stack([torch.rand(fan_in + 1, fan_out, generator=rng) for rng in sources])
            drawn = (2 * drawn - 1) / math.sqrt(fan_in)
            self.weights.append(nn.Parameter(drawn[:, :-1].contiguous()))
            self.biases.append(nn.Parameter(drawn[:, -1:].contiguous()))
        hidden = widths[1:-1] if batch_norm else ()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(len(seeds), 1, width)) for width in hidden)

    def forward(self, x: Tensor, before: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        """Outputs [S, n, out] of x [S, n, in]; `before` (noise, dropout) changes what goes into layer 0, 1, ..."""
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            x = x if before is None else before(i, x)
            last = i + 1 == len(self.weights)
            if self.batch_norm and not last:
                x = torch.bmm(x, weight)
                x = x - x.mean(1, keepdim=True)
                x = x * ((x.square().mean(1, keepdim=True) + EPSILON).rsqrt() * self.gains[i]) + bias
            else:
                x = torch.baddbmm(bias, x, weight)
            x = x if last else self.activation(x)
        return x


class StackedMine:
    """MINE's critic [S], trained on detached samples with the moving average of `MineObjective`, for every member.

    critic: (x [S, n, p], y [S, n, q]) -> [S, n].
    """

    def __init__(
        self, critic: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.999), rate: float = 0.01
    ) -> None:
        self.critic, self.rate = critic, rate
        self.optimizer = adam(critic.parameters(), lr, betas)
        self.log_average: Tensor | None = None

    def scores(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the pairs and of independent draws (y moved by one row), [S, n] each."""
        both: Tensor = self.critic(torch.cat([x, x], 1), torch.cat([y, y.roll(1, 1)], 1))
        return both[:, : x.shape[1]], both[:, x.shape[1] :]

    def fit(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of the critics; Donsker-Varadhan [S] before it."""
        joint, marginal = self.scores(x.detach(), y.detach())
        log_mean = marginal.logsumexp(1) - math.log(marginal.shape[1])
        now = log_mean.detach()
        if self.log_average is None:
            self.log_average = now.clone()
        else:  # in place, as a captured step wants it
            kept = self.log_average + math.log1p(-self.rate)
            self.log_average.copy_(torch.logaddexp(kept, now + math.log(self.rate)))
        self.optimizer.zero_grad(set_to_none=True)
        (-(joint.mean(1) - (log_mean - self.log_average).exp()).sum()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return joint.detach().mean(1) - now

    def state(self) -> list[Tensor]:
        """What `fit` changes, beside the critic and its optimiser."""
        return [] if self.log_average is None else [self.log_average]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Donsker-Varadhan [S], differentiable in x and y."""
        joint, marginal = self.scores(x, y)
        return joint.mean(1) - marginal.logsumexp(1) + math.log(marginal.shape[1])


class SingleMine(StackedMine):
    """The same for one critic T(x [n, ...], y [n, ...]) -> [n]: what `MineTerm` does, in steps that can be captured."""

    def scores(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the pairs and of independent draws, [1, n] each."""
        both: Tensor = self.critic(torch.cat([x, x]), torch.cat([y, y.roll(1, 0)]))
        return both[None, : len(x)], both[None, len(x) :]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Donsker-Varadhan [], differentiable in x and y."""
        return super().__call__(x, y)[0]


class PairCritic(nn.Module):
    """A stack on x and y side by side: scores [S, n]; `before` as that of a stack."""

    def __init__(self, stack: Stack, before: Callable[[int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.stack, self.before = stack, before

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [S, n] of x [S, n, p] with y [S, n, q]."""
        scores: Tensor = self.stack(torch.cat([x, y], 2), self.before)
        return scores[..., 0]


def adam(parameters: Iterable[Tensor], lr: float, betas: tuple[float, float] = BETAS) -> torch.optim.Adam:
    """Adam whose steps can be captured on a GPU; its rate lies there, to be filled with another."""
    own = list(parameters)
    if not own[0].is_cuda:
        return torch.optim.Adam(own, lr=lr, betas=betas)
    return torch.optim.Adam(own, lr=torch.tensor(lr, device=own[0].device), betas=betas, capturable=True)


@dataclass
class Replayed:
    """A step of a training that is bound by launches: as it is at the first call, then a CUDA graph on a GPU.

    The first call makes the momenta of the optimisers. `state`: what else the step changes and reads again, asked for
    after it. What a call gives is overwritten by the next.
    """

    step: Callable[..., Tensor]
    optimizers: Sequence[Optimizer]
    generators: Sequence[torch.Generator]
    state: Callable[[], Iterable[Tensor]]
    calls: int = 0

    def __call__(self, *values: Tensor) -> Tensor:
        """One step."""
        if self.calls == 1:
            held = [p for each in self.optimizers for group in each.param_groups for p in group["params"]]
            moments = [v for each in self.optimizers for own in each.state.values() for v in own.values()]
            kept, where = [*held, *moments, *self.state()], held[0].device
            self.step = capture(self.step, *values, device=where, state=kept, optional=True, generators=self.generators)
        self.calls += 1
        return self.step(*values)


def train_by(step: Callable[[], Tensor], count: int, name: str) -> None:
    """So many steps, which give a loss."""
    loss = torch.zeros(())
    for _ in progress(range(count), name, leave=False):
        loss = step()
    if not bool(loss.isfinite().all()):
        raise InputError(f"{name}: the loss is not finite at the end; choose a smaller lr")


def descend(
    optimizer: Optimizer,
    parameters: Iterable[Tensor],
    loss: Tensor,
    information: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """One step down loss - beta * information ([S] or numbers), whose gradient is clipped member by member (C.1)."""
    targets = list(parameters)
    own = torch.autograd.grad(loss.sum(), targets, retain_graph=information is not None)
    gradients: Sequence[Tensor] = own
    if information is not None and beta:
        mine = torch.autograd.grad(-information.sum(), targets, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(mine, targets)]
        clip = torch.vmap(adaptive_clip) if loss.dim() else adaptive_clip
        gradients = [a + beta * b for a, b in zip(own, clip(filled, list(own)))]
    for parameter, gradient in zip(targets, gradients):
        parameter.grad = gradient
    optimizer.step()
