"""What the network's outputs mean: from outputs to the square root of their information.

Every metric here is F = (1/n) sum_i J_i^T H_i J_i with H_i = sum_k s_ik s_ik^T. A family gives the *cotangents* s_ik
[k, n, c] and, for products, H_i u in closed form. Outputs may have positions (pixels, tokens): the classes are one axis
and an example's log-likelihood is the sum over its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from biascope.curvature.vocabulary import scores
from biascope.support.arguments import check_count, tensor_fix
from biascope.support.errors import InputError, UnsupportedError

Likelihood = Literal["categorical", "bernoulli", "gaussian"]
Estimator = Literal["exact", "monte-carlo", "empirical"]
ClassDim = Literal[1, -1]  # axis of the classes: as in torch's losses, or the last
Weighting = Callable[[Tensor, Tensor | None], Tensor]
IGNORE = -100  # torch's ignore_index: a position without a label


@dataclass(frozen=True)
class OutputShape:
    """How a row of outputs [c_total] splits into classes and positions."""

    classes: int
    positions: int
    classes_last: bool
    shifted: bool = False  # does the output at t belong to the label at t + 1, among the keywords?

    @staticmethod
    def of(shape: tuple[int, ...], class_dim: ClassDim) -> OutputShape:
        """From the shape of one example's output; class_dim counts the examples' axis."""
        shape = shape or (1,)
        if class_dim == 1:
            return OutputShape(shape[0], prod(shape[1:]), False)
        return OutputShape(shape[-1], prod(shape[:-1]), True)

    @property
    def total(self) -> int:
        """Numbers per example."""
        return self.classes * self.positions

    def split(self, rows: Tensor) -> Tensor:
        """[..., total] to [..., classes, positions]."""
        if self.positions == 1:
            return rows[..., None]
        if self.classes_last:
            return rows.reshape(*rows.shape[:-1], self.positions, self.classes).mT
        return rows.reshape(*rows.shape[:-1], self.classes, self.positions)

    def join(self, t: Tensor) -> Tensor:
        """[..., classes, positions] to [..., total]."""
        if self.positions == 1:
            return t[..., 0]
        return (t.mT if self.classes_last else t).flatten(-2)


def checked_labels(likelihood: str, y: Tensor | None, n: int, shape: OutputShape) -> Tensor:
    """Labels [n, positions] (categorical) or targets [n, total], or an error that says what is wrong with them."""
    if not isinstance(y, Tensor):
        got = "" if y is None else f", with tensors, got {type(y).__name__}{tensor_fix(y, 'y')}"
        raise InputError(f"this needs labels: give data as (x, y) or as batches (x, y){got}")
    classes = likelihood == "categorical"
    y = _class_indices(y, shape) if classes else y
    wanted = n * (shape.positions if classes else shape.total)
    if y.dim() == 0 or len(y) != n or y.numel() != wanted or y.is_complex() or (classes and y.is_floating_point()):
        outputs = f"[{n}, {shape.total}]" + (f" of {shape.positions} positions per example" if classes else "")
        raise InputError(
            f"{likelihood} labels, {y.dtype} of shape {list(y.shape)}, do not fit outputs {outputs}"
            f"{_label_hint(y, shape) if classes else ''}"
        )
    y = y.reshape(n, -1)
    if classes:
        y = y.long()
        bad = (y != IGNORE) & ((y < 0) | (y >= shape.classes))
        if bool(bad.any()):
            raise InputError(f"label {int(y[bad][0])} is not a class: the model has {shape.classes}")
    elif not bool(torch.isfinite(y).all()) or (likelihood == "bernoulli" and not bool(((y >= 0) & (y <= 1)).all())):
        raise InputError(f"{likelihood} labels must be finite" + (", from 0 to 1" if likelihood == "bernoulli" else ""))
    return y


def _class_indices(y: Tensor, shape: OutputShape) -> Tensor:
    """One-hot rows and whole floats as the classes they are; other labels as they came."""
    rows = shape.positions == 1 and y.dim() == 2 and y.shape[1] == shape.classes > 1
    if rows and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all()):
        return y.argmax(1)
    if y.is_floating_point() and bool((y == y.round()).all()):
        return y.long()
    return y


def _label_hint(y: Tensor, shape: OutputShape) -> str:
    """What labels that do not fit look like: one-hot rows, or tokens where the classes were taken for positions."""
    if y.dim() == 2 and y.shape[1] == shape.classes and shape.positions == 1:
        return "; rows of probabilities are no class indices: y.argmax(1)"
    if not shape.classes_last and y.dim() > 1 and y[0].numel() == shape.classes:
        return "; where the classes are the last axis, as in language models, say class_dim=-1"
    fix = "; pass y.long(), or say likelihood='gaussian' (loss='mse' of a Hessian) for regression"
    return fix if y.is_floating_point() else ""


class Family:
    """Outputs to cotangents. `width` cotangents; `scale` multiplies H."""

    name = "family"
    spare = 0  # classes at every position that need no cotangent of their own
    random = False
    softmax = False  # classes at every position, of which one is the label
    given = False  # are labels needed?
    tolerant = True  # gives cotangents for all outputs, also NaN: these may be refused later

    def __init__(self, shape: OutputShape, scale: float = 1.0) -> None:
        self.shape, self.scale = shape, scale
        self.width = shape.total - self.spare * shape.positions
        if not self.width:
            raise InputError(
                f"a {self.name} likelihood needs at least 2 outputs; of one real output say likelihood='gaussian', "
                "of one logit likelihood='bernoulli'"
            )

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """Labels in the form `cotangents` takes them."""
        return y

    def ignores(self, y: Tensor) -> bool:
        """Are there positions among the labels y that have none (-100) and add nothing?"""
        return False

    def draw(self, generator: torch.Generator, n: int) -> Tensor | None:
        """Random numbers [samples, n, ...] for n examples, or None."""
        return None

    @property
    def random_numbers(self) -> int:
        """How many random numbers make the labels of one example."""
        return self.shape.total

    def noise(self, u: Tensor) -> Tensor:
        """What `drawn_scores` takes, from uniform numbers u [samples, n, random_numbers]."""
        return u

    def drawn_scores(self, z: Tensor, y: Tensor | None, draws: Tensor) -> Tensor:
        """Gradients of the log-likelihood [k, n, total] at labels drawn with `noise` draws [k, n, ...]."""
        raise UnsupportedError(f"{self.name}: no labels can be drawn; use estimator='exact'")

    def label_scores(self, z: Tensor, y: Tensor) -> Tensor:
        """Gradients of the log-likelihood [1, n, total] at the labels y, as `checked_labels` gives them."""
        raise UnsupportedError(f"{self.name}: no scores at labels; use estimator='exact'")

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:
        """S[ks] [len(ks), n, total] at outputs z [n, total]."""
        raise NotImplementedError

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

    def noise(self, u: Tensor) -> Tensor:  # noqa: D102
        normal: Tensor = torch.special.ndtri(u.clamp_min_(2.0**-54))
        return normal

    def drawn_scores(self, z: Tensor, y: Tensor | None, draws: Tensor) -> Tensor:  # noqa: D102
        return draws.to(z.dtype)

    def label_scores(self, z: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        return y.to(z)[None] - z

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

    def drawn_scores(self, z: Tensor, y: Tensor | None, draws: Tensor) -> Tensor:  # noqa: D102
        p = torch.sigmoid(z)
        return (draws < p).to(z.dtype) - p

    def label_scores(self, z: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        return y.to(z)[None] - torch.sigmoid(z)

    def apply(self, z: Tensor, y: Tensor | None, draws: Tensor | None, u: Tensor) -> Tensor:  # noqa: D102
        return self._variance(z) * u


class Categorical(Family):
    """y ~ softmax(f) at every position: H = diag p - p p^T.

    Its square root is the Cholesky form with c - 1 columns (one backward pass fewer than sqrt(p_k)(e_k - p)):
    s_j = sqrt(p_j t_j / (p_j + t_j)) (e_j - p_{>j} / t_j) with t_j = sum_{l > j} p_l, a class against the later ones.
    """

    name = "categorical"
    spare = 1
    softmax = True

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:
        """The expectation over labels needs none; but a position that has none (-100) has no likelihood."""
        if not isinstance(y, Tensor) or y.is_floating_point():
            return None
        positions, classes = self.shape.positions, self.shape.classes
        if not self.shape.classes_last and y.shape == (n, classes) and positions not in (1, classes):
            raise InputError(
                f"the labels have the {classes} positions that were taken for classes: where the classes are the last "
                "axis, as in language models, say class_dim=-1"
            )
        return checked_labels(self.name, y, n, self.shape) if bool((y == IGNORE).any()) else None

    def ignores(self, y: Tensor) -> bool:  # noqa: D102
        return True  # `check_labels` hands others on as None

    def has_label(self, y: Tensor) -> Tensor:
        """1 at the outputs [n, total] of positions that have a label, else 0."""
        return self.shape.join((y != IGNORE)[:, None].expand(-1, self.shape.classes, -1))

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        one = self.shape.positions == 1
        S = self._one_position(torch.softmax(z, -1), ks) if one else self._positions(z, ks)
        return S if y is None else S * self.has_label(y)

    def _positions(self, z: Tensor, ks: range) -> Tensor:
        """The columns ks of the root, each of one position."""
        c = self.shape.classes
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
        return found if y is None else found * self.has_label(y)

    @property
    def random_numbers(self) -> int:  # noqa: D102
        return self.shape.positions

    def drawn_scores(self, z: Tensor, y: Tensor | None, draws: Tensor) -> Tensor:  # noqa: D102
        if self.shape.classes_last and self.shape.positions > 1:
            return self._by_rows(z, y, None, draws)
        if self.shape.positions > 1 or y is not None:
            return self._scores(z, y, _inverse_cdf(torch.softmax(self.shape.split(z), -2), draws))
        p = torch.softmax(z, -1)  # the same for draws [k, n, 1] with few small operations
        cdf = p.cumsum(-1, dtype=torch.float64)
        each = cdf.expand(draws.shape[0], *p.shape).contiguous()
        labels = torch.searchsorted(each, draws * cdf[:, -1:]).clamp_(max=p.shape[1] - 1)  # beyond only where p is NaN
        return p.new_zeros(each.shape).scatter_(-1, labels, 1.0).sub_(p)

    def label_scores(self, z: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        labels = y[None].clamp_min(0)
        by_rows = self.shape.classes_last and self.shape.positions > 1
        return self._by_rows(z, y, labels, None) if by_rows else self._scores(z, y, labels)

    def _by_rows(self, z: Tensor, y: Tensor | None, labels: Tensor | None, draws: Tensor | None) -> Tensor:
        """The same for classes on the last axis [n, P c], where a position is a row and there may be many classes."""
        counted = None if y is None else (y != IGNORE).flatten()
        index, uniform = (None if t is None else t.flatten(1) for t in (labels, draws))
        found = scores(z.reshape(-1, self.shape.classes), index, uniform, counted)
        return found.view(len(found), *z.shape)

    def _scores(self, z: Tensor, y: Tensor | None, labels: Tensor) -> Tensor:
        """One-hot labels [k, n, P] less the probabilities, at the positions that have a label in y."""
        p = torch.softmax(self.shape.split(z), -2)
        hot = torch.zeros(len(labels), *p.shape, dtype=z.dtype, device=z.device)
        score = hot.scatter_(-2, labels[..., None, :], 1.0).sub_(p)
        return self.shape.join(score if y is None else score * (y != IGNORE)[:, None])


class Score(Family):
    """Gradients of log-likelihoods at given labels: the true ones ("empirical") or drawn from the model."""

    def __init__(self, base: Family, samples: int | None) -> None:
        super().__init__(base.shape, base.scale)
        self.base, self.samples = base, samples
        self.name = f"{base.name}, " + ("empirical" if samples is None else f"monte-carlo ({samples} samples)")
        self.random, self.given, self.softmax = samples is not None, samples is None, base.softmax
        self.width = samples or 1

    def draw(self, generator: torch.Generator, n: int) -> Tensor | None:  # noqa: D102
        if self.samples is None:
            return None
        # example by example, and uniform: torch draws these one after the other, so that it does not matter how the
        # data is cut into batches (torch.randn transforms them in groups of 16)
        shape = n, self.samples, self.base.random_numbers
        u = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return self.base.noise(u).transpose(0, 1).contiguous()

    def check_labels(self, y: Tensor | None, n: int) -> Tensor | None:  # noqa: D102
        return self.base.check_labels(y, n) if self.random else checked_labels(self.base.name, y, n, self.shape)

    def ignores(self, y: Tensor) -> bool:  # noqa: D102
        return self.base.ignores(y) and bool((y == IGNORE).any())

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        if draws is not None:
            draws = draws if len(ks) == self.width else draws[ks.start : ks.stop]
            found = self.base.drawn_scores(z, y, draws.to(z.device))
        else:
            assert y is not None
            found = self.base.label_scores(z, y)
        root = sqrt(self.scale / self.width)
        return found if root == 1.0 else found.mul_(root)


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
        self.weights, self.width = weights, width

    def cotangents(self, z: Tensor, y: Tensor | None, draws: Tensor | None, ks: range) -> Tensor:  # noqa: D102
        S = self.weights(z, y)
        if not isinstance(S, Tensor) or S.dim() != 3 or S.shape[1:] != z.shape or len(S) != self.width:
            got = list(S.shape) if isinstance(S, Tensor) else type(S).__name__
            raise InputError(f"the weight function must give [k={self.width}, {len(z)}, {z.shape[1]}], got {got}")
        return S.detach()[ks.start : ks.stop].to(z)


EXACT: dict[Likelihood, type[Family]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def likelihood_family(likelihood: Likelihood, estimator: Estimator, samples: int, shape: OutputShape) -> Family:
    """The family of a likelihood and an estimator of the expectation over labels."""
    base = EXACT[likelihood](shape)
    if estimator == "exact":
        return base
    return Score(base, check_count(samples, "samples") if estimator == "monte-carlo" else None)
