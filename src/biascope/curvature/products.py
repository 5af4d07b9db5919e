"""Outputs, J v and the graph for J^T u from one forward pass: dual numbers on parameters that also require grad.

Forward mode and reverse mode share the pass, so that a product J^T H J v evaluates the network once. For a block of
vectors the tangents are vmapped (the outputs are computed once for all of them), and so are the backward passes.
Both are tried on two examples first, against the slow ways of `biascope.network.jacobian`; where they fail or differ
(straight-through estimators, operations without a forward-mode or batching rule), the slow ways are taken.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from biascope.network.derivatives import differentiable_attention
from biascope.network.functional import Functional, Params
from biascope.network.jacobian import jacobian_vector
from biascope.network.layers.blocks import leaves
from biascope.support.inputs import Inputs, take, tensors_of


@dataclass(frozen=True)
class Linearised:
    """The network at some examples: outputs [n, c], tangents J v [n, c] (or [k, n, c]), and J^T u on demand."""

    rows: Tensor  # carries the graph
    params: Params  # leaves of the graph
    tangent: Tensor

    @property
    def outputs(self) -> Tensor:
        """[n, c] without the graph."""
        return self.rows.detach()

    def pull(self, u: Tensor) -> Tensor:
        """J^T u [p] for u [n, c], or [k, p] for u [k, n, c]; the graph is freed."""
        params = list(self.params.values())
        many = u.dim() == 3
        grads = torch.autograd.grad(self.rows, params, u, allow_unused=True, is_grads_batched=many)
        lead = u.shape[:-2]
        flat = [
            p.new_zeros(*lead, p.numel()) if g is None else g.reshape(*lead, -1)
            for p, g in zip(params, grads, strict=True)
        ]
        return torch.cat(flat, -1)


def split(f: Functional, V: Tensor) -> list[Tensor]:
    """Vectors [..., p] as tensors [..., *shape], one per parameter: views."""
    sizes = [p.numel() for p in f.params.values()]
    return [t.reshape((*t.shape[:-1], *p.shape)) for t, p in zip(torch.split(V, sizes, -1), f.params.values())]


def one(f: Functional, inputs: Inputs, v: Tensor) -> Linearised:
    """Outputs and J v in one pass over a prepared batch; v [p]."""
    params = leaves(f)
    tangents = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in f.params.values()]
    torch._foreach_copy_(tangents, split(f, v))  # a view of a larger tensor would be copied, one by one, below
    with torch.enable_grad(), differentiable_attention(), forward_ad.dual_level():
        duals = {k: forward_ad.make_dual(p, t) for (k, p), t in zip(params.items(), tangents)}  # type: ignore[no-untyped-call]
        rows, tangent = forward_ad.unpack_dual(f(duals, inputs))  # type: ignore[no-untyped-call]
        return Linearised(rows, params, torch.zeros_like(rows) if tangent is None else tangent.detach())


def together(f: Functional, inputs: Inputs, V: Tensor) -> Linearised:
    """The same for V [k, p]: tangents [k, n, c]."""
    params = leaves(f)
    names, primals = tuple(params), tuple(params.values())

    def push(*v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.jvp(lambda *p: f(dict(zip(names, p)), inputs), primals, v)
        return out[0], out[1]

    with torch.enable_grad(), differentiable_attention():
        rows, tangents = torch.func.vmap(push, out_dims=(None, 0))(*split(f, V))  # type: ignore[arg-type]
    return Linearised(rows, params, tangents.detach())


def slowly(f: Functional, inputs: Inputs, v: Tensor) -> Linearised:
    """The same as `one` by separate passes, in whatever way J v can be computed."""
    params = leaves(f)
    with torch.enable_grad():
        rows = f(params, inputs)
    return Linearised(rows, params, jacobian_vector(f, inputs, dict(zip(params, split(f, v)))))


@dataclass(frozen=True)
class Ways:
    """How products are made: in one pass or in several, all vectors together or one by one (and why)."""

    single: Callable[[Functional, Inputs, Tensor], Linearised]
    block: bool
    why: str


_KNOWN: WeakKeyDictionary[nn.Module, dict[object, Ways]] = WeakKeyDictionary()


def ways(f: Functional, inputs: Inputs) -> Ways:
    """What works for this network, tried once per module, mode and shape of the inputs."""
    key = (
        tuple((k, p.shape) for k, p in f.params.items()),
        tuple((t.shape[1:], t.dtype) for t in tensors_of(inputs)),
        f.dtype,
        f.device,
        f.output,
        tuple(m.training for m in f.module.modules()),
    )
    known = _KNOWN.setdefault(f.module, {})
    if key not in known:
        if len(known) > 8:
            known.clear()
        known[key] = _try(f, take(inputs, slice(0, 2)))
    return known[key]


def _try(f: Functional, two: Inputs) -> Ways:
    gen = torch.Generator().manual_seed(0)
    V = torch.randn(2, f.num_params, generator=gen, dtype=torch.float64, device="cpu").to(f.device, f.dtype)
    truth = [slowly(f, two, v) for v in V]
    u = torch.randn(2, *truth[0].rows.shape, generator=gen, dtype=torch.float64, device="cpu").to(f.device, f.dtype)
    pushed, pulled = torch.stack([t.tangent for t in truth]), torch.stack([t.pull(w) for t, w in zip(truth, u)])
    failures = (RuntimeError, NotImplementedError, ValueError, TypeError)
    try:
        quick = [one(f, two, v) for v in V]
        back = torch.stack([q.pull(w) for q, w in zip(quick, u)])
        if not _agree(torch.stack([q.tangent for q in quick]), pushed) or not _agree(back, pulled):
            return Ways(slowly, False, "forward mode is not the adjoint of reverse mode here")
    except failures as e:
        return Ways(slowly, False, f"no forward mode: {_short(e)}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both = together(f, two, V)
            back = both.pull(u)
    except failures as e:
        return Ways(one, False, f"cannot be vmapped: {_short(e)}")
    if loops := [w for w in caught if "batching rule" in str(w.message)]:  # torch would loop, slowly
        return Ways(one, False, f"no batching rule: {_short(loops[0].message)}")
    same = _agree(both.tangent, pushed) and _agree(back, pulled)
    return Ways(one, same, "" if same else "vmapped products differ from single ones")


def _agree(fast: Tensor, slow: Tensor) -> bool:
    """Equal to rounding, vector by vector?"""
    if fast.shape != slow.shape:
        return False
    error, size = (t.flatten(1).norm(dim=1) for t in (fast - slow, slow))
    return bool((error <= torch.finfo(slow.dtype).eps ** 0.6 * size).all())


def _short(e: object) -> str:
    return str(e).strip().split("\n")[0][:120]
