"""One Jacobian, two spectra: eigenpairs of the metric F = J^T J / n from the kernel K = J J^T and back.

F and K / n have the same non-zero eigenvalues; F v = lambda v and K u = n lambda u with v = J^T u / sqrt(n lambda) and
u = J v / sqrt(n lambda). The smaller of the two matrices is decomposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.kernels.empirical import ntk
from biascope.kernels.pullback import add_pulled, no_vectors
from biascope.kernels.system import system
from biascope.linalg import FromFunction, eigsh, psd_eigh
from biascope.linalg.resolved import resolved
from biascope.network.functional import Params, ParamSelection
from biascope.network.jacobian import Jacobian
from biascope.support.errors import InputError
from biascope.support.inputs import batch_size
from biascope.support.precision import arithmetic
from biascope.support.signatures import checked
from biascope.support.tables import facts, one_line, several

DENSE = 4000  # matrices up to this size are formed and decomposed; larger ones are reached by products


@dataclass(frozen=True)
class MetricEigenpairs:
    """Eigenpairs of F = J^T J / n, the average over examples of the metric J(x)^T J(x), largest first.

    Attributes:
        values: [k] eigenvalues of F; those of K are n times these.
        vectors: [p, k] parameter-space eigenvectors, orthonormal, in the order of the parameters.
        functions: [n * c, k] eigenvectors of K, orthonormal, examples major.
        side: what was decomposed: "kernel" or "metric".
        n: number of examples.
        shapes: {parameter: shape}.
    """

    values: Tensor
    vectors: Tensor
    functions: Tensor
    side: str
    n: int
    shapes: dict[str, torch.Size]
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """The head of the spectrum, for notebooks."""
        rows = {"parameters": len(self.vectors), "eigenpairs": len(self.values), "decomposed": self.side}
        return facts(f"Metric on {self.n} examples", rows | {"leading eigenvalues": several(self.values)})

    @checked
    def vector(self, j: int) -> Params:
        """Eigenvector j as {parameter: tensor}."""
        parts = torch.split(self.vectors[:, j], [s.numel() for s in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}


@checked
def metric_eigenpairs(
    model: nn.Module | Jacobian,
    x: Any = None,
    k: int | None = None,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    *,
    precision: str = "float32",
    side: Literal["auto", "kernel", "metric"] = "auto",
    seed: int = 0,
) -> MetricEigenpairs:
    """Eigenpairs of the parameter-space metric and of the kernel, from whichever side is smaller.

    Args:
        model: a module (then x is needed), or a Jacobian.
        x: the examples, the same in the same order at every pass: a DataLoader that shuffles is refused.
        k: how many of the largest; all with a non-zero eigenvalue if None.
        params: which parameters to differentiate.
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        side: "auto", "kernel" or "metric".
        seed: of the Lanczos start, used where the smaller side has more than 4000 rows (k is needed then).

    Example:
        >>> pairs = metric_eigenpairs(nn.Linear(3, 1, bias=False), torch.eye(3)[:2] * 2)
        >>> pairs.values, pairs.side
        (tensor([2., 2.], dtype=torch.float64), 'kernel')
    """
    if isinstance(model, Jacobian) != (x is None):
        raise InputError("x is needed with a module; a Jacobian has its examples already: leave x out")
    J = model if isinstance(model, Jacobian) else Jacobian(model, x, params, output, precision, batch_size=256)
    N, p = J.shape
    side = ("metric" if p < N else "kernel") if side == "auto" else side
    size = N if side == "kernel" else p
    if size > DENSE and (k is None or k > size // 3):
        raise InputError(f"the {side} has size {size}: say how many eigenpairs are wanted, k <= {size // 3}")
    with arithmetic("float64" if J.dtype == torch.float64 else "float32"):
        values, left = _leading(J, side, k, seed) if k and size > DENSE else _whole(J, side)
        floor = size * torch.finfo(J.dtype).eps * float(values[0])
        rank = int((values > floor).sum())
        if k is not None and not 1 <= k <= rank:
            raise InputError(f"k={k}: there are {rank} eigenvalues that are not zero; the others have no dual vectors")
        k = rank if k is None else k
        values, left = values[:k], left[:, :k]
        right = _pull(J, left) if side == "kernel" else J._matmat(left.to(J.dtype)).double()
        right = right / values.sqrt()
    vectors, functions = (right, left) if side == "kernel" else (left, right)
    shapes = {name: q.shape for name, q in J.f.params.items()}
    return MetricEigenpairs(values / J.n, vectors, functions, side, J.n, shapes)


def _leading(J: Jacobian, side: str, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """The k leading eigenpairs of J J^T or J^T J (no 1 / n) by Lanczos, float64; refused where not all are resolved."""
    size = J.shape[0] if side == "kernel" else J.shape[1]
    both = (lambda X: J._matmat(J._rmatmat(X))) if side == "kernel" else (lambda X: J._rmatmat(J._matmat(X)))
    A = FromFunction(both, (size, size), dtype=J.dtype, device=J.device, symmetric=True)
    double = J.dtype == torch.float64
    pairs = eigsh(A, k, tol=1e-12 if double else 1e-6, seed=seed)
    found = resolved(pairs.values, pairs.residuals)
    if not bool(found.all()):
        first = int(found.long().cumprod(0).sum())
        remedy = f"ask for k={first}" + ("" if double else ", or use precision='float64'")
        raise InputError(f"Lanczos resolved {first} of {k} eigenpairs, the others are too small beside them; {remedy}")
    return pairs.values.double(), pairs.vectors.double()


def _whole(J: Jacobian, side: str) -> tuple[Tensor, Tensor]:
    """All eigenpairs of J J^T or J^T J (no 1 / n), descending, float64."""
    if side == "kernel":
        how: dict[str, Any] = {"precision": "float64" if J.dtype == torch.float64 else "float32"}
        sys = system(ntk(J.f.module, J.data, params=list(J.f.params), output=J.f.output, **how))
        return sys.values, sys.vectors
    F = torch.zeros(J.shape[1], J.shape[1], dtype=torch.float64, device=J.device)
    eye = torch.eye(J.c, dtype=J.dtype, device=J.device)
    for part in J.stream.parts():
        rows = J._dense(part.inputs, eye[:, None].expand(J.c, batch_size(part.inputs), J.c)).flatten(0, 1).double()
        F += rows.mT @ rows
    return psd_eigh(F)


def _pull(J: Jacobian, U: Tensor) -> Tensor:
    """J^T U [p, k], one forward pass per batch."""
    cot = U.mT.reshape(U.shape[1], J.n, J.c)
    pulled = no_vectors(J.f, U.shape[1])
    for part in J.stream.parts():
        add_pulled(pulled, J.f, part, cot[:, part.at])
    return pulled.mT
