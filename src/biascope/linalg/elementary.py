"""The simplest operators: a matrix, a diagonal, the identity, a low-rank square, a function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from biascope.arguments import as_whole, check_tensor
from biascope.errors import InputError
from biascope.linalg.operator import LinearOperator, check_chunk


class Dense(LinearOperator):
    """A matrix [m, n] as an operator.

    Args:
        matrix: [m, n]; not copied.
        symmetric: True or False; None (the default) looks whether it equals its transpose up to rounding.

    Example:
        >>> import torch
        >>> Dense(torch.ones(2, 2)).symmetric
        True
    """

    def __init__(self, matrix: Tensor, symmetric: bool | None = None) -> None:
        if check_tensor(matrix, "matrix").ndim != 2:
            raise InputError(f"Dense needs a matrix [m, n], not a tensor of shape {list(matrix.shape)}")
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
        self._need_square("a diagonal")
        return self.matrix.diagonal().clone()

    def to_dense(self, chunk: int = 256) -> Tensor:
        """A copy of the matrix, whatever the chunk."""
        check_chunk(chunk)
        return self.matrix.clone()


class Diagonal(LinearOperator):
    """diag(d) for a vector d [n].

    Example:
        >>> import torch
        >>> Diagonal(torch.tensor([1.0, 2.0])) @ torch.ones(2)
        tensor([1., 2.])
    """

    def __init__(self, values: Tensor) -> None:
        if check_tensor(values, "values").ndim != 1:
            raise InputError(f"Diagonal needs a vector [n], not a tensor of shape {list(values.shape)}")
        super().__init__((len(values), len(values)), values.dtype, values.device, symmetric=True)
        self.values = values

    def _matmat(self, X: Tensor) -> Tensor:
        return self.values.unsqueeze(1) * X

    def diagonal(self, chunk: int = 256) -> Tensor:
        """A copy of d."""
        return self.values.clone()


class Identity(LinearOperator):
    """The identity of size n.

    Example:
        >>> Identity(3).to_dense().trace().item()
        3.0
    """

    def __init__(self, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        size = as_whole(n, "n")
        super().__init__((size, size), dtype, device, symmetric=True)

    def _matmat(self, X: Tensor) -> Tensor:
        return X.clone()

    def diagonal(self, chunk: int = 256) -> Tensor:
        """Ones."""
        return torch.ones(self.shape[0], dtype=self.dtype, device=self.device)


class LowRank(LinearOperator):
    """U diag(s) U^T for U [n, r] and s [r] (ones if not given); U need not be orthonormal.

    Example:
        >>> import torch
        >>> LowRank(torch.ones(3, 1)) @ torch.ones(3)
        tensor([3., 3., 3.])
    """

    def __init__(self, U: Tensor, s: Tensor | None = None) -> None:
        if check_tensor(U, "U").ndim != 2:
            raise InputError(f"LowRank needs U [n, r], not a tensor of shape {list(U.shape)}")
        if s is None:
            s = torch.ones(U.shape[1], dtype=U.dtype, device=U.device)
        if check_tensor(s, "s").shape != (U.shape[1],) or s.dtype != U.dtype or s.device != U.device:
            raise InputError(
                f"LowRank: U {list(U.shape)} {U.dtype} {U.device} needs s [{U.shape[1]}] alike, "
                f"not {list(s.shape)} {s.dtype} {s.device}"
            )
        super().__init__((U.shape[0], U.shape[0]), U.dtype, U.device, symmetric=True)
        self.U, self.s = U, s

    def _matmat(self, X: Tensor) -> Tensor:
        return self.U @ (self.s.unsqueeze(1) * (self.U.T @ X))

    def diagonal(self, chunk: int = 256) -> Tensor:
        """Row sums of U^2 s."""
        return self.U.square() @ self.s


class FromFunction(LinearOperator):
    """An operator given by functions on blocks: `matmat(X [n, k]) -> [m, k]`, and `rmatmat` for the adjoint.

    Autograd is switched on around the functions, since they may differentiate.

    Example:
        >>> import torch
        >>> FromFunction(lambda X: X.flip(0), (2, 2), symmetric=True) @ torch.tensor([1.0, 2.0])
        tensor([2., 1.])
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
        return self._checked(self.matmat, X, self.shape[0])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return super()._rmatmat(Y) if self.rmatmat is None else self._checked(self.rmatmat, Y, self.shape[1])

    def _checked(self, function: Callable[[Tensor], Tensor], X: Tensor, rows: int) -> Tensor:
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
        symmetric: None looks (matrix) or means False (function).

    Example:
        >>> import torch
        >>> aslinearoperator(torch.eye(2))
        <Dense 2x2 float32>
        >>> aslinearoperator(lambda X: 2 * X, shape=(4, 4), symmetric=True) @ torch.ones(4)
        tensor([2., 2., 2., 2.])
    """
    if isinstance(A, LinearOperator):
        return A
    if isinstance(A, Tensor):
        return Dense(A, symmetric)
    if callable(A):
        if shape is None:
            raise InputError("aslinearoperator: a function needs shape=(m, n)")
        return FromFunction(A, shape, dtype, device, rmatmat, bool(symmetric))
    raise InputError(f"aslinearoperator takes a tensor, an operator or a function, not {type(A).__name__}")


def is_symmetric(matrix: Tensor) -> bool:
    """Whether a matrix equals its transpose up to rounding of its dtype.

    Example:
        >>> import torch
        >>> is_symmetric(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
        False
    """
    check_tensor(matrix, "matrix")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.dtype.is_floating_point:
        return False
    if matrix.numel() == 0:
        return True
    matrix = matrix.detach()
    slack = 16 * torch.finfo(matrix.dtype).eps * matrix.aminmax().max.abs().maximum(matrix.aminmax().min.abs())
    rows = range(0, len(matrix), 1024)  # by strips: no second matrix in memory
    return all(bool(((matrix[i : i + 1024] - matrix[:, i : i + 1024].T).abs() <= slack).all()) for i in rows)
