"""The kernel column by column from products J (J^T u): no layer rules, an independent route."""

import torch
from torch import Tensor

from biascope.kernels.plan import Plan
from biascope.network.functional import Functional
from biascope.network.jacobian import jacobian_vector, vector_jacobian
from biascope.support.inputs import Inputs, batch_size, take


def by_products(f: Functional, one: Inputs, two: Inputs | None, cot: Tensor, mode: str, plan: Plan) -> Tensor:
    """K in the layout used while summing (see contract.py), one column per (cotangent, example) of x2."""
    other = one if two is None else two
    n1, n2, k = batch_size(one), batch_size(other), len(cot)
    cot = cot.to(f.device, f.dtype)
    K = torch.zeros(k, n1, k, n2, dtype=f.dtype, device=f.device)
    for j in range(n2):
        x = f.prepare(take(other, slice(j, j + 1)))
        for b in range(k):
            v = vector_jacobian(f, x, cot[b][None])
            for start in range(0, n1, plan.chunk):
                s = slice(start, min(start + plan.chunk, n1))
                out = jacobian_vector(f, f.prepare(take(one, s)), v)  # [chunk, c]
                K[:, s, b, j] = cot @ out.mT
    if mode == "full":
        return K
    diagonal = K.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # [k, n1, n2]
    return diagonal.sum(0) if mode == "trace" else diagonal.contiguous()
