"""Per-example gradients by plain autograd, for parameters that no rule covers.

The ladder: `vmap` over examples of a vector-Jacobian product; where a module cannot be vmapped (recurrent cells,
data-dependent control flow), one example at a time. Batching rules are not all right (prelu's backward gives the wrong
shape for a single cotangent), so vmap is trusted only after it agreed with plain autograd on two and three examples.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from biascope.network.functional import Functional
from biascope.support.inputs import Inputs, batch_size, map_inputs, take


def per_example_gradients(f: Functional, names: list[str], inputs: Inputs, cotangents: Tensor) -> dict[str, Tensor]:
    """Rows of the Jacobian for some parameters.

    Args:
        f: the network; inputs already prepared for it.
        names: the parameters to differentiate.
        inputs: n examples.
        cotangents: [k, n, c]; row (j, i) is the gradient of sum_c cotangents[j, i, c] f_c(x_i).

    Returns:
        {name: [k, n, numel]}.
    """
    # a vmap over one example is not what was looked at, and saves nothing
    mapped = _vmap_is_right(f, names, inputs, cotangents) and batch_size(inputs) > 1
    return (_vmapped if mapped else _one_by_one)(f, names, inputs, cotangents)


_TRUSTED: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def _vmap_is_right(f: Functional, names: list[str], inputs: Inputs, cotangents: Tensor) -> bool:
    modes = tuple(m.training for m in f.module.modules())
    key = (tuple(names), cotangents.shape[0], min(3, cotangents.shape[1]), f.dtype, f.device, modes)
    known = _TRUSTED.setdefault(f.module, {})
    if key not in known:
        # batching rules may be right by chance where there are as many examples as cotangents: so two, and three
        known[key] = all(_agree(f, names, take(inputs, slice(0, m)), cotangents[:, :m]) for m in (2, 3))
    return known[key]


def _agree(f: Functional, names: list[str], inputs: Inputs, cotangents: Tensor) -> bool:
    try:
        fast, slow = _vmapped(f, names, inputs, cotangents), _one_by_one(f, names, inputs, cotangents)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    scale = max(float(s.norm()) for s in slow.values())
    tol = torch.finfo(f.dtype).eps ** 0.6
    return all(fast[k].shape == slow[k].shape and float((fast[k] - slow[k]).norm()) <= tol * scale for k in names)


def _vmapped(f: Functional, names: list[str], inputs: Inputs, cotangents: Tensor) -> dict[str, Tensor]:
    chosen = {k: f.params[k] for k in names}
    rest = {k: v for k, v in f.params.items() if k not in chosen}

    def single(x: Inputs, cot: Tensor) -> dict[str, Tensor]:  # cot [k, c]
        x1 = map_inputs(x, lambda t: t[None])
        vjp = torch.func.vjp(lambda p: f({**rest, **p}, x1)[0], chosen)[1]
        grads: dict[str, Tensor] = torch.func.vmap(vjp)(cot)[0]
        return grads

    out = torch.func.vmap(single)(inputs, cotangents.movedim(0, 1))
    return {k: v.movedim(0, 1).flatten(2).detach() for k, v in out.items()}


def _one_by_one(f: Functional, names: list[str], inputs: Inputs, cotangents: Tensor) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(batch_size(inputs)):
        params = {k: p.detach().requires_grad_(k in rows) for k, p in f.params.items()}
        with torch.enable_grad():
            out = f(params, take(inputs, slice(i, i + 1)))
        per_output: dict[str, list[Tensor]] = {name: [] for name in names}
        for j in range(cotangents.shape[0]):
            grads = torch.autograd.grad(
                out,
                [params[k] for k in names],
                cotangents[j, i : i + 1],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, g in zip(names, grads):
                per_output[name].append(g.flatten())
        for name in names:
            rows[name].append(torch.stack(per_output[name]))
    return {name: torch.stack(r, 1).detach() for name, r in rows.items()}
