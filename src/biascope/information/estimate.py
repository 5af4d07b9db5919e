"""`mutual_information`: six estimators behind one call, reported on pairs that were not trained on."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.information.bounds import MineObjective, info_nce, jensen_shannon, mine_f, nwj
from biascope.information.critics import (
    CHUNK,
    EncodedCritic,
    Encoder,
    JointCritic,
    SeparableCritic,
    all_scores,
    paired_scores,
)
from biascope.information.evaluate import Evaluation
from biascope.information.neighbours import ksg
from biascope.information.result import EstimateWarning, MutualInformation
from biascope.information.samples import checked_pairs, split_pairs
from biascope.information.train import Objective, Training, train_critic
from biascope.precision import without_autocast
from biascope.signatures import checked

Estimator = Literal["mine", "mine-f", "nwj", "infonce", "smile", "ksg"]

TRAINED = ("mine", "mine-f", "nwj", "infonce", "smile")  # they have a critic, and all options of training
USED_BY = {"ema_rate": ("mine",), "clip": ("smile",), "k": ("ksg",)}

LEAST = 100  # pairs: below, the three parts of the split are too small to say anything
BLOCKS = 20  # of held-out pairs, for the standard error
ENOUGH = 4096  # validation pairs looked at: they only choose the step
FEW = 30  # rows that carry E_Q[e^T]: with fewer the mean is a matter of luck


@checked
@without_autocast()
def mutual_information(
    x: Tensor,
    y: Tensor,
    estimator: Estimator = "mine",
    *,
    seed: int = 0,
    critic: nn.Module | None = None,
    steps: int = 2000,
    batch_size: int = 256,
    lr: float = 1e-3,
    held_out: float = 0.25,
    ema_rate: float = 0.01,
    clip: float = 5.0,
    k: int = 3,
) -> MutualInformation:
    """I(x; y) in nats from pairs x [n, ...], y [n, ...], with its standard error and whether it is a lower bound.

    Integers (one per sample) are labels, everything else is numbers of any shape; both on one device.

    | estimator | trained with | reported, on held-out pairs | lower bound |
    |---|---|---|---|
    | mine | Donsker-Varadhan, corrected gradient | its tangent at E_Q[e^T] of validation pairs | yes |
    | mine-f | E_P[T] - E_Q[e^(T-1)] | the same | yes |
    | nwj | E_P[T] - E_Q[e^T] + 1 | the same | yes |
    | infonce | K-way classification | the same, K pairs at a time | yes, and at most log K |
    | smile | Jensen-Shannon | Donsker-Varadhan with e^T clipped | no |
    | ksg | nothing | nearest neighbours (see `ksg`) | no |

    A lower bound in expectation, that is: over held-out pairs, for whatever critic came out of training. Donsker-
    Varadhan with a mean of held-out pairs inside the logarithm is *not* one (Jensen); that usual number is in
    `.plug_in`. Pairs are split in three: `held_out` of them for the reported number, half as many to choose the step of
    training, the rest to train on. The standard error is that of the mean over blocks of held-out pairs (about 20; for
    infonce those of K pairs).

    critic: a module T(x, y) -> [n] for rows of x and y as they are given (trained in a copy); by default an MLP of the
    normal scores of all columns and of one-hot labels, so that units and increasing maps of a column do not matter.
    With `steps=0` a given critic is used as it is. `ema_rate`: of mine's moving average; `clip`: smile's, in nats; `k`:
    neighbours of ksg. An option that the estimator does not use is refused unless it is at its default (ksg, which
    trains nothing, also takes steps=0).

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> x = torch.randn(4000, 1, generator=rng)
        >>> y = 0.8 * x + 0.6 * torch.randn(4000, 1, generator=rng)  # the truth: -log(1 - 0.8^2) / 2 = 0.511
        >>> est = mutual_information(x, y, estimator="mine", steps=200)
        >>> abs(est.nats - 0.511) < 0.1, est.is_lower_bound
        (True, True)
    """
    options: dict[str, object] = {"critic": critic, "steps": steps, "batch_size": batch_size, "lr": lr}
    _refuse_unused(estimator, options | {"held_out": held_out, "ema_rate": ema_rate, "clip": clip, "k": k})
    if estimator == "ksg":
        return ksg(x, y, k=k, seed=seed)
    x, y = checked_pairs(x, y, LEAST, f"{estimator} splits them into three parts and needs")
    if steps < 0 or batch_size < 2 or not 0 < lr < math.inf:
        raise InputError(f"need steps >= 0, batch_size >= 2 and lr > 0, got {steps}, {batch_size} and {lr}")
    if not 0 < clip < math.inf:
        raise InputError(f"clip must be > 0, got {clip}")
    if critic is None and steps == 0:
        raise InputError("steps=0 evaluates a given critic: pass critic=")
    if critic is not None and not isinstance(critic, nn.Module):
        raise InputError(f"critic must be a torch.nn.Module T(x, y) -> [n], got {type(critic).__name__}")
    with torch.inference_mode(False):  # a critic cannot be trained in it
        return _trained(x, y, estimator, seed, critic, steps, batch_size, lr, held_out, ema_rate, clip)


def _refuse_unused(estimator: Estimator, given: dict[str, object]) -> None:
    """Raise if an option is set that this estimator would not look at."""
    defaults = inspect.signature(mutual_information).parameters
    for name, value in given.items():
        users = USED_BY.get(name, TRAINED)
        untrained = estimator == "ksg" and name == "steps" and value == 0
        if estimator not in users and value != defaults[name].default and not untrained:
            why = "ksg has no critic" if name == "critic" else f"{estimator} does not use {name} (got {value!r})"
            raise InputError(f"{why}; leave {name} out, or choose an estimator that uses it: {', '.join(users)}")


def _trained(
    x: Tensor,
    y: Tensor,
    estimator: str,
    seed: int,
    critic: nn.Module | None,
    steps: int,
    batch_size: int,
    lr: float,
    held_out: float,
    ema_rate: float,
    clip: float,
) -> MutualInformation:
    """Split, train, choose, report: everything after the checks, for all estimators with a critic."""
    parts = split_pairs(len(x), held_out, seed, x.device)
    block = batch_size if estimator == "infonce" else len(parts.held_out) // BLOCKS
    block = max(2, min(block, len(parts.held_out) // 5, len(parts.validation) // 2, ENOUGH // 2))
    encoders = None
    if critic is None:
        encoders = Encoder(x[parts.train]), Encoder(y[parts.train])
        x, y = (torch.cat([encode(part) for part in torch.split(v, CHUNK)]) for encode, v in zip(encoders, (x, y)))
        critic = (SeparableCritic if estimator == "infonce" else JointCritic)(x.shape[1], y.shape[1], seed=seed)

    few = parts.validation[:ENOUGH]
    chosen_by = Evaluation(estimator, x[few], y[few], block, clip)
    told_by = Evaluation(estimator, x[parts.held_out], y[parts.held_out], block, clip)
    objective = _objective(estimator, ema_rate)
    trained = train_critic(
        critic, objective, chosen_by.validate, x[parts.train], y[parts.train], steps, batch_size, lr, seed
    )
    found = told_by.report(trained.critic, chosen_by)
    notes = _notes(estimator, found.nats, len(x), len(parts.held_out), found.cap, found.carriers, trained)
    for note in notes:
        warnings.warn(f"{estimator}: {note}", EstimateWarning, stacklevel=5)
    return MutualInformation(
        nats=found.nats,
        standard_error=found.standard_error,
        estimator=estimator,
        is_lower_bound=estimator != "smile",
        n=len(x),
        n_held_out=found.n,
        seed=seed,
        curve=trained.curve,
        steps=trained.steps,
        notes=notes,
        cap=found.cap,
        plug_in=found.plug_in,
        critic=trained.critic if encoders is None else EncodedCritic(*encoders, trained.critic),
    )


def _objective(estimator: str, ema_rate: float) -> Objective:
    """What a batch of pairs is trained to maximise; independent draws are the batch with y moved by one row."""
    if estimator == "infonce":
        return lambda critic, x, y: info_nce(all_scores(critic, x, y))
    bounds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mine": MineObjective(ema_rate),
        "mine-f": mine_f,
        "nwj": nwj,
        "smile": jensen_shannon,
    }
    bound = bounds[estimator]

    def objective(critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        # one pass for both halves; rows of a batch are distinct, so no pair meets itself
        scores = paired_scores(critic, torch.cat([x, x]), torch.cat([y, y.roll(1, 0)]))
        return bound(scores[: len(x)], scores[len(x) :])

    return objective


def _notes(
    estimator: str, nats: float, n: int, held_out: int, cap: float | None, carriers: float, trained: Training
) -> tuple[str, ...]:
    """What should be known about the number, most serious first."""
    notes = []
    if estimator in {"mine", "mine-f", "nwj"} and carriers < min(FEW, held_out / 4):
        notes.append(
            f"the mean of e^T over independent draws is carried by about {carriers:.1f} of {held_out} rows: its "
            "variance explodes with the information; trust neither number nor error; use infonce, or more pairs"
        )
    if cap is not None and nats > 0.9 * cap:
        notes.append(
            f"within 10 % of the cap log K = {cap:.3f}, K = {round(math.exp(cap))} pairs at a time: the information "
            "may be larger; raise batch_size (K is at most a fifth of the held-out pairs)"
        )
    if nats > math.log(held_out):
        notes.append(
            f"{nats:.3g} nats exceed log({held_out}) = {math.log(held_out):.3g}: no distribution-free lower bound from "
            f"{held_out} held-out pairs can be that high with confidence"
        )
    if trained.still_rising():
        notes.append(f"not converged: the curve still rises at step {int(trained.steps[-1])}; raise steps")
    if trained.fell() > max(0.1, 0.1 * abs(nats)):
        notes.append(
            f"overfitted: the curve peaked at step {trained.best} and ends {trained.fell():.2g} nats lower; the truth "
            f"may be well above, {n} pairs are few for this critic"
        )
    return tuple(notes)
