"""What a kernel predicts: ridge(less) regression, and gradient flow or descent, mode by mode and in closed form.

The loss is 0.5 ||f - y||^2, summed over examples and outputs: gradient descent on a mean over n examples with rate eta
is the same as `lr = eta / n` here, and time t there is t / n here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biascope.kernels.kernel import Kernel
from biascope.kernels.system import System, system
from biascope.support.arguments import check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked
from biascope.support.tables import facts, grid, one_line


@dataclass(frozen=True)
class KernelFit:
    """Result of `kernel_regression`.

    Attributes:
        train: predictions on the training examples, in the shape of the targets.
        test: predictions on the test examples, None without K_test.
        coefficients: dual coefficients a, f = f0 + K(., X) a; shape of the targets.
        rkhs_norm_squared: a^T K a = ||f - f0||_k^2, the squared length of the shortest weight change that makes f - f0.
        residual: ||f(X) - y||.
        degrees_of_freedom: sum lambda / (lambda + ridge).
        rank: eigenvalues used.
        condition: (largest + ridge) / (smallest used + ridge): relative errors of the kernel are amplified by this.
        ridge: what was added to the diagonal.
    """

    train: Tensor
    test: Tensor | None
    coefficients: Tensor
    rkhs_norm_squared: float
    residual: float
    degrees_of_freedom: float
    rank: int
    condition: float
    ridge: float
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """Norms, rank and condition, for notebooks."""
        rows = {
            "residual": self.residual,
            "squared norm": self.rkhs_norm_squared,
            "degrees of freedom": self.degrees_of_freedom,
            "rank": self.rank,
            "condition": self.condition,
            "ridge": self.ridge,
        }
        return facts(f"Kernel regression on {len(self.train)} examples", rows)


@checked
def kernel_regression(
    K_train: Kernel | Tensor,
    y: Tensor,
    ridge: float = 0.0,
    K_test: Kernel | Tensor | None = None,
    f0_train: Tensor | None = None,
    f0_test: Tensor | None = None,
    cutoff: float | None = None,
) -> KernelFit:
    """Kernel ridge regression a = (K + ridge I)^-1 (y - f0), f = f0 + K(., X) a; minimum-norm without ridge.

    `ridge` is what stands on the diagonal: for the penalty lam ||w||^2 on a mean squared error take ridge = n * lam.

    Args:
        K_train: K(x, x): Kernel or tensor, [n, n] or full [n, c, n, c].
        y: class indices [n] (made one-hot; -1/+1, and integers for a model with one output, stay as they are), or
            targets [n], [n, d]; [n, c] for a full kernel.
        ridge: >= 0.
        K_test: K(x_test, x): rows are test examples.
        f0_train: outputs of the network itself at x, zero if None (the centred model).
        f0_test: the same at x_test.
        cutoff: without ridge, eigenvalues up to cutoff times the largest count as zero (default: rounding).

    Example:
        >>> x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
        >>> fit = kernel_regression(x @ x.T, 3 * x[:, 0], K_test=torch.tensor([[2.0]], dtype=torch.float64) @ x.T)
        >>> round(float(fit.test), 6), fit.rank
        (6.0, 1)
    """
    check_number(ridge, "ridge", least=0)
    sys = system(K_train, cutoff)
    Y, f0, r = _residual(sys, y, f0_train)
    lam = sys.values
    used = sys.kept if ridge == 0 else torch.ones_like(sys.kept)
    inverse = torch.where(used, 1 / (lam + ridge).clamp_min(torch.finfo(lam.dtype).tiny), 0.0)
    coordinates = sys.vectors.mT @ r
    a = sys.vectors @ (inverse[:, None] * coordinates)
    gain = sys.vectors @ ((lam * inverse)[:, None] * coordinates)
    smallest = float(lam[used][-1])
    return KernelFit(
        sys.shaped(f0 + gain, y),
        _at_test(sys, y, Y, a, K_test, f0_test),
        sys.shaped(a, y),
        float(((lam * inverse.square())[:, None] * coordinates.square()).sum()),
        float((f0 + gain - Y).norm()),
        float((lam * inverse).sum()),
        int(used.sum()),
        (float(lam[0]) + ridge) / (smallest + ridge) if smallest + ridge > 0 else math.inf,
        float(ridge),
    )


@dataclass(frozen=True)
class LearningCurve:
    """Predictions of the linearised model while it is trained: train [T, n, ...], test [T, m, ...], loss [T]."""

    times: Tensor
    train: Tensor
    test: Tensor | None
    loss: Tensor
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """The loss over time, for notebooks."""
        return grid("Learning curve", ["time", "loss"], zip(self.times.tolist(), self.loss.tolist()))


@checked
def gradient_flow(
    K: Kernel | Tensor,
    y: Tensor,
    t: float | Sequence[float] | Tensor,
    K_test: Kernel | Tensor | None = None,
    f0_train: Tensor | None = None,
    f0_test: Tensor | None = None,
) -> LearningCurve:
    """Gradient flow on 0.5 ||f - y||^2 at times t: f_t = f0 + K(., X) (1 - exp(-K t)) / K (y - f0).

    The residual along eigenvector j decays as exp(-lambda_j t); singular kernels are no problem. f0 are the outputs at
    the start, 0 if None. Of small steps on `F.mse_loss`, a mean over n c numbers, t is 2 lr steps / (n c).

    Example:
        >>> gradient_flow(torch.eye(2), torch.ones(2), [0.0, 1.0]).loss
        tensor([1.0000, 0.1353], dtype=torch.float64)
    """
    times = _times(t, "t")

    def filters(lam: Tensor) -> Tensor:
        z = lam * times[:, None]
        return times[:, None] * torch.where(z > 0, -torch.expm1(-z) / z.clamp_min(1e-300), 1.0)

    return _curve(system(K), y, times, filters, K_test, f0_train, f0_test)


@checked
def gradient_descent(
    K: Kernel | Tensor,
    y: Tensor,
    steps: float | Sequence[float] | Tensor,
    lr: float,
    K_test: Kernel | Tensor | None = None,
    f0_train: Tensor | None = None,
    f0_test: Tensor | None = None,
) -> LearningCurve:
    """Gradient descent on 0.5 ||f - y||^2 after some steps.

    The residual along eigenvector j is multiplied by (1 - lr lambda_j) at every step.
    A rate above 2 / lambda_1 makes the first mode grow without bound and is refused.

    Example:
        >>> gradient_descent(torch.eye(2), torch.ones(2), [0, 1, 2], lr=0.5).train[:, 0]
        tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """
    sys = system(K)
    check_rate(sys, lr)
    times = _times(steps, "steps")

    def filters(lam: Tensor) -> Tensor:  # (1 - (1 - lr lambda)^steps) / lambda, without cancellation for slow modes
        z = lr * lam
        slow = -torch.expm1(times[:, None] * torch.log1p(-z.clamp_max(0.5)))
        done = torch.where(z < 0.5, slow, 1 - _power(z, times)) / lam.clamp_min(1e-300)
        return torch.where(z > 0, done, lr * times[:, None])

    return _curve(sys, y, times, filters, K_test, f0_train, f0_test)


@checked
def steps_to_loss(
    K: Kernel | Tensor, y: Tensor, loss: float, lr: float | None = None, f0_train: Tensor | None = None
) -> float:
    """Gradient-descent steps until 0.5 ||f - y||^2 <= loss; infinity if the kernel cannot get there.

    With kernels taken at several checkpoints and the same y, this is the kernel-swap comparison without training.

    Args:
        K: kernel.
        y: targets as for `kernel_regression`.
        loss: to reach, > 0.
        lr: rate; 1 / lambda_1 if None.
        f0_train: outputs at the start, zero if None.
    """
    check_number(loss, "loss", above=0)
    sys = system(K)
    lr = 1 / float(sys.values[0]) if lr is None else lr
    check_rate(sys, lr)
    energy = (sys.vectors.mT @ _residual(sys, y, f0_train)[2]).square().sum(1)
    z = torch.where(sys.kept, lr * sys.values, 0.0).clamp_max(2.0)  # `check_rate` lets rounding above 2 pass

    def left(factor: Tensor) -> float:
        return float(0.5 * (factor.square() * energy).sum())

    def at(step: float) -> float:
        return left(_power(z, energy.new_tensor([float(step)]))[0])

    if at(0.0) <= loss:
        return 0.0
    if left(((z < 1e-300) | (z == 2)).to(z)) > loss:  # these never decay
        return math.inf
    high = 1
    while at(high) > loss:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) <= loss else (middle, high)
    return float(high)


@dataclass(frozen=True)
class ModeStep:
    """One gradient step in function space, mode by mode: df = sum_j coefficients[j] * vectors[:, j].

    rates [N]: lr * lambda_j, descending; vectors [N, N] in columns; coefficients [N]; change: df.
    """

    rates: Tensor
    vectors: Tensor
    coefficients: Tensor
    change: Tensor
    __repr__ = one_line


@checked
def gradient_step_modes(K: Kernel | Tensor, grad: Tensor, lr: float) -> ModeStep:
    """What one gradient-descent step does to the linearised model: df_j = -lr lambda_j (u_j^T grad).

    Args:
        K: kernel K(x, x), [n, n] or full.
        grad: derivative of the loss with respect to the outputs, [n], or [n, c] for a full kernel.
        lr: learning rate.
    """
    sys, lr = system(K), check_number(lr, "lr", above=0)
    rates = lr * sys.values
    column = sys.values_of(grad, sys.n, sys.values[:, None], "grad")[:, 0]
    coefficients = -rates * (sys.vectors.mT @ column)
    return ModeStep(rates, sys.vectors, coefficients, (sys.vectors @ coefficients).reshape(grad.shape))


@checked
def time_constants(values: Tensor, lr: float | None = None) -> Tensor:
    """Steps [N] for the residual of every mode to fall by e: tau_j = -1 / log |1 - lr lambda_j|.

    With lr None, lr = 1 / lambda_1 and tau_j = -1 / log(1 - lambda_j / lambda_1); in print the inverse is missing.
    A mode learnt in one step has tau 0, one that is never learnt (lambda 0) infinity.
    """
    lam = values.detach().double()
    top = float(check_tensor(lam, "values", dims=1).max())
    z = lam / top if lr is None else lr * lam
    if not (float(lam.min()) >= 0 and 0 < float(z.max()) <= 2 * (1 + 1e-12)):
        raise InputError(f"lr={lr} must lie between 0 and 2 / lambda_1, eigenvalues from 0 to lambda_1 = {top:.4g} > 0")
    log = torch.where(z < 1, torch.log1p(-z.clamp_max(1)), (z - 1).abs().log())
    return 1 / log.abs()


def check_rate(sys: System, lr: float) -> None:
    """Refuse a rate that is not positive or makes gradient descent diverge."""
    limit = 2 / float(sys.values[0])
    if check_number(lr, "lr", above=0) > limit * (1 + 1e-12):
        raise InputError(f"lr={lr:.4g} diverges: gradient descent with this kernel is stable up to {limit:.4g}")


def _power(z: Tensor, steps: Tensor) -> Tensor:
    """(1 - z)^steps [T, N] for z [N] in [0, 2].

    1 - z is exact from z = 1/2 on; below, it would lose the digits of a small z, which many steps bring out again.
    """
    slow = torch.exp(steps[:, None] * torch.log1p(-z.clamp_max(0.5)))
    return torch.where(z < 0.5, slow, (1 - z)[None].pow(steps[:, None]))


def _times(t: float | Sequence[float] | Tensor, what: str) -> Tensor:
    times = torch.as_tensor(t, dtype=torch.float64, device="cpu").reshape(-1)
    if not bool(((times >= 0) & times.isfinite()).all()) or (what == "steps" and bool((times % 1 > 0).any())):
        raise InputError(f"{what} must be finite numbers >= 0" + (", without a fraction" if what == "steps" else ""))
    return times


def _residual(sys: System, y: Tensor, f0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(targets, starting values, what is left to learn), all [N, d]."""
    Y = sys.columns(y)
    start = sys.values_of(f0, sys.n, Y, "f0_train")
    return Y, start, Y - start


def _at_test(
    sys: System, y: Tensor, Y: Tensor, a: Tensor, K_test: Kernel | Tensor | None, f0: Tensor | None
) -> Tensor | None:
    """f0 + K_test a for coefficients [..., N, d], in the shape of targets."""
    if K_test is None:
        if f0 is not None:
            raise InputError("f0_test was given without K_test")
        return None
    M = sys.cross(K_test)
    start = sys.values_of(f0, len(M) // (sys.c or 1), Y, "f0_test")
    return sys.shaped(start + M @ a, y)


def _curve(
    sys: System,
    y: Tensor,
    times: Tensor,
    filters: Callable[[Tensor], Tensor],
    K_test: Kernel | Tensor | None,
    f0_train: Tensor | None,
    f0_test: Tensor | None,
) -> LearningCurve:
    Y, f0, r = _residual(sys, y, f0_train)
    phi = filters(sys.values.cpu()).to(sys.values)  # [T, N]
    coordinates = phi[..., None] * (sys.vectors.mT @ r)  # [T, N, d]
    train = f0 + sys.vectors @ (sys.values[:, None] * coordinates)
    loss = 0.5 * (train - Y).square().sum((1, 2))
    test = _at_test(sys, y, Y, sys.vectors @ coordinates, K_test, f0_test)
    return LearningCurve(times, sys.shaped(train, y), test, loss)
