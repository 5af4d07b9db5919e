"""The protocol: a real linear map known by its products with blocks of vectors, and what is built from maps.

A subclass gives `_matmat(X [n, k]) -> [m, k]`, and `_rmatmat` where an adjoint exists and is not the operator itself.
Sums, products, multiples and adjoints are lazy: nothing is multiplied until the operator meets a vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, overload

import torch
from torch import Tensor

from biascope.linalg.spread import Spread, join, own, rows_of
from biascope.support.arguments import check_count
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import check_shape
from biascope.support.signatures import Rule

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

    from biascope.linalg.density import SpectralDensity


class LinearOperator:
    """A real linear map of shape (m, n).

    Args:
        shape: `(m, n)`.
        dtype: floating-point type of the vectors it takes and gives.
        device: where these vectors live.
        symmetric: the operator equals its adjoint. It is trusted, not checked.

    Example:
        >>> import torch
        >>> from biascope.linalg import aslinearoperator
        >>> A = aslinearoperator(torch.eye(3))
        >>> A + 0.5 * A
        <Sum 3x3 float32: Dense + 0.5 * Dense>
        >>> (A + 0.5 * A) @ torch.ones(3)
        tensor([1.5000, 1.5000, 1.5000])
    """

    spread: Spread | None = None  # how its vectors are spread over processes, if they are
    __array_ufunc__ = None  # numpy scalars then hand `x * A` over to __rmul__

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str, symmetric: bool = False
    ) -> None:
        m, n = check_shape(shape, "shape")
        if not dtype.is_floating_point:
            raise InputError(f"an operator needs a real floating-point dtype, not {dtype}; convert with .double()")
        if symmetric and m != n:
            raise InputError(f"a symmetric operator must be square, not {m}x{n}")
        self.shape = (m, n)
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors say it
        self.symmetric = symmetric

    # what a subclass gives ------------------------------------------------------------------------------------------

    def _matmat(self, X: Tensor) -> Tensor:
        """A X for X [n, k]; gives [m, k]."""
        raise NotImplementedError(f"{type(self).__name__} must define _matmat")

    def _rmatmat(self, Y: Tensor) -> Tensor:
        """A^T Y for Y [m, k]; gives [n, k]."""
        if self.symmetric:
            return self._matmat(Y)
        raise UnsupportedError(f"{self!r} has no adjoint: define _rmatmat, or pass symmetric=True if it equals its own")

    def _expression(self) -> str:
        """How the operator is written inside the repr of another."""
        return type(self).__name__

    # derived -------------------------------------------------------------------------------------------------------

    @property
    def has_adjoint(self) -> bool:
        """Whether `A.T @ y` works."""
        return self.symmetric or type(self)._rmatmat is not LinearOperator._rmatmat

    @property
    def T(self) -> LinearOperator:
        """The adjoint, [n, m]; the operator itself when symmetric."""
        return self if self.symmetric else Adjoint(self)

    @property
    def H(self) -> LinearOperator:
        """The adjoint; operators here are real, so `.H` is `.T`."""
        return self.T

    def adjoint(self) -> LinearOperator:
        """The adjoint, as `.T`."""
        return self.T

    def diagonal(self, chunk: int = 256) -> Tensor:
        """The exact diagonal [n] by n products with basis vectors, unless a subclass knows better."""
        check_square(self)
        products = ((start, join(self, self._matmat(E))) for start, E in self._identity(chunk))
        return torch.cat([P[start : start + P.shape[1]].diagonal() for start, P in products])

    def trace(self) -> Tensor:
        """The exact trace, a 0-dimensional tensor; see `hutchinson` for a cheap estimate."""
        return self.diagonal().sum()

    def spectral_density(
        self, probes: int = 8, steps: int = 64, seed: int = 0, reorthogonalise: bool = True, block: int = 1
    ) -> SpectralDensity:
        """All eigenvalues of a symmetric operator as a density, from `probes * steps` products.

        Args:
            probes: random vectors; the sampling error falls as 1 / sqrt(probes * n).
            steps: Lanczos steps, that is nodes per probe.
            seed: of the probes.
            reorthogonalise: keep all `steps * block` vectors, so that no eigenvalue is found twice. Without, three are
                kept; integrals hold, but an eigenvalue may have several nodes that share its weight.
            block: probes that are multiplied side by side.

        Example:
            >>> import torch
            >>> from biascope.linalg import aslinearoperator
            >>> A = aslinearoperator(torch.diag(torch.linspace(0, 1, 200).double()))
            >>> found = A.spectral_density(probes=4, steps=20)
            >>> abs(float(found.integrate(torch.square)) - 1 / 3) < 0.05
            True
        """
        from biascope.linalg.density import spectral_density

        return spectral_density(self, probes, steps, seed, reorthogonalise, block)

    def to_dense(self, chunk: int = 256) -> Tensor:
        """The matrix [m, n], made from blocks of `chunk` columns of the identity."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start, block in self._identity(chunk):
            dense[:, start : start + block.shape[1]] = join(self, self._matmat(block))
        return dense

    def to_scipy(self) -> ScipyOperator:
        """A `scipy.sparse.linalg.LinearOperator` over numpy vectors (float32 for half types, else the same dtype)."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        dtype = self.dtype if self.dtype in (torch.float32, torch.float64) else torch.float32

        def outside(product: Any) -> Any:
            def apply(x: Any) -> Any:
                block = torch.as_tensor(x.reshape(len(x), -1), dtype=self.dtype, device=self.device)
                y = product(block).detach().to("cpu", dtype).numpy()
                return y.reshape(-1) if x.ndim == 1 else y

            return apply

        forward = outside(self._matmat)
        backward = outside(self._rmatmat) if self.has_adjoint else None
        name = str(dtype).removeprefix("torch.")
        return ScipyOperator(self.shape, forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=name)

    def _identity(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        check_count(chunk, "chunk")
        n = self.shape[1]
        for start in range(0, n, chunk):
            width = min(chunk, n - start)
            block = torch.zeros(n, width, dtype=self.dtype, device=self.device)
            block[start : start + width].fill_diagonal_(1.0)
            yield start, own(self, block)

    def check_fits(self, x: Tensor) -> None:
        """Refuse a tensor that is neither a vector nor a block for this operator."""
        if x.ndim not in (1, 2) or x.shape[0] != rows_of(self) or x.dtype != self.dtype or x.device != self.device:
            n = rows_of(self)
            raise InputError(
                f"cannot multiply {self!r} by a {x.dtype} tensor of shape {list(x.shape)} on {x.device}: it takes a "
                f"vector [{n}] or a block [{n}, k] of {self.dtype} on {self.device}"
            )

    # the signs -----------------------------------------------------------------------------------------------------

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
    def __matmul__(self, other: Any) -> Tensor | LinearOperator:
        if isinstance(other, LinearOperator):
            return Product(self, other)
        if not isinstance(other, Tensor):
            return NotImplemented
        self.check_fits(other)
        return self._matmat(other.unsqueeze(1)).squeeze(1) if other.ndim == 1 else self._matmat(other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        """`x @ A` for x [m] or [k, m]."""
        if not isinstance(other, Tensor):
            return NotImplemented
        return self.T @ other if other.ndim == 1 else (self.T @ other.T).T

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, check_operator(other))

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, -check_operator(other))

    def __mul__(self, scalar: float) -> LinearOperator:
        return Scaled(_scalar(scalar), self)

    def __rmul__(self, scalar: float) -> LinearOperator:
        return self * scalar

    def __truediv__(self, scalar: float) -> LinearOperator:
        return self * (1.0 / _scalar(scalar))

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def __repr__(self) -> str:
        name, expression = type(self).__name__, self._expression()
        tail = "" if expression == name else f": {expression}"
        return f"<{name} {self.shape[0]}x{self.shape[1]} {str(self.dtype).removeprefix('torch.')}{tail}>"


class Adjoint(LinearOperator):
    """A^T of an operator that is not symmetric."""

    def __init__(self, base: LinearOperator) -> None:
        super().__init__((base.shape[1], base.shape[0]), base.dtype, base.device)
        self.base = base

    @property
    def T(self) -> LinearOperator:
        """The operator itself."""
        return self.base

    def _matmat(self, X: Tensor) -> Tensor:
        return self.base._rmatmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.base._matmat(Y)

    def _expression(self) -> str:
        return f"{_bracketed(self.base)}.T"


class Sum(LinearOperator):
    """A + B + ..., all of one shape."""

    def __init__(self, *terms: LinearOperator) -> None:
        first = terms[0]
        for term in terms[1:]:
            _check_pair(first, term, "add", term.shape == first.shape)
        super().__init__(first.shape, first.dtype, first.device, all(term.symmetric for term in terms))
        self.terms: tuple[LinearOperator, ...] = tuple(
            t for term in terms for t in (term.terms if isinstance(term, Sum) else (term,))
        )
        self.spread = next((term.spread for term in terms if term.spread is not None), None)

    @property
    def has_adjoint(self) -> bool:
        """Whether every term has one."""
        return all(term.has_adjoint for term in self.terms)

    def _matmat(self, X: Tensor) -> Tensor:
        total = self.terms[0]._matmat(X)
        for term in self.terms[1:]:
            total = total + term._matmat(X)
        return total

    def _rmatmat(self, Y: Tensor) -> Tensor:
        total = self.terms[0]._rmatmat(Y)
        for term in self.terms[1:]:
            total = total + term._rmatmat(Y)
        return total

    def diagonal(self, chunk: int = 256) -> Tensor:
        """Sum of the diagonals."""
        return torch.stack([term.diagonal(chunk) for term in self.terms]).sum(0)

    def _expression(self) -> str:
        return " + ".join(term._expression() for term in self.terms).replace("+ -", "- ")


class Product(LinearOperator):
    """A B ..., applied from the right."""

    def __init__(self, *factors: LinearOperator) -> None:
        self.factors: tuple[LinearOperator, ...] = tuple(
            f for factor in factors for f in (factor.factors if type(factor) is Product else (factor,))
        )
        for left, right in zip(self.factors, self.factors[1:]):
            _check_pair(left, right, "multiply", left.shape[1] == right.shape[0])
        first, last = self.factors[0], self.factors[-1]
        symmetric = all(_are_adjoint(f, g) for f, g in zip(self.factors, reversed(self.factors)))
        super().__init__((first.shape[0], last.shape[1]), first.dtype, first.device, symmetric)
        self.spread = last.spread

    @property
    def has_adjoint(self) -> bool:
        """Whether every factor has one."""
        return all(factor.has_adjoint for factor in self.factors)

    def _matmat(self, X: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            X = factor._matmat(X)
        return X

    def _rmatmat(self, Y: Tensor) -> Tensor:
        for factor in self.factors:
            Y = factor._rmatmat(Y)
        return Y

    def _expression(self) -> str:
        return " @ ".join(_bracketed(factor) for factor in self.factors)


class Scaled(LinearOperator):
    """c A for a number c."""

    def __init__(self, scale: float, base: LinearOperator) -> None:
        super().__init__(base.shape, base.dtype, base.device, base.symmetric)
        self.scale: float = scale * base.scale if isinstance(base, Scaled) else scale
        self.base: LinearOperator = base.base if isinstance(base, Scaled) else base
        self.spread = base.spread

    @property
    def has_adjoint(self) -> bool:
        """Whether the base has one."""
        return self.base.has_adjoint

    def _matmat(self, X: Tensor) -> Tensor:
        return self.scale * self.base._matmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.scale * self.base._rmatmat(Y)

    def diagonal(self, chunk: int = 256) -> Tensor:
        """The multiple of the diagonal."""
        return self.scale * self.base.diagonal(chunk)

    def _expression(self) -> str:
        body = _bracketed(self.base)
        return f"-{body}" if self.scale == -1 else f"{self.scale:g} * {body}"


def _bracketed(operator: LinearOperator) -> str:
    text = operator._expression()
    return f"({text})" if isinstance(operator, Sum | Product | Scaled) else text


def _are_adjoint(f: LinearOperator, g: LinearOperator) -> bool:
    """Whether f = g^T is known from the objects alone."""
    if f is g:
        return f.symmetric
    return (isinstance(f, Adjoint) and f.base is g) or (isinstance(g, Adjoint) and g.base is f)


def _check_pair(a: LinearOperator, b: LinearOperator, verb: str, shapes_fit: bool) -> None:
    if not shapes_fit or a.dtype != b.dtype or a.device != b.device:
        what = "one dtype and device are needed" if shapes_fit else "their shapes do not fit"
        raise InputError(f"cannot {verb} {a!r} on {a.device} and {b!r} on {b.device}: {what}")


def check_operator(A: Any, name: str = "A") -> LinearOperator:
    """Refuse what is no operator, and say how to make one of it."""
    if not isinstance(A, LinearOperator):
        raise InputError(f"{name}: an operator is needed, not {type(A).__name__}: wrap it with aslinearoperator(...)")
    return A


def check_square(A: Any, name: str = "A") -> LinearOperator:
    """Refuse what is no square operator."""
    if check_operator(A, name).shape[0] != A.shape[1]:
        raise InputError(f"{name}: a square operator is needed, not {A!r}")
    return check_operator(A)


def check_symmetric(A: Any, name: str = "A") -> LinearOperator:
    """Refuse what no eigensolver here takes."""
    if not check_operator(A, name).symmetric or A.dtype not in (torch.float32, torch.float64):
        raise InputError(f"{name}: {A!r} is not marked symmetric (symmetric=True) or not in float32 or float64")
    return check_operator(A)


Operator = Annotated[LinearOperator, Rule(check_operator, "an operator")]
SquareOperator = Annotated[LinearOperator, Rule(check_square, "a square operator")]
SymmetricOperator = Annotated[LinearOperator, Rule(check_symmetric, "a symmetric operator")]


def _scalar(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"an operator is multiplied by a finite number, not a {type(value).__name__}; use @ for maps")
    return number
