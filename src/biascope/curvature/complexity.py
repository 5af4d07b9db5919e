"""Complexity by the path taken: sum_t ||dw_t|| ||Phi_t||_F, and Rademacher bounds for learning flows.

Phi_t is the matrix of tangent features (the Jacobian) on n examples, K_t = Phi_t Phi_t^T, ||Phi_t||_F = sqrt(tr K_t).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature.build import l2_metric
from biascope.support.arguments import check_count, check_finite, check_number, check_share, check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked
from biascope.support.tables import one_line


@checked
def feature_norm(model: nn.Module, x: Any, **options: Any) -> float:
    """||Phi||_F = sqrt(tr K), the norm of the Jacobian on x, exactly and without forming it.

    Options (`params`, `output`, `precision`) are those of `bs.fisher`.

    Example:
        >>> round(feature_norm(nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])), 6)
        5.0
    """
    G = l2_metric(model, x, "implicit", **options)
    return math.sqrt(max(0.0, float(G.trace())) * int(G.info["n"]))


@dataclass
class PathComplexity:
    """C(f) = sum_t ||dw_t||_2 ||Phi_t||_F, summed while a network trains.

    Call `update(model)` at every step (or only at some: coarser steps give smaller sums, by the triangle inequality;
    say which when you compare). ||Phi_t|| is taken at the beginning of the step, on the fixed examples `x`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> C = PathComplexity(torch.randn(4, 2))
        >>> C.update(net)
        0.0
        >>> with torch.no_grad():
        ...     _ = net.weight.add_(1.0)
        >>> C.update(net) > 0
        True
    """

    x: Any
    value: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        self._before: Tensor | None = None
        self._norm = 0.0

    @checked
    def update(self, model: nn.Module) -> float:
        """Add the step from the last call to now; gives the sum so far."""
        norm = feature_norm(model, self.x)  # refuses a model without parameters that are trained
        now = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters() if p.requires_grad])
        if self._before is not None:
            self.value += float((now - self._before).norm()) * self._norm
            self.steps += 1
        self._before, self._norm = now, norm
        return self.value


@checked
def ball_bound(radius: float, K: Tensor) -> float:
    """Rademacher complexity of {<w, Phi>: ||w|| <= radius} is at most (radius / n) sqrt(tr K), K [n, n].

    Example:
        >>> ball_bound(1.0, torch.eye(4))
        0.5
    """
    trace = check_number(_square(K).trace(), "the trace of K", least=0)
    return check_number(radius, "radius", least=0) / len(K) * math.sqrt(trace)


def _square(K: Tensor) -> Tensor:
    if K.dim() != 2 or K.shape[0] != K.shape[1] or K.numel() == 0:
        raise InputError(f"K must be a kernel [n, n], got {list(K.shape)}")
    return K


@checked
def ball_complexity(radius: float, K: Tensor, samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The exact complexity (radius / n) E sqrt(s^T K s) over random signs s, by sampling: (mean, standard error).

    Example:
        >>> mean, error = ball_complexity(1.0, torch.eye(4))
        >>> mean, error
        (0.5, 0.0)
    """
    check_number(radius, "radius", least=0)
    samples, n = check_count(samples, "samples", least=2), len(_square(K))
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (samples, n), generator=generator, device="cpu").to(K) * 2 - 1
    values = radius / n * ((signs @ K) * signs).sum(1).clamp_min(0.0).sqrt()
    return float(values.mean()), float(values.std() / math.sqrt(samples))


@checked
def learning_flow_bound(steps: Sequence[float], feature_norms: Sequence[float], n: int) -> float:
    """Theorem: the class {sum_t <dw_t, Phi_t>: ||dw_t||_{A_t} <= m_t} has complexity <= sum_t (m_t / n) ||Phi_t||_F.

    Args:
        steps: m_t, lengths of the steps in the norms A_t.
        feature_norms: ||A_t^-1 Phi^T||_F = sqrt(tr K_t).
        n: number of examples.

    Example:
        >>> learning_flow_bound([1.0], [2.0], 4)
        0.5
    """
    lengths = [check_number(m, "steps", least=0) for m in steps]
    norms = [check_number(p, "feature_norms", least=0) for p in feature_norms]
    return math.fsum(m * p for m, p in zip(lengths, norms, strict=True)) / check_count(n, "n")


@checked
def margin_bound(empirical_risk: float, complexity: float, n: int, delta: float = 0.05) -> float:
    """Risk <= empirical margin risk + 2 R_S(l_gamma(F)) + 3 sqrt(log(2 / delta) / (2 n)), with probability 1 - delta.

    The appendix's constant is used; the chapter's (sqrt(log(2 / delta) / n)) differs.

    Example:
        >>> round(margin_bound(0.1, 0.05, 1000), 4)
        0.3288
    """
    risk = check_number(empirical_risk, "empirical_risk", least=0) + 2 * check_number(complexity, "complexity", least=0)
    confidence = math.log(2 / check_number(check_share(delta, "delta"), "delta", above=0))
    return risk + 3 * math.sqrt(confidence / (2 * check_count(n, "n")))


@checked
def margin_risk(outputs: Tensor, labels: Tensor, gamma: float) -> float:
    """Mean ramp loss of the margins: 1 below 0, 0 above gamma, a ramp between.

    Args:
        outputs: f [n, c].
        labels: classes [n]; the margin is f[y] - max_{y' != y} f[y']. For one output (c = 1) it is y f, with labels -1
            or 0 for one class and 1 for the other.
        gamma: where the ramp ends.

    Example:
        >>> margin_risk(torch.tensor([[2.0, 0.0], [0.0, 0.5]]), torch.tensor([0, 1]), 1.0)
        0.25
        >>> margin_risk(torch.tensor([[2.0], [0.5]]), torch.tensor([1, -1]), 1.0)
        0.5
    """
    check_number(gamma, "gamma", above=0)
    outputs = check_tensor(outputs, "outputs", dims=2, floating=True).detach()
    n, c = outputs.shape
    indices = not labels.is_floating_point() and labels.dtype != torch.bool
    if labels.shape != (n,) or (c > 1 and not (indices and int(labels.min()) >= 0 and int(labels.max()) < c)):
        raise InputError(f"labels must be class indices [{n}] from 0 to {c - 1}, not {labels.dtype} {labels.shape}")
    if c == 1:
        margins = _signs(labels).to(outputs) * outputs[:, 0]
    else:
        index = labels[:, None].long()
        own = outputs.gather(1, index)
        margins = (own - outputs.scatter(1, index, -math.inf).amax(1, keepdim=True))[:, 0]
    return float((1 - margins / gamma).clamp(0.0, 1.0).mean())


def _signs(labels: Tensor) -> Tensor:
    """Labels of two classes, {-1, 1} or {0, 1}, as -1 and 1."""
    values = set(labels.tolist())
    if not (values <= {-1, 1} or values <= {0, 1}):
        raise InputError(f"labels of a single output must be -1 and 1, or 0 and 1, not {sorted(values)[:4]}")
    return torch.where(labels > 0, 1.0, -1.0)


@checked
def multiclass_complexity(radius: float, K: Tensor, classes: int, gamma: float) -> float:
    """R_S(l_gamma(F)) <= c^(3/2) radius / (gamma n) sqrt(tr K) for c linear outputs on the features of K [n, n].

    Example:
        >>> multiclass_complexity(1.0, torch.eye(4), classes=4, gamma=1.0)
        4.0
    """
    c = check_count(classes, "classes")
    return c * math.sqrt(c) / check_number(gamma, "gamma", above=0) * ball_bound(radius, K)


@dataclass(frozen=True)
class NormBounds:
    """Bounds for the minimum-norm interpolator in two norms; `weights` nu_j [r] give the better one.

    Attributes:
        euclidean: the bound for A = I; infinite where no interpolator exists.
        optimal: the bound for the best A.
        weights: nu_j of the eigenvalues used, ascending.
        outside: share of y's energy on eigenvectors left out, which no function of the kernel's space reaches.
        rank: eigenvalues used.
    """

    euclidean: float
    optimal: float
    weights: Tensor
    outside: float = 0.0
    rank: int = 0
    __repr__ = one_line


@checked
def optimal_norm_bound(K: Tensor, y: Tensor, cutoff: float | None = None) -> NormBounds:
    """Bounds of ||w*||_A ||A^-1 Phi^T||_F / n for w* = Phi^T K^-1 y: A = I, and the best A in K's eigenbasis.

    The best weights are nu_j = lambda_j / |u_j^T y| and the bound is (1/n) sum_j |u_j^T y|, whatever the eigenvalues.
    It depends on the labels, so it is not a uniform high-probability bound.

    Ill-conditioned kernels: `euclidean` has a sum of (u_j^T y)^2 / lambda_j, which the smallest eigenvalues decide.
    Their size is then that of rounding or of `cutoff`, and so is the bound; a warning says so where a cutoff ten times
    larger changes a bound by more than a tenth.

    Args:
        K: kernel [n, n], positive semi-definite.
        y: targets [n].
        cutoff: None: eigenvalues up to rounding, n eps times the largest, are zero; where y has a part there, no
            interpolator exists and both bounds are infinite. A number: eigenvalues up to this times the largest are
            left out and the bounds are those of y's part on the others; `outside` says how much of y is not bounded.

    Example:
        >>> b = optimal_norm_bound(torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([1.0, 1.0]))
        >>> round(b.optimal, 4), round(b.euclidean, 4)
        (1.0, 1.25)
        >>> optimal_norm_bound(torch.diag(torch.tensor([4.0, 0.0])), torch.tensor([1.0, 1.0])).optimal
        inf
    """
    if y.shape != _square(K).shape[:1]:
        raise InputError(f"K must be [n, n] and y [n], got {list(K.shape)} and {list(y.shape)}")
    check_finite(K, "K")
    check_finite(y, "y")
    if cutoff is not None:
        check_share(cutoff, "cutoff")
    values, U = torch.linalg.eigh(K.double())
    # a kernel made in float32 knows its eigenvalues to float32's rounding
    eps = torch.finfo(K.dtype if K.is_floating_point() else torch.float64).eps
    rounding = len(K) * eps
    if not bool(values[-1] > 0) or bool(values[0] < -10 * rounding * values[-1]):
        raise InputError(f"K must be positive semi-definite, not zero: its eigenvalues go from {float(values[0]):.3g}")
    c = U.T @ y.double()
    share, allowed = (rounding, 0.0) if cutoff is None else (cutoff, math.inf)
    found = _norm_bounds(values, c, share, allowed, eps)
    # with `outside` allowed: what is compared is the sums
    part, coarser = (_norm_bounds(values, c, k * share, math.inf, eps) for k in (1, 10))
    pairs = (part.euclidean, coarser.euclidean), (part.optimal, coarser.optimal)
    if math.isfinite(found.optimal) and any(abs(a - b) > 0.1 * max(a, b) for a, b in pairs):
        warnings.warn(
            f"the kernel is ill-conditioned: with a cutoff ten times larger the bounds are {coarser.euclidean:.3g} and "
            f"{coarser.optimal:.3g}, not {part.euclidean:.3g} and {part.optimal:.3g}; they are set by the cutoff",
            stacklevel=3,
        )
    return found


def _norm_bounds(values: Tensor, c: Tensor, cutoff: float, allowed: float, eps: float) -> NormBounds:
    """Bounds from eigenvalues [n] and the targets' coordinates c [n]; infinite where more is outside than `allowed`."""
    n, keep = len(values), values > cutoff * values[-1]
    total = float(c.square().sum())
    outside = float(c[~keep].square().sum()) / total if total > 0 else 0.0
    left, mine = values[keep], c[keep].abs()
    weights = left / mine.clamp_min(torch.finfo(c.dtype).tiny)
    if outside > max(allowed, (n * eps) ** 2):  # a part of y of the size of rounding is no part
        return NormBounds(math.inf, math.inf, weights, outside, len(left))
    euclidean = math.sqrt(float((mine.square() / left).sum() * left.sum())) / n
    return NormBounds(euclidean, float(mine.sum()) / n, weights, outside, len(left))
