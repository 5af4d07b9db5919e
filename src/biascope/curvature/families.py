"""What the network's outputs mean: from outputs to the square root of their information.

Every metric here is F = (1/n) sum_i J_i^T H_i J_i with H_i = sum_k s_ik s_ik^T. A family gives the *cotangents* s_ik
[k, n, c] and, for products, H_i u in closed form. Outputs may have positions (pixels, tokens): the classes are one axis
and an example's log-likelihood is the sum over its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from biascope.curvature.outputs import IGNORE, OutputShape, checked_labels
from biascope.errors import InputError, UnsupportedError

Weighting = Callable[[Tensor, Tensor | None], Tensor]


class Family:
    """Outputs to cotangents. `width` cotangents; `scale` multiplies H."""

    name = "family"
    needs_labels = False
    random = False
    tolerant = True  # gives cotangents for all outputs, also NaN: these may be refused later

    def __init__(self, shape: OutputShape, scale: float = 1.0) -> None:
        self.shape, self.scale = shape, scale

    @property
    def width(self) -> int:
        """How many cotangents there are."""
        return self.shape.total

    def draw(self, generator: torch.Generator, n: int) -> Tensor | None:
        """Random numbers [samples, n, ...] for n examples, or None."""
        return None

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """Labels in the form `cotangents` takes them."""
        return y

    def ignores(self, y: Tensor | None) -> bool:
        """Are there positions among the labels y that have none (-100) and add nothing?"""
        return False

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:
        """S[ks] [len(ks), n, total] at outputs z [n, total]."""
        raise AssertionError("a family gives its cotangents")

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:
        """H u for u [n, total], or [k, n, total]; closed form where a subclass has one."""
        S = self.cotangents(z, y, draws, range(self.width))
        return torch.einsum("knc,...nc,knd->...nd", S, u, S)


class Gaussian(Family):
    """N(y | f, I): H = I. Also the L2 metric, J^T J."""

    name = "gaussian"

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        S = z.new_zeros(len(ks), *z.shape)
        S.diagonal(ks.start, 0, 2).fill_(sqrt(self.scale))
        return S

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        return self.scale * u


class Bernoulli(Family):
    """Independent y_c ~ sigmoid(f_c): H = diag p (1 - p)."""

    name = "bernoulli"

    def _variance(self, z: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(z) * torch.sigmoid(-z)

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        S = z.new_zeros(len(ks), *z.shape)
        S.diagonal(ks.start, 0, 2).copy_(self._variance(z).sqrt()[:, ks.start : ks.stop])
        return S

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        return self._variance(z) * u


class Categorical(Family):
    """y ~ softmax(f) at every position: H = diag p - p p^T.

    Its square root is the Cholesky form with c - 1 columns (one backward pass fewer than sqrt(p_k)(e_k - p)):
    s_j = sqrt(p_j t_j / (p_j + t_j)) (e_j - p_{>j} / t_j) with t_j = sum_{l > j} p_l, a class against the later ones.
    """

    name = "categorical"

    def __init__(self, shape: OutputShape, scale: float = 1.0) -> None:
        super().__init__(shape, scale)
        if shape.classes < 2:
            raise InputError("a categorical likelihood needs at least 2 outputs; use 'bernoulli' for a single logit")

    @property
    def width(self) -> int:  # noqa: D102
        return (self.shape.classes - 1) * self.shape.positions

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """The expectation over labels needs none; but a position that has none (-100) has no likelihood."""
        if not isinstance(y, Tensor) or y.is_floating_point():
            return None
        positions, classes = self.shape.positions, self.shape.classes
        if not self.shape.classes_last and y.shape == (n, classes) and positions not in (1, classes):
            raise InputError(
                f"one label for each of {classes} positions, but these were taken for the classes, of which there are "
                f"{positions} then: where the classes are the last axis, as in language models, say class_dim=-1"
            )
        missing = bool((y == IGNORE).any())
        return checked_labels(self.name, y, n, self.shape) if missing else None

    def ignores(self, y: Tensor | None) -> bool:  # noqa: D102
        return y is not None

    def heard(self, y: Tensor) -> Tensor:
        """1 at the outputs [n, total] of positions that have a label, else 0."""
        return self.shape.join((y != IGNORE)[:, None].expand(-1, self.shape.classes, -1))

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        S = self._roots(z, ks)
        return S if y is None else S * self.heard(y)

    def _roots(self, z: Tensor, ks: range) -> Tensor:
        c = self.shape.classes
        if self.shape.positions == 1:
            return self._one_position(torch.softmax(z, -1), ks)
        p = torch.softmax(self.shape.split(z), -2)  # [n, c, P]
        tail = p.flip(-2).cumsum(-2).flip(-2)
        after = torch.cat([tail[:, 1:], torch.zeros_like(tail[:, :1])], -2)
        root = (self.scale * p * after / tail.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
        index = torch.arange(ks.start, ks.stop, device=z.device)
        at, j = index // (c - 1), index % (c - 1)
        later = torch.arange(c, device=z.device)[None] > j[:, None]  # [K, c]
        t = after[:, j, at].T[..., None]  # [K, n, 1]
        s = torch.where(
            later[:, None] & (t > 0), -p[:, :, at].movedim(-1, 0) / t.clamp_min(torch.finfo(p.dtype).tiny), 0.0
        )
        s.scatter_(-1, j[:, None, None].expand(-1, len(z), 1), 1.0)
        s = s * root[:, j, at].T[..., None]
        S = z.new_zeros(len(ks), len(z), c, self.shape.positions)
        S[torch.arange(len(ks), device=z.device), :, :, at] = s
        return self.shape.join(S)

    def _one_position(self, p: Tensor, ks: range) -> Tensor:
        """The same for p [n, c] with few small operations: entries after the diagonal of [n, K, c], and it."""
        tiny = torch.finfo(p.dtype).tiny
        tail = p.flip(-1).cumsum(-1).flip(-1)
        t = tail[:, ks.start + 1 : ks.stop + 1]  # t_j of the classes ks
        root = (p[:, ks.start : ks.stop] * t / tail[:, ks.start : ks.stop].clamp_min(tiny)).sqrt_()
        if self.scale != 1.0:
            root *= sqrt(self.scale)
        s = (root / t.clamp_min(tiny)).neg_()[:, :, None] * p[:, None]  # where t = 0, so is the root
        s = s.triu_(ks.start + 1)
        s.diagonal(ks.start, 1, 2).copy_(root)
        return s.transpose(0, 1)

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        p, v = torch.softmax(self.shape.split(z), -2), self.shape.split(u)
        found = self.scale * self.shape.join(p * v - p * (p * v).sum(-2, keepdim=True))
        return found if y is None else found * self.heard(y)


class CrossEntropy(Categorical):
    """The mean cross entropy of an example's positions, for Gauss-Newton matrices."""

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """Positions without a label change what torch's mean divides by, from batch to batch."""
        if super().check_labels(y, n) is not None:
            raise UnsupportedError(
                "ignored labels (-100) make examples weigh unequally; give the loss as a function, or take bs.fisher, "
                "which adds up the positions that have a label"
            )
        return None


class Score(Family):
    """Gradients of log-likelihoods at given labels: the true ones ("empirical") or drawn from the model."""

    def __init__(self, base: Family, samples: int | None) -> None:
        super().__init__(base.shape, base.scale)
        if not isinstance(base, Gaussian | Bernoulli | Categorical):
            raise InputError("sampled and empirical estimators need likelihood categorical, bernoulli or gaussian")
        if samples is not None and samples < 1:
            raise InputError(f"samples={samples}: at least one draw per example is needed")
        self.base, self.samples = base, samples
        self.name = f"{base.name}, " + ("empirical" if samples is None else f"monte-carlo ({samples} samples)")
        self.needs_labels, self.random = samples is None, samples is not None

    @property
    def width(self) -> int:  # noqa: D102
        return self.samples or 1

    def draw(self, generator: torch.Generator, n: int) -> Tensor | None:  # noqa: D102
        if self.samples is None:
            return None
        each = self.shape.positions if isinstance(self.base, Categorical) else self.shape.total
        # example by example, and uniform: torch draws these one after the other, so that it does not matter how the
        # data is cut into batches (torch.randn transforms them in groups of 16)
        u = torch.rand(n, self.samples, each, generator=generator, dtype=torch.float64, device="cpu")
        if isinstance(self.base, Gaussian):
            u = torch.special.ndtri(u.clamp_min_(2.0**-54))
        return u.transpose(0, 1).contiguous()

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:  # noqa: D102
        if not self.random:
            return checked_labels(self.base.name, y, n, self.shape)
        return self.base.check_labels(y, n) if isinstance(self.base, Categorical) else None

    def ignores(self, y: Tensor | None) -> bool:  # noqa: D102
        return y is not None and isinstance(self.base, Categorical) and bool((y == IGNORE).any())

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        if draws is not None:
            draws = draws if len(ks) == self.width else draws[ks.start : ks.stop]
            draws = draws if draws.device == z.device else draws.to(z.device)
        root = sqrt(self.scale / self.width)
        if isinstance(self.base, Gaussian):
            residual = draws.to(z.dtype) if draws is not None else self._labels(y).to(z)[None] - z
            return root * residual
        if isinstance(self.base, Bernoulli):
            p = torch.sigmoid(z)
            drawn = (draws < p).to(z.dtype) if draws is not None else self._labels(y).to(z)[None]
            return root * (drawn - p)
        if draws is not None and self.shape.positions == 1 and y is None:
            return self._drawn_scores(torch.softmax(z, -1), draws, root)
        p = torch.softmax(self.shape.split(z), -2)
        labels = self._labels(y)[None] if draws is None else _inverse_cdf(p, draws)  # [k, n, P]
        hot = torch.zeros(len(labels), *p.shape, dtype=z.dtype, device=z.device)
        hot.scatter_(-2, (labels if draws is not None else labels.clamp_min(0))[..., None, :], 1.0)
        score = hot.sub_(p)
        if y is not None:
            score *= (y != IGNORE)[:, None]
        if root != 1.0:
            score *= root
        return self.shape.join(score)

    @staticmethod
    def _drawn_scores(p: Tensor, draws: Tensor, root: float) -> Tensor:
        """The same for p [n, c] and draws [k, n, 1] with few small operations."""
        cdf = p.cumsum(-1, dtype=torch.float64)
        each = cdf.expand(draws.shape[0], *p.shape).contiguous()
        labels = torch.searchsorted(each, draws * cdf[:, -1:]).clamp_(max=p.shape[1] - 1)  # beyond only where p is NaN
        score = p.new_zeros(each.shape).scatter_(-1, labels, 1.0).sub_(p)
        return score if root == 1.0 else score.mul_(root)

    @staticmethod
    def _labels(y: Tensor | None) -> Tensor:
        assert y is not None, "checked_labels comes first"
        return y


def _inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """Classes [k, n, P] from uniform numbers [k, n, P] and probabilities [n, c, P]."""
    cdf = p.cumsum(-2, dtype=torch.float64)
    return (u[..., None, :] > cdf[None, :, :-1] / cdf[None, :, -1:]).sum(-2)


class Weighted(Family):
    """A user's square root: weights(outputs [n, c], labels) gives S [k, n, c] with H = sum_k s_k s_k^T."""

    name = "user-supplied weights"
    tolerant = False

    def __init__(self, shape: OutputShape, weights: Weighting, width: int) -> None:
        super().__init__(shape)
        self.weights, self._width = weights, width

    @property
    def width(self) -> int:  # noqa: D102
        return self._width

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        S = self.weights(z, y)
        if not isinstance(S, Tensor) or S.dim() != 3 or S.shape[1:] != z.shape or len(S) != self._width:
            got = list(S.shape) if isinstance(S, Tensor) else type(S).__name__
            raise InputError(f"the weight function must give [k={self._width}, {len(z)}, {z.shape[1]}], got {got}")
        return S.detach()[ks.start : ks.stop].to(z)


class LossHessian(Family):
    """H_i: Hessian of a user's loss (outputs [n, c], labels) -> [n], which must be convex in the outputs."""

    name = "user-supplied loss"
    tolerant = False

    def __init__(self, shape: OutputShape, loss: Weighting) -> None:
        super().__init__(shape)
        self.loss = loss

    def hessians(self, z: Tensor, y: Tensor | None) -> Tensor:
        """[n, c, c] by differentiating the sum of the losses twice."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(z, y)
            if losses.shape != z.shape[:1]:
                raise InputError(f"the loss must give one number per example [{len(z)}], got {list(losses.shape)}")
            (g,) = torch.autograd.grad(losses.sum(), z, create_graph=True)
            zero = torch.zeros_like(z)
            cols = [
                torch.autograd.grad(g[:, c].sum(), z, retain_graph=True, allow_unused=True)[0]
                if g.requires_grad
                else None
                for c in range(z.shape[1])
            ]
        return torch.stack([zero if col is None else col for col in cols], -1).detach()

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        values, U = torch.linalg.eigh(self.hessians(z, y).double())
        if bool((values < -1e-5 * values.abs().max()).any()):
            raise InputError("the loss is not convex in the outputs: its Gauss-Newton matrix has no square root")
        S = (U * values.clamp_min(0).sqrt()[:, None]).movedim(-1, 0)
        out: Tensor = S[ks.start : ks.stop].to(z)
        return out

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        return torch.einsum("ncd,...nd->...nc", self.hessians(z, y), u)


EXACT: dict[str, type[Family]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def likelihood_family(likelihood: str, estimator: str, samples: int, shape: OutputShape) -> Family:
    """The family of a likelihood and an estimator of the expectation over labels."""
    if likelihood not in EXACT:
        raise InputError(f"likelihood={likelihood!r}: choose {', '.join(EXACT)}, or give a function of the outputs")
    base = EXACT[likelihood](shape)
    if estimator not in {"exact", "monte-carlo", "empirical"}:
        raise InputError(f"estimator={estimator!r}: choose exact, monte-carlo or empirical")
    if samples < 1:
        raise InputError(f"samples={samples}: at least one draw per example is needed")
    if estimator == "exact":
        return base
    return Score(base, samples if estimator == "monte-carlo" else None)


def loss_family(loss: str | Weighting, shape: OutputShape) -> Family:
    """The family of the Gauss-Newton matrix of a loss as torch computes it with reduction="mean"."""
    if callable(loss):
        return LossHessian(shape, loss)
    if loss == "ce":
        return CrossEntropy(shape, 1.0 / shape.positions)
    if loss == "bce":
        return Bernoulli(shape, 1.0 / shape.total)
    if loss == "mse":
        return Gaussian(shape, 2.0 / shape.total)
    raise InputError(f"loss={loss!r}: choose ce, bce, mse, or give a function (outputs [n, c], labels) -> [n]")
