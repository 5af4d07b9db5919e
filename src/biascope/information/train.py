"""Training of a critic on pairs, with the best state on validation pairs kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biascope.errors import BiascopeError, InputError
from biascope.progress import progress
from biascope.seeds import derive, generator
from biascope.tables import one_line

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]  # a batch of pairs, in rows -> what to maximise
Validate = Callable[[nn.Module], tuple[float, float]]  # the value for the curve, and the one by which to choose

POINTS = 50  # values on the curve at most, or nearly
CLIP = 10.0  # largest norm of a gradient: e^T can make a single batch outweigh everything


@dataclass(frozen=True)
class Training:
    """The critic at its best validation value, and the curve [k] at `steps` [k]."""

    critic: nn.Module
    curve: Tensor
    steps: Tensor
    best: int
    __repr__ = one_line

    def still_rising(self) -> bool:
        """Whether the last fifth of the curve lies above the fifth before by more than noise and 2 %."""
        m = len(self.curve) // 5
        if m < 2:
            return False
        before, last = self.curve[-2 * m : -m], self.curve[-m:]
        rise = float(last.mean() - before.mean())
        noise = math.sqrt(float(before.var() + last.var()) / m)
        return rise > max(2 * noise, 0.01, 0.02 * abs(float(last.mean())))

    def fell(self) -> float:
        """How far the last fifth of the curve lies below its best fifth: overfitting, where it is large."""
        m = len(self.curve) // 5
        if m < 2:
            return 0.0
        means = self.curve.unfold(0, m, 1).mean(1)
        return float(means.max() - means[-1])


def batches(n: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of distinct positions: every epoch is a new shuffle, the rest that fills no batch is left out."""
    while True:
        order = torch.randperm(n, generator=rng, device=rng.device)
        yield from torch.split(order[: n - n % size], size)


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout in a given critic draws from the global generators: seed them here and put them back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would also reseed devices that are not put back
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def train_critic(
    critic: nn.Module,
    objective: Objective,
    validate: Validate,
    x: Tensor,
    y: Tensor,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> Training:
    """Adam on `objective`, for a copy of the critic; validated at `POINTS` steps, the best state kept."""
    critic = copy.deepcopy(critic).to(x.device)
    parameters = [p for p in critic.parameters() if p.requires_grad]
    if steps and not parameters:
        raise InputError(f"critic {type(critic).__name__} has no parameters to train; pass steps=0 to use it as it is")
    device = x.device
    rows = batches(len(x), min(batch_size, len(x)), generator(seed, "batches", device=device))
    optimizer = torch.optim.Adam(parameters, lr=lr) if steps else None
    every = max(1, steps // POINTS, min(8, steps // 10))
    curve: list[float] = []
    at: list[int] = []
    best, state, best_step = -math.inf, copy.deepcopy(critic.state_dict()), 0
    with own_randomness(derive(seed, "dropout"), device), torch.enable_grad():
        for step in progress(range(1, steps + 1), "critic", leave=False):
            assert optimizer is not None
            index = next(rows)
            critic.train()
            value = objective(critic, x[index], y[index])
            optimizer.zero_grad(set_to_none=True)
            (-value).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            if step % every == 0 or step == steps:
                critic.eval()
                shown, criterion = validate(critic)
                if not math.isfinite(shown):
                    raise BiascopeError(
                        f"the critic diverged: its value at step {step} is {shown}; lower lr (now {lr}), or use mine "
                        "or smile, whose training does not contain e^T itself"
                    )
                curve.append(shown)
                at.append(step)
                if criterion > best:
                    best, state, best_step = criterion, copy.deepcopy(critic.state_dict()), step
    critic.load_state_dict(state)
    critic.eval()
    return Training(
        critic, torch.tensor(curve, dtype=torch.float64, device="cpu"), torch.tensor(at, device="cpu"), best_step
    )
