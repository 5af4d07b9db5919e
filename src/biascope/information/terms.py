"""Mutual information as a term of a loss, to raise (GANs, ALI) or lower (the bottleneck), and the exact bottleneck."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from biascope.information.bounds import MineObjective, donsker_varadhan
from biascope.information.critics import paired_scores
from biascope.network.swapped import functional_call
from biascope.support.arguments import check_number
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope.support.signatures import checked

TINY = 1e-300
SHARP = 5.0  # of the random starts of a bottleneck


class MineTerm:
    """I(x; y) by MINE for your own training loop: `fit` trains the critic on a batch, calling it gives the estimate.

    critic: a module T(x, y) -> [n] for rows of x [n, ...] and y [n, ...]; it is trained in place, by Adam with `lr`.
    Independent draws are the batch with y moved by one row, so its rows must be in random order. The estimate (nats,
    Donsker-Varadhan on the batch) is differentiable in x and y; the critic gets no gradient from it. Add
    `beta * term(x, z)` to a loss to squeeze x out of z. To raise information use `clipped_backward`: it is unbounded.
    With few `fit`s between changes of x and y the critic lags behind and the estimate is too low.

    Example:
        >>> from biascope.information import JointCritic
        >>> rng, scale = torch.Generator().manual_seed(0), torch.tensor(2.0, requires_grad=True)
        >>> x, noise = torch.randn(512, 1, generator=rng), torch.randn(512, 1, generator=rng)
        >>> term = MineTerm(JointCritic(1, 1), lr=1e-3)
        >>> for _ in range(100):
        ...     nats = term.fit(x, scale * x + noise)  # the truth: log(1 + 2^2) / 2 = 0.80
        >>> term(x, scale * x + noise).backward()
        >>> 0.5 < nats < 1.1, scale.grad.item() > 0
        (True, True)
    """

    @checked
    def __init__(self, critic: nn.Module, lr: float = 1e-4, rate: float = 0.01) -> None:
        self.critic = critic
        self.objective = MineObjective(rate)
        self.optimizer = torch.optim.Adam([p for p in critic.parameters() if p.requires_grad], lr=lr)

    @checked
    def fit(self, x: Tensor, y: Tensor) -> float:
        """One step of the critic on pairs x [n, ...], y [n, ...] (no gradient reaches them); the estimate before it."""
        joint, marginal = self._scores(self.critic, x.detach(), y.detach())
        if not bool((joint.sum() + marginal.sum()).isfinite()):  # one such step would spoil the critic and the average
            raise InputError("the critic's scores are not finite: look for NaN in x and y, or lower its lr")
        value = self.objective(joint, marginal)
        self.optimizer.zero_grad(set_to_none=True)
        (-value).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(value.detach())

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The estimate [] in nats on pairs x [n, ...], y [n, ...], with gradients to x and y alone."""
        fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
        return donsker_varadhan(*self._scores(lambda x, y: functional_call(self.critic, fixed, (x, y)), x, y))

    @staticmethod
    def _scores(critic: Callable[..., Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not x.dim() or not y.dim() or len(x) != len(y) or len(x) < 2:
            shapes = f"{list(x.shape)} and {list(y.shape)}"
            raise InputError(f"x and y are {shapes}: both need the same number of rows, at least 2")
        scores = paired_scores(critic, torch.cat([x, x]), torch.cat([y, y.roll(1, 0)]))
        return scores[: len(x)], scores[len(x) :]


@checked
def adaptive_clip(information: Sequence[Tensor], loss: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of an information term, made no longer than that of the loss: min(|g_u|, |g_m|) g_m / |g_m| (C.1).

    information (g_m), loss (g_u): gradients of the same parameters, in the same order. Norms are over all of them, in
    float64 and relative to the largest entry, so no size of gradient in any dtype over- or underflows. Where a norm is
    not finite all that is returned is NaN.

    Example:
        >>> adaptive_clip([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 1.0])])[0].tolist()
        [0.6000000238418579, 0.800000011920929]
    """
    shapes, others = ([list(g.shape) for g in gradients] for gradients in (information, loss))
    if shapes != others or not others:
        raise InputError(
            f"gradients of the information are {shapes}, of the loss {others}: need the same, at least one"
        )
    (mine, mine_unit), (own, own_unit) = _length(information), _length(loss)
    share = (own / mine) * (own_unit / mine_unit)  # |g_u| / |g_m|
    one = torch.ones_like(share)
    scale = torch.where((share >= 1) | ((mine == 0) & own.isfinite()), one, share)
    return tuple((scale * g.double()).to(g.dtype) for g in information)


def _length(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The norm of all entries together as a product of two numbers [] in float64, the second their largest size."""
    filled = [g.double() for g in gradients if g.numel()] or [gradients[0].double().sum().view(1)]
    largest = torch.stack([g.abs().amax() for g in filled]).amax()
    unit = torch.where(largest == 0, torch.ones_like(largest), largest)
    return torch.stack([(g / unit).square().sum() for g in filled]).sum().sqrt(), unit


@checked
def clipped_backward(loss: Tensor, information: Tensor, parameters: Iterable[Tensor], beta: float = 1.0) -> None:
    """Set `.grad` of `parameters` for descending loss - beta * information, with the information's part clipped.

    loss, information: scalars that depend on the parameters (a generator's). See `adaptive_clip`.
    """
    targets = list(parameters)
    zero = [torch.zeros_like(p) for p in targets]
    own = torch.autograd.grad(loss, targets, retain_graph=True, allow_unused=True)
    mine = torch.autograd.grad(information, targets, allow_unused=True)
    own_full = [z if g is None else g for g, z in zip(own, zero)]
    clipped = adaptive_clip([z if g is None else -g for g, z in zip(mine, zero)], own_full)
    for parameter, a, b in zip(targets, own_full, clipped):
        parameter.grad = (a + beta * b).detach()


@dataclass(frozen=True)
class Bottleneck:
    """q(z|x) `encoder` [x, z], I(x; z) `nats`, H(y|z) `uncertainty` in nats, and H(y|z) + beta I(x; z).

    An x that never occurs says nothing: its row is q(z).
    """

    encoder: Tensor
    nats: float
    uncertainty: float
    lagrangian: float


@checked
def discrete_bottleneck(
    joint: Tensor, beta: float, size: int | None = None, *, seed: int = 0, starts: int = 20, steps: int = 2000
) -> Bottleneck:
    """The encoder that minimises H(y|z) + beta I(x; z) for p(x, y) `joint` [x, y], by Blahut-Arimoto iterations.

    `size`: values of z (as many as of x by default). q(z), p(y|z) and q(z|x) ~ q(z) exp(-KL(p(y|x) | p(y|z)) / beta) in
    turn, each the best given the others, so the objective never rises; the best of `starts` random starts, as it has
    local minima. For beta >= 1 nothing is worth its price and I(x; z) = 0.

    Example:
        >>> joint = torch.tensor([[0.25, 0.0], [0.25, 0.0], [0.0, 0.5]])  # the first two x say the same
        >>> found = discrete_bottleneck(joint, beta=0.1)
        >>> round(found.nats, 4), round(found.uncertainty, 4)  # log 2: what y needs
        (0.6931, 0.0)
    """
    p = joint.double()
    if p.dim() != 2 or not bool((p >= 0).all() & p.isfinite().all()) or float(p.sum()) <= 0:
        raise InputError(f"joint must be a table [x, y], finite, not negative and not all 0; got {list(p.shape)}")
    check_number(beta, "beta", above=0)
    occurs = p.sum(1) > 0
    p = p[occurs] / p.sum()
    found = [_descend(p, beta, size or len(p), seed, start, steps) for start in range(starts)]
    best = min(found, key=lambda made: made.lagrangian)
    encoder = (p.sum(1) @ best.encoder).repeat(len(occurs), 1)
    encoder[occurs] = best.encoder
    return replace(best, encoder=encoder)


def _descend(p: Tensor, beta: float, size: int, seed: int, start: int, steps: int) -> Bottleneck:
    p_x = p.sum(1)
    p_y_x = p / p_x[:, None]
    rng = generator(seed, "bottleneck", start)
    logits = SHARP * torch.randn(len(p), size, generator=rng, dtype=torch.float64, device="cpu")
    encoder = logits.softmax(1).to(p.device)  # nearly one z for an x: blurred starts end in few z
    for _ in range(steps):
        q_z = p_x @ encoder
        p_y_z = (encoder.T @ p) / q_z.clamp_min(TINY)[:, None]
        cross = -p_y_x @ p_y_z.clamp_min(TINY).log().T  # the entropy of p(y|x) is the same for every z
        new = torch.softmax(q_z.clamp_min(TINY).log() - cross / beta, 1)
        still, encoder = bool((new - encoder).abs().max() < 1e-14), new
        if still:
            break
    q_z = p_x @ encoder
    q_yz = encoder.T @ p
    information = (p_x[:, None] * torch.xlogy(encoder, encoder)).sum() - torch.xlogy(q_z, q_z).sum()
    uncertainty = torch.xlogy(q_z, q_z).sum() - torch.xlogy(q_yz, q_yz).sum()
    nats, left = (max(0.0, float(v)) for v in (information, uncertainty))  # -1e-17 is 0
    return Bottleneck(encoder, nats, left, left + beta * nats)
