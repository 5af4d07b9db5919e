"""The simplest operators: a matrix, a diagonal, the identity, a function."""

from collections.abc import Callable

import torch
from torch import Tensor

from biascope.linalg.operator import LinearOperator, check_square
from biascope.support.arguments import check_count
from biascope.support.errors import InputError
from biascope.support.limits import Matrix, Vector
from biascope.support.signatures import checked


class Dense(LinearOperator):
    """A matrix [m, n] as an operator; not copied.

    `symmetric` None finds out whether it equals its transpose up to rounding.
    """

    @checked
    def __init__(self, matrix: Matrix, symmetric: bool | None = None) -> None:
        if symmetric is None:
            symmetric = is_symmetric(matrix)
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device, symmetric)
        self.matrix = matrix

    def _matmat(self, X: Tensor) -> Tensor:
        return self.matrix @ X

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.matrix.T @ Y

    def diagonal(self, chunk: int = 256) -> Tensor:
        """Read off the matrix."""
        check_square(self)
        return self.matrix.diagonal().clone()

    def to_dense(self, chunk: int = 256) -> Tensor:
        """A copy of the matrix, whatever the chunk."""
        check_count(chunk, "chunk")
        return self.matrix.clone()


class Diagonal(LinearOperator):
    """diag(d) for a vector d [n]."""

    @checked
    def __init__(self, values: Vector) -> None:
        super().__init__((len(values), len(values)), values.dtype, values.device, symmetric=True)
        self.values = values

    def _matmat(self, X: Tensor) -> Tensor:
        return self.values.unsqueeze(1) * X

    def diagonal(self, chunk: int = 256) -> Tensor:
        """A copy of d."""
        return self.values.clone()


class Identity(LinearOperator):
    """The identity of size n."""

    def __init__(self, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        super().__init__((n, n), dtype, device, symmetric=True)

    def _matmat(self, X: Tensor) -> Tensor:
        return X.clone()

    def diagonal(self, chunk: int = 256) -> Tensor:
        """Ones."""
        return torch.ones(self.shape[0], dtype=self.dtype, device=self.device)


class FromFunction(LinearOperator):
    """An operator given by functions on blocks: `matmat(X [n, k]) -> [m, k]`, and `rmatmat` for the adjoint.

    Autograd is switched on around the functions, since they may differentiate.
    """

    def __init__(
        self,
        matmat: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rmatmat: Callable[[Tensor], Tensor] | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__(shape, dtype, device, symmetric)
        self.matmat, self.rmatmat = matmat, rmatmat

    @property
    def has_adjoint(self) -> bool:
        """Whether `rmatmat` was given or the operator is symmetric."""
        return self.symmetric or self.rmatmat is not None

    def _matmat(self, X: Tensor) -> Tensor:
        return self._apply(self.matmat, X, self.shape[0])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return super()._rmatmat(Y) if self.rmatmat is None else self._apply(self.rmatmat, Y, self.shape[1])

    def _apply(self, function: Callable[[Tensor], Tensor], X: Tensor, rows: int) -> Tensor:
        with torch.enable_grad():
            Y = function(X)
        if Y.shape != (rows, X.shape[1]):
            raise InputError(
                f"the function behind {self!r} got a block {list(X.shape)} and gave {list(Y.shape)} instead of "
                f"[{rows}, {X.shape[1]}]"
            )
        return Y

    def _expression(self) -> str:
        name = getattr(self.matmat, "__name__", type(self.matmat).__name__)
        return f"FromFunction({name})"


def aslinearoperator(
    A: Tensor | LinearOperator | Callable[[Tensor], Tensor],
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rmatmat: Callable[[Tensor], Tensor] | None = None,
    symmetric: bool | None = None,
) -> LinearOperator:
    """Make an operator of a matrix [m, n], of a function on blocks (then give its shape), or leave one as it is.

    Args:
        A: matrix, operator, or function X [n, k] -> [m, k].
        shape: (m, n), needed for a function only.
        dtype: of the vectors, for a function only.
        device: of the vectors, for a function only.
        rmatmat: the adjoint function Y [m, k] -> [n, k], for a function only.
        symmetric: None compares a matrix with its transpose, and means False for a function.
    """
    if isinstance(A, LinearOperator):
        return A
    if callable(A) and shape is not None:
        return FromFunction(A, shape, dtype, device, rmatmat, bool(symmetric))
    if callable(A):
        raise InputError("aslinearoperator: a function needs shape=(m, n)")
    return Dense(A, symmetric)


def is_symmetric(matrix: Tensor) -> bool:
    """Whether a matrix equals its transpose up to rounding of its dtype."""
    if matrix.shape[0] != matrix.shape[1] or not matrix.dtype.is_floating_point:
        return False
    if matrix.numel() == 0:
        return True
    matrix = matrix.detach()
    low, high = matrix.aminmax()
    slack = 16 * torch.finfo(matrix.dtype).eps * high.abs().maximum(low.abs())
    rows = range(0, len(matrix), 1024)  # by strips: no second matrix in memory
    return all(bool(((matrix[i : i + 1024] - matrix[:, i : i + 1024].T).abs() <= slack).all()) for i in rows)
