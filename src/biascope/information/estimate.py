"""`mutual_information`: six estimators behind one call, reported on pairs that were not trained on.

An estimator is a dataclass: its fields are the options it uses, `estimate(x, y, name, seed)` gives the result. Those
with a critic derive from `_Trained` and say what a batch maximises, by what the step of training is chosen, and what is
reported. A new one is a class here, named in `Estimator` and in `ESTIMATORS`.
"""

import copy
import inspect
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from biascope.information import bounds
from biascope.information.critics import (
    CHUNK,
    EncodedCritic,
    Encoder,
    JointCritic,
    SeparableCritic,
    all_scores,
    block_scores,
    paired_scores,
)
from biascope.information.neighbours import ksg
from biascope.information.pairs import Training, batches, checked_pairs, split_pairs
from biascope.information.result import EstimateWarning, MutualInformation
from biascope.support.arguments import check_number
from biascope.support.bars import progress
from biascope.support.errors import BiascopeError, InputError
from biascope.support.precision import without_autocast
from biascope.support.seeds import derive, generator, seeded
from biascope.support.signatures import checked

Estimator = Literal["mine", "mine-f", "nwj", "infonce", "smile", "ksg"]

LEAST = 100  # pairs: below, the three parts of the split are too small to say anything
BLOCKS = 20  # of held-out pairs, for the standard error
ENOUGH = 4096  # validation pairs used: they only choose the step
FEW = 30  # rows that carry E_Q[e^T]: with fewer the mean is a matter of luck
DRAWS = 200_000  # independent draws scored for the reported number
QUICK_DRAWS = 20_000  # and for a value on the curve
POINTS = 50  # values on the curve at most, or nearly
LONGEST = 10.0  # norm of a gradient: e^T can make a single batch outweigh everything


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
    | ksg | nothing | nearest neighbours (see `neighbours.ksg`) | no |

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
    given: dict[str, Any] = {"critic": critic, "steps": steps, "batch_size": batch_size, "lr": lr, "held_out": held_out}
    given |= {"ema_rate": ema_rate, "clip": clip, "k": k}
    own = _options(estimator)
    defaults = inspect.signature(mutual_information).parameters
    for name, value in given.items():
        if name not in own and value != defaults[name].default and (name, value) != ("steps", 0):
            users = ", ".join(other for other in ESTIMATORS if name in _options(other))
            raise InputError(f"{estimator} does not use {name}; leave it out, or choose one that does: {users}")
    return ESTIMATORS[estimator](**{name: given[name] for name in own}).estimate(x, y, estimator, seed)


@dataclass(frozen=True)
class _Report:
    """A number with its standard error, from `n` pairs; `carriers`: rows that carry E_Q[e^T] (see `carriers`)."""

    nats: float
    standard_error: float
    n: int
    carriers: float = math.inf
    cap: float | None = None
    plug_in: float | None = None


@dataclass(frozen=True)
class _Pairs:
    """Pairs x [n, ...], y [n, ...] on which a critic is judged, in blocks of `block`."""

    x: Tensor
    y: Tensor
    block: int

    def scores(self, critic: nn.Module, draws: int = DRAWS) -> tuple[Tensor, Tensor]:
        """Scores of pairs [B, b] and of independent draws [B, b, s], of which there are at most about `draws`."""
        shifts = min(self.block - 1, max(4, draws // len(self.x)))
        return block_scores(critic, self.x, self.y, self.block, shifts)

    def report(self, values: list[Tensor], **more: Any) -> _Report:
        """Mean and standard error over the blocks' values."""
        found = torch.stack(values)
        error = float(found.std() / math.sqrt(len(found)))
        return _Report(float(found.mean()), error, len(found) * self.block, **more)


@dataclass
class _Trained:
    """An estimator with a critic: split, train, choose, report. As it stands, nwj."""

    critic: nn.Module | None
    steps: int
    batch_size: int
    lr: float
    held_out: float
    is_lower_bound: ClassVar[bool] = True
    default_critic: ClassVar[type[nn.Module]] = JointCritic

    def bound(self, joint: Tensor, marginal: Tensor) -> Tensor:
        """What training maximises, from scores of pairs and of independent draws."""
        return bounds.nwj(joint, marginal)

    def objective(self, critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The bound on a batch; independent draws are the batch with y moved by one row."""
        # one pass for both halves; rows of a batch are distinct, so no pair meets itself
        scores = paired_scores(critic, torch.cat([x, x]), torch.cat([y, y.roll(1, 0)]))
        return self.bound(scores[: len(x)], scores[len(x) :])

    def validate(self, critic: nn.Module, pairs: _Pairs) -> tuple[float, float]:
        """The value for the curve, and the one by which the training step is chosen."""
        value = float(self.bound(*pairs.scores(critic, QUICK_DRAWS)))
        return value, value

    def report(self, critic: nn.Module, pairs: _Pairs, others: _Pairs) -> _Report:
        """The number from held-out pairs; `others` are the validation pairs."""
        joint, marginal = pairs.scores(critic)
        return pairs.report([self.bound(j, m) for j, m in zip(joint, marginal)], carriers=carriers(marginal))

    def block(self, held_out: int) -> int:
        """Pairs in one of the blocks whose values vary."""
        return held_out // BLOCKS

    def train(self, critic: nn.Module, x: Tensor, y: Tensor, validation: _Pairs, seed: int) -> Training:
        """Adam on the objective, for a copy of the critic; validated at some steps, the best state kept."""
        critic = copy.deepcopy(critic).to(x.device)
        parameters = [p for p in critic.parameters() if p.requires_grad]
        rows = batches(len(x), min(self.batch_size, len(x)), generator(seed, "batches", device=x.device))
        optimizer = torch.optim.Adam([{"params": parameters}], lr=self.lr)  # there may be none
        every = max(1, self.steps // POINTS, min(8, self.steps // 10))
        best, state, best_step = -math.inf, copy.deepcopy(critic.state_dict()), 0
        curve, at = [], []
        with seeded(derive(seed, "dropout"), x.device), torch.enable_grad():
            for step in progress(range(1, self.steps + 1), "critic", leave=False):
                index = next(rows)
                critic.train()
                value = self.objective(critic, x[index], y[index])
                optimizer.zero_grad(set_to_none=True)
                (-value).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(parameters, LONGEST)
                optimizer.step()
                if step % every and step < self.steps:
                    continue
                shown, criterion = self.validate(critic.eval(), validation)
                if not math.isfinite(shown):
                    fix = f"lower lr (now {self.lr}), or use mine or smile, which do not train with e^T itself"
                    raise BiascopeError(f"the critic diverged: its value at step {step} is {shown}; {fix}")
                curve.append(shown)
                at.append(step)
                if criterion > best:
                    best, state, best_step = criterion, copy.deepcopy(critic.state_dict()), step
        critic.load_state_dict(state)
        values, places = torch.tensor(curve, dtype=torch.float64, device="cpu"), torch.tensor(at, device="cpu")
        return Training(critic.eval(), values, places, best_step)

    def estimate(self, x: Tensor, y: Tensor, name: str, seed: int) -> MutualInformation:
        x, y = checked_pairs(x, y, LEAST, f"{name} splits them into three parts and needs")
        if self.steps < 0 or self.batch_size < 2 or not 0 < self.lr < math.inf:
            asked = f"{self.steps}, {self.batch_size} and {self.lr}"
            raise InputError(f"need steps >= 0, batch_size >= 2 and lr > 0, got {asked}")
        if self.critic is None and self.steps == 0:
            raise InputError("steps=0 evaluates a given critic: pass critic=")
        with torch.inference_mode(False):  # a critic cannot be trained in it
            train, few, last = split_pairs(len(x), self.held_out, seed, x.device)
            block = max(2, min(self.block(len(last)), len(last) // 5, len(few) // 2, ENOUGH // 2))
            few = few[:ENOUGH]
            critic, encoders = self.critic, None
            if critic is None:
                encoders = Encoder(x[train]), Encoder(y[train])
                x, y = (torch.cat([encode(v) for v in torch.split(t, CHUNK)]) for encode, t in zip(encoders, (x, y)))
                critic = self.default_critic(x.shape[1], y.shape[1], seed=seed)
            validation, held_out = _Pairs(x[few], y[few], block), _Pairs(x[last], y[last], block)
            trained = self.train(critic, x[train], y[train], validation, seed)
            found = self.report(trained.critic, held_out, validation)
        notes = _notes(found, trained, len(x), len(last))
        for note in notes:
            warnings.warn(f"{name}: {note}", EstimateWarning, stacklevel=5)
        return MutualInformation(
            nats=found.nats,
            standard_error=found.standard_error,
            estimator=name,
            is_lower_bound=self.is_lower_bound,
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


class _MineF(_Trained):
    def bound(self, joint: Tensor, marginal: Tensor) -> Tensor:
        return bounds.mine_f(joint, marginal)


@dataclass
class _Mine(_Trained):
    """Donsker-Varadhan with MINE's gradient; reported is its tangent at E_Q[e^T] of other pairs."""

    ema_rate: float

    def __post_init__(self) -> None:
        self._average = bounds.MineObjective(self.ema_rate)

    def bound(self, joint: Tensor, marginal: Tensor) -> Tensor:
        return self._average(joint, marginal)

    def validate(self, critic: nn.Module, pairs: _Pairs) -> tuple[float, float]:
        """Chosen by what will be reported: a critic whose E_Q[e^T] differs between two halves is of no use."""
        joint, marginal = pairs.scores(critic, QUICK_DRAWS)
        halves = (joint[::2], marginal[::2]), (joint[1::2], marginal[1::2])
        crossed = [bounds.tangent(j, m, bounds.log_mean_exp(other)) for (j, m), (_, other) in zip(halves, halves[::-1])]
        return float(bounds.donsker_varadhan(joint, marginal)), float(sum(crossed) / 2)

    def report(self, critic: nn.Module, pairs: _Pairs, others: _Pairs) -> _Report:
        joint, marginal = pairs.scores(critic)
        at = bounds.log_mean_exp(others.scores(critic)[1])
        values = [bounds.tangent(j, m, at) for j, m in zip(joint, marginal)]
        plug_in = float(bounds.donsker_varadhan(joint, marginal))
        return pairs.report(values, carriers=carriers(marginal), plug_in=plug_in)


@dataclass
class _Smile(_Trained):
    """Donsker-Varadhan with e^T clipped, of a critic trained by Jensen-Shannon."""

    clip: float
    is_lower_bound = False

    def __post_init__(self) -> None:
        check_number(self.clip, "clip", above=0)

    def bound(self, joint: Tensor, marginal: Tensor) -> Tensor:
        return bounds.jensen_shannon(joint, marginal)

    def validate(self, critic: nn.Module, pairs: _Pairs) -> tuple[float, float]:
        joint, marginal = pairs.scores(critic, QUICK_DRAWS)
        return float(bounds.smile(joint, marginal, self.clip)), float(self.bound(joint, marginal))

    def report(self, critic: nn.Module, pairs: _Pairs, others: _Pairs) -> _Report:
        """The logarithm is of the mean over all blocks; the blocks say how it varies, through its tangent there.

        The logarithms of the blocks' own means, of two pairs each for few pairs, vary far more.
        """
        joint, marginal = pairs.scores(critic)
        clipped = marginal.clamp(-self.clip, self.clip)
        at = bounds.log_mean_exp(clipped)
        spread = pairs.report([bounds.tangent(j, m, at) for j, m in zip(joint, clipped)])
        return replace(spread, nats=float(bounds.smile(joint, marginal, self.clip)))


class _InfoNCE(_Trained):
    """One pair among K, in blocks of K pairs."""

    default_critic = SeparableCritic

    def block(self, held_out: int) -> int:
        return self.batch_size

    def objective(self, critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return bounds.info_nce(all_scores(critic, x, y))

    def validate(self, critic: nn.Module, pairs: _Pairs) -> tuple[float, float]:
        value = self.report(critic, pairs, pairs).nats
        return value, value

    def report(self, critic: nn.Module, pairs: _Pairs, others: _Pairs) -> _Report:
        whole = len(pairs.x) - len(pairs.x) % pairs.block
        blocks = zip(*(torch.split(v[:whole], pairs.block) for v in (pairs.x, pairs.y)))
        with torch.no_grad():
            values = [bounds.info_nce(all_scores(critic, x, y).double()) for x, y in blocks]
        return pairs.report(values, cap=math.log(pairs.block))


@dataclass
class _Neighbours:
    k: int

    def estimate(self, x: Tensor, y: Tensor, name: str, seed: int) -> MutualInformation:
        return ksg(x, y, k=self.k, seed=seed)


ESTIMATORS: dict[str, type[_Trained | _Neighbours]] = {
    "mine": _Mine,
    "mine-f": _MineF,
    "nwj": _Trained,
    "infonce": _InfoNCE,
    "smile": _Smile,
    "ksg": _Neighbours,
}


def _options(estimator: str) -> list[str]:
    """Options that an estimator uses."""
    return list(inspect.signature(ESTIMATORS[estimator]).parameters)


def carriers(marginal: Tensor) -> float:
    """(sum w)^2 / sum w^2 for w_i = sum_s e^T_is: how many rows x_i share the mean of e^T."""
    rows = marginal.flatten(0, 1).logsumexp(1)
    return float((2 * rows.logsumexp(0) - (2 * rows).logsumexp(0)).exp())


def _notes(found: _Report, trained: Training, n: int, held_out: int) -> tuple[str, ...]:
    """What should be known about the number, most serious first."""
    notes = []
    if found.carriers < min(FEW, held_out / 4):
        few = f"the mean of e^T over independent draws is carried by about {found.carriers:.1f} of {held_out} rows"
        notes.append(f"{few}: its variance explodes; trust neither number nor error; use infonce, or more pairs")
    if found.cap is not None and found.nats > 0.9 * found.cap:
        cap = f"within 10 % of the cap log K = {found.cap:.3f}, K = {round(math.exp(found.cap))} pairs at a time"
        notes.append(f"{cap}: there may be more; raise batch_size (K is at most a fifth of the held-out pairs)")
    if found.nats > math.log(held_out):
        more = f"{found.nats:.3g} nats exceed log({held_out}) = {math.log(held_out):.3g}"
        notes.append(f"{more}: no distribution-free lower bound from {held_out} held-out pairs can be that high")
    if trained.still_rising():
        notes.append(f"not converged: the curve still rises at step {int(trained.steps[-1])}; raise steps")
    if trained.fell() > max(0.1, 0.1 * abs(found.nats)):
        fell = f"overfitted: the curve peaked at step {trained.best} and ends {trained.fell():.2g} nats lower"
        notes.append(f"{fell}; the truth may be well above, {n} pairs are few for this critic")
    return tuple(notes)
