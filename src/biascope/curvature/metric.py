"""One interface for every representation of a parameter-space metric."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.pieces import Mode, ParameterSpace
from biascope.curvature.plan import Plan
from biascope.linalg import cg, eigsh, hutchinson
from biascope.linalg.conjugate_gradients import damped
from biascope.linalg.lanczos import Eigenpairs
from biascope.linalg.operator import LinearOperator
from biascope.linalg.resolved import resolved, warn_unresolved
from biascope.linalg.spread import Spread, total
from biascope.linalg.trace import SampledEstimate, diagonal, frobenius_norm_squared
from biascope.network.shards import dtensor, is_sharded, local
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.signatures import checked
from biascope.support.tables import facts

Vector = Any  # a dict {name: tensor}, a flat vector [p] or a block [p, k]


class Metric(LinearOperator):
    """A symmetric matrix on parameter space, known in one of nine representations.

    Vectors go in and come out in the same form: {name: tensor}, flat [p], or a block [p, k]. Flat vectors follow the
    model's parameter order, weights row by row.

    Attributes:
        space: names and shapes of the parameters.
        plan: what every parameter got, and why.
        info: likelihood, number of examples, seed of the sampled labels.
    """

    def __init__(self, space: ParameterSpace, plan: Plan, info: dict[str, Any], symmetric: bool = True) -> None:
        super().__init__((space.size, space.size), space.dtype, space.device, symmetric)
        self.space, self.plan, self.info = space, plan, info

    @property
    def representation(self) -> str:
        """Its name, such as "ekfac"."""
        return self.plan.representation

    def _kinds(self) -> str:
        kinds: dict[str, int] = {}
        for name, _, kind, _ in self.plan.rows:
            kinds[kind] = kinds.get(kind, 0) + self.space.numel((name,))
        return ", ".join(f"{kind} {count}" for kind, count in kinds.items())

    def __repr__(self) -> str:
        parts = self._kinds()
        return f"<{self.info.get('what', 'metric')} {self.representation} {self.shape[0]}x{self.shape[1]}: {parts}>"

    def _repr_html_(self) -> str:
        """What it is of and what it is made of, for notebooks; the trace where it costs nothing."""
        rows: dict[str, object] = {"matrix": f"{self.shape[0]} x {self.shape[1]}", "parameters": self._kinds()}
        if self.representation != "implicit":
            rows["trace"] = float(self.trace())
        rows |= {name: value for name, value in self.info.items() if isinstance(value, str | int | float)}
        rows |= {"numbers": f"{str(self.dtype).removeprefix('torch.')} on {self.device}"}
        return facts(f"{self.info.get('what', 'metric')}, {self.representation}", rows)

    def _expression(self) -> str:
        return f"{self.info.get('what', 'metric')}[{self.representation}]"

    def _columns(self, v: Vector, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """v as [p, k] (or this process's entries of it) and how to give a result back in v's form."""
        if self.spread is not None:
            return self._parts(v, self.spread, what)
        if isinstance(v, dict):
            return self.space.flatten(v)[:, None], lambda X: self.space.unflatten(X[:, 0])
        p, here = self.shape[0], (self.dtype, self.device)
        if not isinstance(v, Tensor) or v.dim() not in (1, 2) or v.shape[0] != p or (v.dtype, v.device) != here:
            got = f"{list(v.shape)} {v.dtype} on {v.device}" if isinstance(v, Tensor) else type(v).__name__
            forms = f"a dict, flat [{p}] or a block [{p}, k], {self.dtype} on {self.device}"
            raise InputError(f"{what}: v must be {forms}, got {got}")
        v = v.detach().as_subclass(Tensor)
        return (v[:, None], lambda X: X[:, 0]) if v.dim() == 1 else (v, lambda X: X)

    def _parts(self, v: Vector, spread: Spread, what: str) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Where vectors are spread over processes: a dict of DTensors, this process's entries, or what is whole."""
        if isinstance(v, dict) and v and all(map(is_sharded, v.values())):
            if set(v) != set(self.space.shapes):
                raise InputError(f"{what}: a dict of DTensors must have all {len(self.space.shapes)} parameters")
            flat = torch.cat([local(v[name]).detach().reshape(-1).to(self.dtype) for name in self.space.shapes])

            def back(X: Tensor) -> Any:
                parts = torch.split(X[:, 0], [local(v[name]).numel() for name in self.space.shapes])
                return {name: dtensor(part, v[name]) for name, part in zip(self.space.shapes, parts, strict=True)}

            return flat[:, None], back
        here = isinstance(v, Tensor) and v.dim() in (1, 2) and v.shape[0] == spread.rows
        if here and (v.dtype, v.device) == (self.dtype, self.device):
            v = v.detach().as_subclass(Tensor)
            return (v[:, None], lambda X: X[:, 0]) if v.dim() == 1 else (v, lambda X: X)
        if isinstance(v, dict):
            whole = self.space.flatten(v)[:, None]
            return spread.own(whole), lambda X: self.space.unflatten(spread.join(X)[:, 0])
        p = self.shape[0]
        if not isinstance(v, Tensor) or v.dim() not in (1, 2) or v.shape[0] != p or v.dtype != self.dtype:
            got = f"{list(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
            forms = f"a dict (of DTensors), this process's entries [{spread.rows}] or the whole [{p}], {self.dtype}"
            raise InputError(f"{what}: v must be {forms}, got {got}")
        v = v.detach().as_subclass(Tensor)
        if v.dim() == 1:
            return spread.own(v[:, None]), lambda X: spread.join(X)[:, 0]
        return spread.own(v), spread.join

    def __matmul__(self, v: Any) -> Any:
        """F @ v in v's own form; F @ G for two metrics."""
        if isinstance(v, LinearOperator):
            return LazyMetric(self, super().__matmul__(v))
        X, back = self._columns(v, "F @ v")
        return back(self._matmat(X))

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return LazyMetric(self, super().__add__(other))

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return LazyMetric(self, super().__sub__(other))

    def __mul__(self, scalar: float) -> LinearOperator:
        return LazyMetric(self, super().__mul__(scalar))

    @checked
    def quadratic_form(self, v: Vector) -> Tensor:
        """v^T F v: a number, or [k] for a block."""
        X, _ = self._columns(v, "quadratic_form")
        out = total(self, (X * self._matmat(X)).sum(0))
        return out if isinstance(v, Tensor) and v.dim() == 2 else out[0]

    def frobenius_norm(self) -> Tensor:
        """||F||_F; a representation that can only estimate it warns, with the standard error."""
        found = self.estimate_frobenius_norm()
        if bool(found.standard_error > 0):  # few parameters: every one was asked
            warnings.warn(
                f"||F||_F of representation={self.representation!r} is an estimate, {float(found.value):.4g} +- "
                f"{float(found.standard_error):.2g} from {found.samples} random vectors; estimate_frobenius_norm "
                "gives both numbers",
                stacklevel=2,
            )
        return found.value.to(self.dtype)

    def spectral_norm(self) -> Tensor:
        """Largest |eigenvalue|, by Lanczos unless the representation knows it."""
        return eigsh(self, 1, which="LM").values[0].abs()

    @checked
    def estimate_trace(self, samples: int = 64, seed: int = 0) -> SampledEstimate:
        """tr F by random products, with its standard error."""
        return hutchinson(self, samples, seed=seed)

    @checked
    def estimate_diagonal(self, samples: int = 64, seed: int = 0) -> SampledEstimate:
        """Diagonal [p] by random products, with its standard errors."""
        return diagonal(self, samples, seed=seed)

    @checked
    def estimate_frobenius_norm(self, samples: int = 64, seed: int = 0) -> SampledEstimate:
        """||F||_F by random products, with its standard error (by the delta method)."""
        e = frobenius_norm_squared(self, samples, seed=seed)
        value = e.value.sqrt()
        return SampledEstimate(value, e.standard_error / (2 * value), e.samples, e.matvecs, e.seed)

    @checked
    def solve(self, v: Vector, damping: float = 0.0, mode: Mode = "exact") -> Any:
        """(F + damping I)^-1 v, in v's form."""
        raise self._cannot("solve")

    @checked
    def inverse(self, damping: float = 0.0, mode: Mode = "exact") -> LinearOperator:
        """(F + damping I)^-1: a metric where the representation is closed, else an operator that solves when used."""
        return DampedInverse(self, damping, mode)

    @checked
    def power(self, exponent: float, cutoff: float = 0.0) -> Metric:
        """F^e; for e < 0 the pseudo-inverse's power, without eigenvalues below `cutoff` times the largest."""
        raise self._cannot("power")

    @checked
    def sample(
        self, n: int, damping: float = 0.0, generator: torch.Generator | None = None, mode: Mode = "exact"
    ) -> Tensor:
        """n draws of N(0, (F + damping I)^-1), [n, p]."""
        raise self._cannot("sample")

    @checked
    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k largest eigenpairs (all that the representation holds if None).

        By Lanczos (unless the representation knows them), whose errors are a share of the largest eigenvalue: about
        1e-12 in float64, 1e-6 in float32. A warning says where some of the k are too small to be found; `converged`
        then tells which ones have a residual of at most 1e-3 of their own eigenvalue. Of a network that is spread over
        processes, the vectors are this process's entries of them.
        """
        if k is None:
            raise self._cannot("eigh() of the whole spectrum (eigh(k) works)")
        double = self.dtype == torch.float64
        pairs = eigsh(self, k, tol=1e-12 if double else 1e-6)
        warn_unresolved(pairs, "ask for fewer" + ("" if double else ", or use precision='float64'"), stacklevel=4)
        return replace(pairs, converged=resolved(pairs.values, pairs.residuals))

    @checked
    def save(self, path: str | Path) -> Path:
        """Write to one file; `bs.load_curvature(path)` reads it."""
        raise self._cannot("save")

    def _cannot(self, what: str) -> UnsupportedError:
        others = "representation='dense', 'block', 'kfac', 'ekfac', 'diagonal' and 'lowrank' can"
        return UnsupportedError(f"{what} is not possible for representation={self.representation!r}; {others}")


class ProductMetric(Metric):
    """A metric known by its products only: what follows from them."""

    def eigenvalues(self) -> Tensor:
        """All of them would need the matrix: `eigh(k)` finds the largest."""
        raise UnsupportedError(f"{self!r} is known by its products only: eigh(k) gives its k largest eigenvalues")

    def solve(
        self,
        v: Vector,
        damping: float = 0.0,
        mode: Mode = "exact",
        preconditioner: Metric | LinearOperator | None = None,
        tol: float | None = None,
        max_iterations: int | None = None,
    ) -> Any:
        """(F + damping I)^-1 v by conjugate gradients.

        Args:
            v: a dict, flat [p] or a block [p, k].
            damping: must be positive, unless F itself is positive definite.
            mode: "exact".
            preconditioner: another metric of the same network (its damped inverse is used), or an operator ~ F^-1.
            tol: residual relative to ||v|| (1e-10 in float64, 1e-5 in float32).
            max_iterations: products allowed.
        """
        if not self.symmetric:
            raise UnsupportedError("a product of two metrics is not symmetric: it can be multiplied, not solved")
        if mode == "factored":
            raise UnsupportedError(f"{self.representation!r} has no factored damping: kfac and ekfac have it")
        X, back = self._columns(v, "solve")
        if isinstance(preconditioner, Metric):
            preconditioner = preconditioner.inverse(damping)
        out = cg(damped(self, damping), X, preconditioner, tol=tol, max_iterations=max_iterations)
        if not bool(out.converged.all()):
            raise InputError(f"solve: {out.message}; give a larger damping, a preconditioner, or a looser tol")
        return back(out.x)


class LazyMetric(ProductMetric):
    """A sum, multiple or product of metrics that no representation can hold: multiplied out when it meets a vector."""

    def __init__(self, metric: Metric, operator: LinearOperator) -> None:
        why = operator._expression()
        plan = Plan("lazy", tuple((name, shape, "lazy", why) for name, shape in metric.space.shapes.items()))
        super().__init__(metric.space, plan, {"what": why}, operator.symmetric)
        self.operator, self.spread = operator, operator.spread

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.operator._rmatmat(Y)

    @property
    def has_adjoint(self) -> bool:
        """Whether the operator has one."""
        return self.operator.has_adjoint


class DampedInverse(LinearOperator):
    """(F + damping I)^-1, solved when it meets a vector."""

    def __init__(self, metric: Metric, damping: float, mode: Mode) -> None:
        super().__init__(metric.shape, metric.dtype, metric.device, symmetric=True)
        self.metric, self.damping, self.mode = metric, damping, mode
        self.spread = metric.spread

    def __matmul__(self, v: Any) -> Any:
        if isinstance(v, LinearOperator):
            return super().__matmul__(v)
        return self.metric.solve(v, self.damping, self.mode)

    def _matmat(self, X: Tensor) -> Tensor:
        out: Tensor = self.metric.solve(X, self.damping, self.mode)
        return out

    def solve(self, v: Vector, damping: float = 0.0) -> Any:
        """The way back, (F + damping I) v with the damping it was made with."""
        if damping or self.mode != "exact":
            raise UnsupportedError("an inverse that is known by its products only cannot be damped again")
        X, back = self.metric._columns(v, "solve")
        return back(self.metric._matmat(X) + self.damping * X)

    def _expression(self) -> str:
        return f"({self.metric._expression()} + {self.damping:g} I)^-1"
