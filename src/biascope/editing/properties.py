"""Why tasks do or do not interfere: leakage in the tangent space, localised eigenfunctions, the vectors themselves."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.editing.interference import predicted_class
from biascope.editing.plane import Output, Plane, chunks, coefficients, mean_and_error, per_task
from biascope.editing.vectors import TaskVector
from biascope.kernels import local_energy, ntk
from biascope.kernels.eigenfunctions import LocalEnergy
from biascope.support.errors import InputError
from biascope.support.inputs import batch_size as size_of
from biascope.support.inputs import gather
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts, grid, number, one_line
from biascope.tangent.linearized import linearize


@dataclass(frozen=True)
class Leakage:
    """values [T, T]: row s, column t: E_{x ~ mu_s} ||J(x) tau_t||, what task t's vector does to task s's inputs.

    Off the diagonal all zero: the tangent model has task arithmetic. standard_errors [T, T], over examples.
    """

    tasks: tuple[str, ...]
    values: Tensor
    standard_errors: Tensor = field(repr=False)
    __repr__ = one_line

    @checked
    def xi(self, alphas: Sequence[float] | Tensor) -> Tensor:
        """The disentanglement error of the tangent model of two tasks with the L2 distance, in closed form: [A, A]."""
        if len(self.tasks) != 2:
            raise InputError(f"the closed form is for two tasks, not {len(self.tasks)}")
        size = torch.tensor(coefficients(alphas), dtype=torch.float64, device="cpu").abs()
        return size[None, :] * self.values[0, 1] + size[:, None] * self.values[1, 0]

    def _repr_html_(self) -> str:
        """The matrix, for notebooks."""
        cells = zip(self.tasks, self.values.tolist(), self.standard_errors.tolist())
        rows = [(task, *map(number, means, errors)) for task, means, errors in cells]
        return grid("Leakage E||J tau||", ["inputs of", *(f"vector of {t}" for t in self.tasks)], rows)


@checked
@without_autocast()
def leakage(
    model: nn.Module,
    vectors: Mapping[str, TaskVector],
    data: Mapping[str, Any],
    *,
    output: Output | None = None,
    batch_size: int = 256,
) -> Leakage:
    """How far every task vector moves the tangent model's outputs on every task's inputs.

    One product J tau per vector and example. This matrix contains all of the tangent model's L2 disentanglement error
    of two tasks (`Leakage.xi`), so it shows before any merge which pairs will disturb one another.

    Args:
        model: the network at theta0, in eval mode.
        vectors: {task: task vector}.
        data: {task: inputs}, as in `disentanglement`.
        output: how to get a tensor [n, ...] from what the model returns.
        batch_size: most examples in one pass.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> tau = {k: TaskVector.from_tensors({"weight": row[None]}) for k, row in zip("ab", torch.eye(2))}
        >>> leakage(net, tau, {"a": torch.tensor([[2.0, 0.0]]), "b": torch.tensor([[1.0, 3.0]])}).values
        tensor([[2., 0.],
                [1., 3.]], dtype=torch.float64)
    """
    names = tuple(vectors)
    data = per_task(data, names, "data")
    plane = Plane(model, vectors, output, batch_size, rows=False)
    T = len(names)
    means, errors = torch.zeros(2, T, T, dtype=torch.float64, device="cpu")
    for s, task in enumerate(names):
        pieces = chunks(data[task], f"data[{task!r}]", batch_size)
        for t, slope in enumerate(plane.slopes(pieces)):
            means[s, t], errors[s, t] = mean_and_error(torch.linalg.vector_norm(slope.double(), dim=1))
    return Leakage(names, means, errors)


@dataclass(frozen=True)
class Localisation:
    """Local energy of the tangent kernel's eigenfunctions on task and control inputs.

    energy: per point, task first. task, control: (mean, standard error over points). Localised: 1 and 0; not at all,
    with equal numbers of points and full rank: 0.5 and 0.5. With equal numbers both means add up to rank / points.
    """

    energy: LocalEnergy = field(repr=False)
    task: tuple[float, float]
    control: tuple[float, float]
    points: int  # of the task: the largest rank

    @property
    def rank(self) -> int | tuple[int, ...]:
        """Eigenfunctions that were summed; of several outputs, of each."""
        return self.energy.rank

    @property
    def contrast(self) -> float:
        """Mean on the task minus mean on the control."""
        return self.task[0] - self.control[0]

    def _repr_html_(self) -> str:
        """The two means and the rank, for notebooks."""
        ranks = sorted(set(_ranks(self.energy)))
        shown = f"{' to '.join(str(r) for r in dict.fromkeys((ranks[0], ranks[-1])))} of {self.points}"
        return grid("Local energy", ["task", "control", "rank"], [(number(*self.task), number(*self.control), shown)])


@checked
@without_autocast()
def localisation(
    model: nn.Module,
    task: Any,
    control: Any,
    *,
    outputs: int | Literal["diagonal"] = "diagonal",
    rank: int | None = None,
    precision: Literal["float64", "float32", "tf32", "bf16"] = "float64",
    **options: Any,
) -> Localisation:
    """Do the eigenfunctions that represent a task live on its own inputs? E_loc(x) = sum_rho phi_rho(x)^2.

    The right singular vectors of K(task, task and control); see `biascope.kernels.local_energy`. All count the same,
    whatever their singular value, so the kernel is made in float64: in float32 those below n eps of the largest, which
    for a network can be a good part of them, count as rounding and are cut. With all of them and equally many points
    the two means add up to 1; where the rank is below the number of task points they do not, and a warning says so.

    Args:
        model: the network at theta0.
        task: inputs of the task, [n, ...]; the paper takes 200.
        control: inputs of another one, as many for the simple reading.
        outputs: "diagonal" (one kernel per output, averaged in the means) or an output's index.
        rank: how many eigenfunctions; all above rounding if None.
        precision: of `bs.ntk`: "float64" or "float32"; "tf32" and "bf16" only with a rank.
        options: of `bs.ntk` (strategy, max_memory, params, ...).

    Example:
        >>> net = nn.Linear(4, 1, bias=False)
        >>> x = torch.eye(4)
        >>> localisation(net, x[:2], x[2:]).task[0], localisation(net, x[:2], x[2:]).contrast
        (1.0, 1.0)
    """
    if rank is None and precision in {"tf32", "bf16"}:
        raise InputError(f"precision={precision!r}: its rounding would count as eigenfunctions; give the rank")
    x, z = gather(task, "task"), gather(control, "control")
    both = gather([x, z], "task and control")
    n = size_of(x)
    energy = local_energy(ntk(model, x, both, outputs=outputs, precision=precision, **options), rank)
    if rank is None and min(_ranks(energy)) < n:
        dependent = "their gradients are linearly dependent: equal inputs, few parameters, or one linear region"
        why = (
            dependent
            if precision == "float64"
            else f"below the bound on the rounding of {precision}: use precision='float64'"
        )
        warnings.warn(
            f"the kernel of {n} task points has {min(_ranks(energy))} eigenfunctions above rounding ({why}): the local "
            f"energies add up to that and not to {n}. Compare with others of the same rank only, given by rank=",
            stacklevel=4,
        )
    values = energy.values.reshape(-1, energy.values.shape[-1]).mean(0)
    return Localisation(energy, mean_and_error(values[:n]), mean_and_error(values[n:]), n)


@dataclass(frozen=True)
class Linearity:
    """How well the tangent model predicts the fine-tuned network on some inputs.

    residual: ||f(theta*) - f_lin(theta*)|| / ||f_lin(theta*) - f(theta0)||, 0 if fine-tuning was linear. agreement:
    (share of equal predictions, standard error).
    """

    residual: float
    agreement: tuple[float, float]

    def _repr_html_(self) -> str:
        """Both numbers, for notebooks."""
        return facts("Tangent model against network", {"residual": self.residual, "agreement": number(*self.agreement)})


@checked
@without_autocast()
def linearity(
    model: nn.Module, vector: TaskVector, data: Any, *, output: Output | None = None, batch_size: int = 256
) -> Linearity:
    """Was this fine-tuning linear? f(theta0 + tau) against f_lin(theta0 + tau) on some inputs.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> found = linearity(net, TaskVector(net, nn.Linear(2, 3)), torch.randn(5, 2))
        >>> found.residual < 1e-5, found.agreement[0]
        (True, 1.0)
    """
    pieces = chunks(data, "data", batch_size)
    plain = Plane(model, {"task": vector}, output, batch_size).on(pieces)
    tangent = Plane(linearize(model, params="all"), {"task": vector}, output, batch_size).on(pieces)
    start, curved, straight = plain([0.0]), plain([1.0]), tangent([1.0])
    moved = float(torch.linalg.vector_norm((straight - start).double()))
    wrong = float(torch.linalg.vector_norm((curved - straight).double()))
    same = (predicted_class(curved) == predicted_class(straight)).double()
    return Linearity(wrong / moved if moved else float("nan"), mean_and_error(same))


def _ranks(energy: LocalEnergy) -> tuple[int, ...]:
    return energy.rank if isinstance(energy.rank, tuple) else (energy.rank,)
