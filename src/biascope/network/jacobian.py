"""J = df/dtheta, one object with two faces: J J^T is the kernel, J^T J the metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from biascope.linalg.operator import Adjoint, LinearOperator
from biascope.network.derivatives import differentiable_attention
from biascope.network.door import no_reentrant_checkpoints
from biascope.network.functional import Functional, Params, ParamSelection, functional
from biascope.network.layers.blocks import Anatomy, all_gradients, leaves, rows_of_tape
from biascope.network.layers.fallback import per_example_gradients
from biascope.network.layers.record import record
from biascope.network.outputs import main_tensor
from biascope.network.shards import dtensor
from biascope.network.stream import Cut, Stream, anatomy
from biascope.support.arguments import check_count, check_tensor
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import Inputs, batch_size, take, tensors_of
from biascope.support.precision import arithmetic, without_cudnn
from biascope.support.processes import processes
from biascope.support.tables import columns, grid

MANY = 32  # trials kept per module


def vector_jacobian(f: Functional, inputs: Inputs, u: Tensor) -> Params:
    """J^T u on one prepared batch: {name: tensor}; u [n, c]."""
    params = leaves(f)
    with torch.enable_grad():
        rows = f(params, inputs)
        grads = torch.autograd.grad(rows, list(params.values()), u, allow_unused=True, materialize_grads=True)
    return dict(zip(params, grads))


def jacobian_vector(f: Functional, inputs: Inputs, v: Params) -> Tensor:
    """J v on one prepared batch: [n, c].

    Forward mode where it exists and is the adjoint of reverse mode, else the double backward trick. The two differ for
    functions with a backward of their own (straight-through estimators), which a trial on two examples shows: there the
    Jacobian is the one that training sees, the reverse one. So it is for Embedding(padding_idx=...), whose backward
    skips the padding row: that two examples may not show, and `derivatives.embedding` makes the two agree.
    """
    if _forward_is_adjoint(f, inputs):
        return _forward(f, inputs, v)
    try:
        return _double_backward(f, inputs, v)
    except NotImplementedError:  # no second derivative either (EmbeddingBag): the rows themselves
        return _by_rows(f, inputs, v)


def _by_rows(f: Functional, inputs: Inputs, v: Params) -> Tensor:
    with torch.no_grad():
        c = f(f.params, take(inputs, slice(0, 1))).shape[1]
    parts = []
    for i in range(batch_size(inputs)):
        eye = torch.eye(c, dtype=f.dtype, device=f.device)[:, None]
        rows = per_example_gradients(f, list(v), take(inputs, slice(i, i + 1)), eye)
        parts.append(torch.stack([rows[k][:, 0] @ v[k].reshape(-1) for k in v]).sum(0))
    return torch.stack(parts)


def _forward(f: Functional, inputs: Inputs, v: Params) -> Tensor:
    with torch.no_grad(), differentiable_attention():
        out: Tensor = torch.func.jvp(lambda p: f(p, inputs), (f.params,), (v,))[1]
    return out


_FORWARD: WeakKeyDictionary[nn.Module, dict[object, tuple[Callable[[], object], bool]]] = WeakKeyDictionary()


def _forward_is_adjoint(f: Functional, inputs: Inputs) -> bool:
    """Does <u, J v> by forward mode equal <J^T u, v> by reverse mode?

    Tried on two examples, once per module, mode, output and kind of inputs, any of which may lead into other code.
    """
    names = tuple(inputs) if isinstance(inputs, dict) else ()
    kind = (names, tuple((t.dim(), t.dtype) for t in tensors_of(inputs)))
    key = (tuple(f.params), f.dtype, f.device, tuple(m.training for m in f.module.modules()), id(f.output), kind)
    known = _FORWARD.setdefault(f.module, {})
    output, agree = known.get(key, (lambda: known, False))
    if output() is not f.output:  # not tried, or an output that is gone had the same id
        if len(known) > MANY:
            known.clear()
        agree = _try_forward(f, take(inputs, slice(0, 2)))
        known[key] = (_weakly(f.output), agree)
    return agree


def _weakly(output: object) -> Callable[[], object]:
    """Held so that a module which the output holds can be freed; what torch and Python offer ready-made holds none."""
    try:
        return ref(output)
    except TypeError:  # None, operator.itemgetter
        return lambda: output


def _try_forward(f: Functional, two: Inputs) -> bool:
    gen = torch.Generator().manual_seed(0)
    v = {k: torch.randn(p.shape, generator=gen, dtype=torch.float64, device="cpu").to(p) for k, p in f.params.items()}
    with torch.enable_grad(), no_reentrant_checkpoints():
        f(leaves(f), two)
    try:
        Jv = _forward(f, two, v)
        u = torch.randn(Jv.shape, generator=gen, dtype=torch.float64, device="cpu").to(Jv)
        back = vector_jacobian(f, two, u)
        left, right = (u * Jv).double().sum(), sum((back[k] * v[k]).double().sum() for k in v)
        size = sum((back[k] * v[k]).double().square().sum() for k in v) ** 0.5
        return bool((left - right).abs() <= 1e4 * torch.finfo(f.dtype).eps * (size + left.abs()))
    except (NotImplementedError, RuntimeError):
        return False


def _double_backward(f: Functional, inputs: Inputs, v: Params) -> Tensor:
    """J v = d/du <J^T u, v>, since J^T u is linear in u."""
    params = leaves(f)
    names = list(params)
    with torch.enable_grad(), differentiable_attention(), without_cudnn():
        rows = f(params, inputs)
        u = torch.zeros_like(rows, requires_grad=True)
        grads = torch.autograd.grad(
            rows, [params[n] for n in names], u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        inner = sum((g * v[n]).sum() for n, g in zip(names, grads))
        assert isinstance(inner, Tensor)
        (out,) = torch.autograd.grad(inner, u, allow_unused=True, materialize_grads=True)
    return out


@dataclass(frozen=True)
class CoverageRow:
    """How one parameter is differentiated."""

    parameter: str
    shape: tuple[int, ...]
    handled_by: str  # "layer rule" | "autograd fallback" | "zero"
    why: str


@dataclass(frozen=True)
class Coverage:
    """Every parameter, the rule that handles it, and why. `print(coverage)` is a table.

    `output` says which part of what the network returns is differentiated, "" where it returns a tensor.
    """

    rows: tuple[CoverageRow, ...]
    output: str = ""

    @property
    def fallback(self) -> tuple[str, ...]:
        """Parameters handled by the autograd fallback."""
        return tuple(r.parameter for r in self.rows if r.handled_by == "autograd fallback")

    def __str__(self) -> str:
        rows = [(r.parameter, list(r.shape), r.handled_by, r.why) for r in self.rows]
        table = columns(["parameter", "shape", "handled by", "why"], rows)
        return f"{table}\ndifferentiated: {self.output}" if self.output else table

    def _repr_html_(self) -> str:
        """What needs the fallback first, then the rest, for notebooks."""
        title = f"{len(self.rows)} parameters, {len(self.fallback)} by the autograd fallback"
        title += f"; differentiated: {self.output}" if self.output else ""
        rows = sorted(self.rows, key=lambda r: r.handled_by == "layer rule")
        return grid(
            title,
            ["parameter", "shape", "handled by", "why"],
            [(r.parameter, list(r.shape), r.handled_by, r.why) for r in rows],
        )


class Flat(Tensor):
    """A flat parameter-space vector that remembers its parts: `.as_dict()`."""

    parts: Params

    @staticmethod
    def wrap(parts: Params) -> Flat:
        """Concatenate {name: tensor [*shape]} to [p], remembering the shapes."""
        flat = torch.cat([t.reshape(-1) for t in parts.values()]).as_subclass(Flat)
        flat.parts = parts
        return flat

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def as_dict(self) -> Params:
        """The same vector as {parameter name: tensor}."""
        return self.parts


class Jacobian(LinearOperator):
    """Jacobian of a network's outputs on some data with respect to its parameters; rows (n, c), columns parameters.

    `x` may be a tensor, a dict of keyword tensors, or a re-iterable of batches x or (x, y): products stream over it.
    Rows belong to examples, so it must give the same ones in the same order at every pass.

    Args:
        model: any nn.Module whose examples do not mix.
        x: the examples; a DataLoader must not shuffle.
        params: which parameters are columns (see `bs.functional.functional`).
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        batch_size: split a single large tensor into batches of this size for products.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, and later every
            product, with the same network, x and vectors; each runs its share of x through the network. Of a network
            that `fully_shard` has spread out there is J.T @ u only: this process's entries, `.as_dict()` as DTensors.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> J = Jacobian(net, torch.randn(5, 3))
        >>> J.shape, (J @ torch.ones(J.p)).shape, (J.T @ torch.ones(5, 2)).shape
        ((10, 26), torch.Size([5, 2]), torch.Size([26]))
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        params: ParamSelection = None,
        output: Callable[[Any], Tensor] | None = None,
        precision: str = "float32",
        batch_size: int | None = None,
        group: Any = None,
    ) -> None:
        self.team = processes(group)
        with self.team:
            self.f = functional(model, params, output, precision, None if group is None else self.team)
            size = None if batch_size is None else check_count(batch_size, "batch_size")
            self.stream = Stream(self.f, x, Cut(size, ordered=True, same=True, team=self.team))
            self.n, self.c = self.stream.count(), self.stream.outputs
        super().__init__((self.n * self.c, self.f.num_params), self.f.dtype, self.f.device)

    @property
    def data(self) -> Any:
        """The examples, as they are read again."""
        return self.stream.data

    @property
    def p(self) -> int:
        """Number of parameters (columns)."""
        return self.f.num_params

    @property
    def anatomy(self) -> Anatomy:
        """The blocks and rules found for this model."""
        return anatomy(self.f, self.stream.first[0])

    def coverage(self) -> Coverage:
        """How every parameter is differentiated, and why."""
        rows = {}
        for b in self.anatomy.blocks:
            how = {"matrix": "layer rule", "rows": "layer rule", "fallback": "autograd fallback"}[b.kind]
            how = "zero" if b.kind == "rows" and not b.uses else how
            for name in b.names:
                rows[name] = CoverageRow(name, tuple(self.f.params[name].shape), how, b.reason)
        return Coverage(tuple(rows[name] for name in self.f.params), self._differentiated())

    def _differentiated(self) -> str:
        if self.f.output is not None:
            return "what output= takes from what the network returns"
        seen: list[str] = []

        def note(out: Any) -> Tensor:
            found, where = main_tensor(out)
            seen.append(
                f"{where} of the {type(out).__name__} that {type(self.f.module).__name__} returns" * bool(where)
            )
            return out if found is None else found

        with torch.no_grad():
            one = take(self.stream.first[0], slice(0, 1))
            replace(self.f, output=note)(self.f.params, self.f.prepare(one))
        return seen[0]

    # ------------------------------------------------------------------------------------------------- products

    def __matmul__(self, v: Any) -> Any:
        """J @ v: v a dict {name: tensor}, flat [p] or a block [p, k]; gives [n, c] or [n, c, k]."""
        if isinstance(v, LinearOperator):
            return super().__matmul__(v)
        if isinstance(v, dict):
            return self.jvp(v)
        if not isinstance(v, Tensor) or v.dim() not in (1, 2) or v.shape[0] != self.p:
            got = list(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise InputError(f"J @ v: v must be a dict, flat [{self.p}] or a block [{self.p}, k], got {got}")
        if v.dim() == 1:
            return self.jvp(self.unflatten(v))
        return torch.stack([self.jvp(self.unflatten(v[:, i])) for i in range(v.shape[1])], -1)

    def jvp(self, v: Params) -> Tensor:
        """J v [n, c] for v = {name: tensor}; parameters left out count as zero."""
        unknown = set(v) - set(self.f.params)
        if unknown:
            raise InputError(f"J @ v: {sorted(unknown)[0]!r} is not a differentiated parameter of this Jacobian")
        full = {}
        for name, q in self.f.params.items():
            t = v.get(name)
            if t is not None and check_tensor(t, name).shape != q.shape:
                raise InputError(f"J @ v: '{name}' has shape {list(t.shape)}, the parameter {list(q.shape)}")
            full[name] = torch.zeros_like(q) if t is None else t.to(self.f.device, self.f.dtype)
        self._refuse_shards("J @ v")
        out = torch.zeros(self.n, self.c, dtype=self.f.dtype, device=self.f.device)
        with self.team, arithmetic("float32"):
            for part in self.stream.parts():
                out[part.at] = jacobian_vector(self.f, part.inputs, full)
            return self.team.sum(out)

    def _refuse_shards(self, what: str) -> None:
        if self.f.shards is not None:
            raise UnsupportedError(
                f"{what}: of a network that is spread over processes there is J.T @ u only; bs.sketched_ntk and "
                "bs.hessian take it too, and a plain copy has everything"
            )

    def vjp(self, u: Tensor) -> Flat:
        """J^T u for u [n, c]: flat [p], with `.as_dict()`."""
        if check_tensor(u, "u").shape not in {(self.n, self.c), (self.n * self.c,)}:
            raise InputError(f"J^T u: u must be [{self.n}, {self.c}] or [{self.n * self.c}], got {list(u.shape)}")
        u = u.reshape(self.n, self.c).to(self.f.device, self.f.dtype)
        total: Params = {}
        with self.team, arithmetic("float32"):
            for part in self.stream.parts():
                pulled = vector_jacobian(self.f, part.inputs, u[part.at] * (not part.idle))
                total = pulled if not total else {k: total[k] + pulled[k] for k in total}
            if self.f.shards is None:
                total = total or {k: torch.zeros_like(p) for k, p in self.f.params.items()}
                self.team.sum(*total.values())
        flat = Flat.wrap(total)
        if self.f.shards is not None:
            flat.parts = {k: dtensor(t, self.f.params[k]) for k, t in total.items()}
        return flat

    def _matmat(self, X: Tensor) -> Tensor:
        return torch.stack([self.jvp(self.unflatten(x)).reshape(-1) for x in X.mT], -1)

    def _rmatmat(self, X: Tensor) -> Tensor:
        return torch.stack([self.vjp(x).as_subclass(Tensor) for x in X.mT], -1)

    @property
    def T(self) -> Transposed:
        """J^T: `J.T @ u` with u [n, c] (or [n * c], or a block [n, c, k]) gives [p] (or [p, k])."""
        return Transposed(self)

    # ----------------------------------------------------------------------------------------------------- rows

    def rows(self, index: slice | Tensor | Sequence[int] | None = None) -> Tensor:
        """Dense rows [m, c, p] of some examples (all if None), parameters in the order of `J.f.params`.

        Args:
            index: a slice, positions [m] or a mask [n]. The rows are in the order of the positions, which may be
                negative (from the end) and may come more than once.

        Example:
            >>> J = Jacobian(nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0], [3.0]]), batch_size=2)
            >>> J.rows(torch.tensor([2, 0])).flatten()
            tensor([3., 1.])
        """
        self._refuse_shards("rows of J")
        eye = torch.eye(self.c, dtype=self.f.dtype, device=self.f.device)
        wanted = self._positions(index)
        out = torch.zeros(len(wanted), self.c, self.p, dtype=self.f.dtype, device=self.f.device)
        with self.team:
            for part in self.stream.parts():
                s, inputs = part.at, part.inputs
                here = ((wanted >= s.start) & (wanted < s.stop)).nonzero().flatten()
                if not len(here):
                    continue
                if index is not None:
                    inputs = take(inputs, (wanted[here] - s.start).to(self.f.device))
                with arithmetic("float32"):
                    dense = self._dense(inputs, eye[:, None].expand(self.c, len(here), self.c))
                out[here.to(self.f.device)] = dense
            return self.team.sum(out)

    def _positions(self, index: slice | Tensor | Sequence[int] | None) -> Tensor:
        """What an index of examples stands for: positions [m] from 0 to n - 1."""
        every = torch.arange(self.n, device="cpu")
        if index is None:
            return every
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device="cpu")
            if index.dim() != 1:
                raise InputError(
                    f"J.rows: positions [m] or a mask [{self.n}] are needed, got shape {list(index.shape)}"
                )
            index = index if index.numel() else index.long()
        try:
            return every[index]
        except (IndexError, ValueError) as error:
            raise InputError(f"J.rows: the index does not fit {self.n} examples: {error}") from error

    def _dense(self, inputs: Inputs, cot: Tensor) -> Tensor:
        found = self.anatomy
        fallback = [b.names[0] for b in found.blocks if b.kind == "fallback"]
        ruled = [n for b in found.blocks if b.kind != "fallback" for n in b.names]
        rows: Params = {}
        if ruled:
            tape = record(self.f, leaves(self.f), inputs, scope=found.scope)
            if not found.matches(tape):
                fallback, ruled = [*fallback, *ruled], []
            else:
                rows |= rows_of_tape(self.f, found, tape, all_gradients(tape, found, cot), len(cot), ruled)
        if fallback:
            rows |= per_example_gradients(self.f, fallback, inputs, cot)
        return torch.cat([rows[name] for name in self.f.params], -1).movedim(0, 1)

    def to_dense(self, chunk: int = 0) -> Tensor:
        """The whole Jacobian [n, c, p]."""
        return self.rows()

    def unflatten(self, v: Tensor) -> Params:
        """Split a flat vector [p] into {name: tensor}."""
        parts = torch.split(v.as_subclass(Tensor), [q.numel() for q in self.f.params.values()])
        return {name: part.view_as(q) for (name, q), part in zip(self.f.params.items(), parts)}


class Transposed(Adjoint):
    """J^T as an operator [p, n c] that also takes cotangents in their natural shape [n, c]."""

    base: Jacobian

    def __matmul__(self, u: Any) -> Any:
        if isinstance(u, LinearOperator):
            return super().__matmul__(u)
        J = self.base
        if isinstance(u, Tensor) and u.shape in {(J.n, J.c), (J.n * J.c,)}:
            return J.vjp(u)
        if isinstance(u, Tensor) and u.dim() == 3 and u.shape[:2] == (J.n, J.c):
            return torch.stack([J.vjp(u[..., i]).as_subclass(Tensor) for i in range(u.shape[2])], -1)
        got = list(u.shape) if isinstance(u, Tensor) else type(u).__name__
        raise InputError(f"J.T @ u: u must be [{J.n}, {J.c}] (or a block [{J.n}, {J.c}, k]), got {got}")
