"""Kronecker products B (x) A on row-major vectors: the algebra behind KFAC.

The ordering trap: torch flattens a weight V [d_out, d_in] row by row, and in that order

    (B (x) A) vec(V) = vec(B V A^T),    B acting on outputs, A on inputs.

Papers that stack columns write the same map A (x) B. The product itself is never formed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from biascope.arguments import check_number, check_tensor
from biascope.errors import InputError
from biascope.linalg.eigenbasis import KroneckerEigen, check_damping
from biascope.linalg.elementary import is_symmetric
from biascope.linalg.operator import LinearOperator
from biascope.linalg.stable import psd_eigh

MODES = ("exact", "factored")


def kron_matvec(B: Tensor, A: Tensor, v: Tensor) -> Tensor:
    """(B (x) A) v for B [p, q], A [r, s] and v [q s] or [q s, k] row-major; gives [p r] or [p r, k].

    Example:
        >>> import torch
        >>> B, A = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[2.0]])
        >>> kron_matvec(B, A, torch.tensor([1.0, 3.0]))
        tensor([6., 2.])
    """
    if check_tensor(B, "B").ndim != 2 or check_tensor(A, "A").ndim != 2:
        raise InputError(f"kron_matvec needs matrices B and A, not {list(B.shape)} and {list(A.shape)}")
    (p, q), (r, s) = B.shape, A.shape
    if check_tensor(v, "v").ndim not in (1, 2) or v.shape[0] != q * s:
        raise InputError(f"(B {p}x{q}) (x) (A {r}x{s}) takes [{q * s}] or [{q * s}, k], not {list(v.shape)}")
    if not B.dtype == A.dtype == v.dtype:
        raise InputError(f"kron_matvec: B is {B.dtype}, A is {A.dtype}, v is {v.dtype}; they must agree")
    V = v.reshape(q, s, -1)
    k = V.shape[2]
    if k == 1:
        out = (B @ V[:, :, 0] @ A.T).reshape(p * r, 1)
    else:
        out = torch.matmul(A, (B @ V.reshape(q, s * k)).reshape(p, s, k)).reshape(p * r, k)
    return out[:, 0] if v.ndim == 1 else out


class KroneckerOperator(LinearOperator):
    """B (x) A for B [p, q] and A [r, s], as an operator [p r, q s] on row-major vectors.

    Everything is done on the factors. Operations that need eigenvalues (solve, inverse, power, eigen, sample) take B
    and A to be symmetric positive semi-definite, as second moments are; the eigenbases are computed once, in float64.

    Example:
        >>> import torch
        >>> K = KroneckerOperator(torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([3.0, 4.0])))
        >>> K.diagonal()
        tensor([3., 4., 6., 8.])
        >>> K.solve(torch.ones(4), damping=1.0)
        tensor([0.2500, 0.2000, 0.1429, 0.1111])
    """

    def __init__(self, B: Tensor, A: Tensor) -> None:
        for name, factor in (("B", B), ("A", A)):
            if check_tensor(factor, name).ndim != 2:
                raise InputError(f"KroneckerOperator: {name} must be a matrix, not of shape {list(factor.shape)}")
        if B.dtype != A.dtype or B.device != A.device:
            raise InputError(f"KroneckerOperator: B is {B.dtype} on {B.device}, A is {A.dtype} on {A.device}")
        shape = (B.shape[0] * A.shape[0], B.shape[1] * A.shape[1])
        super().__init__(shape, B.dtype, B.device, is_symmetric(B) and is_symmetric(A))
        self.B, self.A = B, A
        self._eigen: KroneckerEigen | None = None

    def _matmat(self, X: Tensor) -> Tensor:
        return kron_matvec(self.B, self.A, X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return kron_matvec(self.B.T, self.A.T, Y)

    def _expression(self) -> str:
        return f"B {self.B.shape[0]}x{self.B.shape[1]} (x) A {self.A.shape[0]}x{self.A.shape[1]}"

    # algebra that stays Kronecker ----------------------------------------------------------------------------------

    @property
    def T(self) -> KroneckerOperator:
        """B^T (x) A^T."""
        return self if self.symmetric else KroneckerOperator(self.B.T, self.A.T)

    def __mul__(self, scalar: float) -> LinearOperator:
        scaled = super().__mul__(scalar)  # checks the number
        root = math.sqrt(abs(float(scalar)))  # shared evenly, so that neither factor over- or underflows first
        return KroneckerOperator(math.copysign(root, scalar) * self.B, root * self.A) if float(scalar) else scaled

    def __matmul__(self, other):  # type: ignore[no-untyped-def]
        """A tensor, an operator, or another Kronecker product of fitting factors: (B B') (x) (A A')."""
        if (
            isinstance(other, KroneckerOperator)
            and self.B.shape[1] == other.B.shape[0]
            and self.A.shape[1] == other.A.shape[0]
            and (self.dtype, self.device) == (other.dtype, other.device)
        ):
            return KroneckerOperator(self.B @ other.B, self.A @ other.A)
        return super().__matmul__(other)

    def diagonal(self, chunk: int = 256) -> Tensor:
        """diag B (x) diag A, [n]; for square factors."""
        self._need_square_factors("the diagonal")
        return torch.outer(self.B.diagonal(), self.A.diagonal()).reshape(-1)

    def trace(self) -> Tensor:
        """tr B tr A."""
        self._need_square_factors("the trace")
        return self.B.trace() * self.A.trace()

    def frobenius_norm(self) -> Tensor:
        """||B||_F ||A||_F."""
        return self.B.square().sum().sqrt() * self.A.square().sum().sqrt()

    def singular_values(self) -> Tensor:
        """All products of singular values of the factors, descending [min(p, q) min(r, s)]."""
        products = torch.outer(torch.linalg.svdvals(self.B), torch.linalg.svdvals(self.A))
        return products.reshape(-1).sort(descending=True).values

    def spectral_norm(self) -> Tensor:
        """Largest singular value."""
        return self.singular_values()[0]

    def rank(self) -> int:
        """rank B * rank A."""
        return int(torch.linalg.matrix_rank(self.B)) * int(torch.linalg.matrix_rank(self.A))

    # what needs the eigenbases -------------------------------------------------------------------------------------

    def eigen(self) -> KroneckerEigen:
        """Eigendecomposition by factors: U_B, U_A and the products s[i, j] of their eigenvalues."""
        if self._eigen is None:
            if not self.symmetric:
                raise InputError(f"{self!r}: eigenvalues need symmetric factors B and A; see singular_values()")
            s_B, U_B = psd_eigh(self.B)
            s_A, U_A = psd_eigh(self.A)
            self._eigen = KroneckerEigen(U_B, U_A, torch.outer(s_B, s_A))
            in_B, in_A = (s > len(s) * torch.finfo(s.dtype).eps * s[0] for s in (s_B, s_A))
            self._eigen.known = in_B[:, None] & in_A  # a power leaves out what one factor knows by rounding alone
        return self._eigen

    def solve(self, v: Tensor, damping: float = 0.0, mode: str = "exact") -> Tensor:
        """(B (x) A + damping I)^-1 v for v [n] or [n, k], or with factored damping (see `damped_factors`)."""
        return self.inverse(damping, mode) @ check_tensor(v, "v")

    def inverse(self, damping: float = 0.0, mode: str = "exact") -> LinearOperator:
        """The damped inverse as an operator.

        mode "exact": eigenvalues 1 / (s_B s_A + damping), a KroneckerEigen.
        mode "factored": (B + sqrt(damping) / pi I)^-1 (x) (A + pi sqrt(damping) I)^-1, a KroneckerOperator.
        """
        if mode == "exact":
            return self.eigen().inverse(damping)
        B, A = self.damped_factors(damping, mode)
        inverses = []
        for name, factor in (("B", B), ("A", A)):
            values, U = psd_eigh(factor)
            if not values[-1] > len(values) * torch.finfo(factor.dtype).eps * values[0]:
                raise InputError(f"{self!r}: factor {name} is singular; give damping > 0")
            inverses.append((U / values) @ U.T)
        return KroneckerOperator(inverses[0], inverses[1])

    def damped_factors(self, damping: float, mode: str = "factored") -> tuple[Tensor, Tensor]:
        """B + sqrt(damping) / pi I and A + pi sqrt(damping) I with pi^2 = (tr A / d_in) / (tr B / d_out).

        Their product is not B (x) A + damping I: it has the cross terms in addition.
        """
        if mode not in MODES:
            raise InputError(f"mode must be one of {MODES}, not {mode!r}")
        damping = check_damping(damping)
        self._need_square_factors("damping")
        mean_A, mean_B = self.A.trace().item() / len(self.A), self.B.trace().item() / len(self.B)
        pi = math.sqrt(mean_A / mean_B) if mean_A > 0 and mean_B > 0 else 1.0
        root = math.sqrt(damping)
        return _shifted(self.B, root / pi), _shifted(self.A, root * pi)

    def power(self, exponent: float, cutoff: float = 0.0) -> KroneckerOperator:
        """B^e (x) A^e; for e < 0 a factor's eigenvalues up to `cutoff` times its largest are left out."""
        if not self.symmetric:
            raise InputError(f"{self!r}: powers need symmetric factors B and A")
        exponent, cutoff = check_number(exponent, "exponent"), check_number(cutoff, "cutoff")
        return KroneckerOperator(_matrix_power(self.B, exponent, cutoff), _matrix_power(self.A, exponent, cutoff))

    def sample(self, n: int, damping: float = 0.0, mode: str = "exact", seed: int = 0) -> Tensor:
        """n draws of N(0, (B (x) A + damping I)^-1), [n, size] row-major."""
        if mode == "exact":
            return self.eigen().sample(n, damping, seed)
        return KroneckerOperator(*self.damped_factors(damping, mode)).eigen().sample(n, 0.0, seed)

    def _need_square_factors(self, what: str) -> None:
        for name, factor in (("B", self.B), ("A", self.A)):
            if factor.shape[0] != factor.shape[1]:
                raise InputError(f"{what} of {self!r} needs square factors; {name} is {list(factor.shape)}")


def _shifted(factor: Tensor, shift: float) -> Tensor:
    return factor + shift * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)


def _matrix_power(factor: Tensor, exponent: float, cutoff: float) -> Tensor:
    values, U = psd_eigh(factor)
    floor = max(cutoff, len(values) * torch.finfo(factor.dtype).eps) * values[0]
    keep = values > floor if exponent < 0 else values >= 0
    powers = torch.where(keep, torch.where(keep, values, 1.0) ** exponent, 0.0)
    return (U * powers) @ U.T
