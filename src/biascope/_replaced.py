"""Functions of version 0.1.0.dev0 that a method or a line of torch has replaced: they work for one more version."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def effective_ranks(vector: Any) -> dict[str, float]:
    """`TaskVector.effective_ranks`."""
    return vector.effective_ranks()  # type: ignore[no-any-return]


def sparsity(vector: Any, share: float = 0.9) -> float:
    """`TaskVector.sparsity`."""
    return vector.sparsity(share)  # type: ignore[no-any-return]


def cosines(vectors: Mapping[str, Any]) -> Tensor:
    """`TaskVector.cosine` of every pair: [T, T], float64."""
    rows = list(vectors.values())
    return torch.tensor([[a.cosine(b) for b in rows] for a in rows], dtype=torch.float64, device="cpu")


def predictors(model: nn.Module, vector: Any, tangent_vector: Any, scale: float = 1.0) -> dict[str, nn.Module]:
    """`TaskVector.apply_to` and `biascope.editing.posthoc`, by the names of the comparison."""
    from biascope.editing import posthoc

    linear = {name: posthoc(model, v, scale) for name, v in (("post-hoc", vector), ("linear", tangent_vector))}
    return {"pre-trained": model, "non-linear": vector.apply_to(model, scale), **linear}


def mutual_coherence(A: Tensor, B: Tensor | None = None) -> float:
    """Largest |<a_i, b_j>| of unit columns of A and B; of one dictionary, between different columns."""
    P, Q = (M.double() / M.double().norm(dim=0) for M in (A, A if B is None else B))
    inner = (P.T @ Q).abs()
    return float((inner.fill_diagonal_(0.0) if B is None else inner).max())


def project_out(x: Tensor, directions: Tensor) -> Tensor:
    """x [n, ...] without its components along orthonormal rows `directions` [k, ...]."""
    V, flat = directions.flatten(1).to(x), x.flatten(1)
    return (flat - (flat @ V.T) @ V).view_as(x)


REPLACED = {
    "biascope.editing": (effective_ranks, sparsity, cosines, predictors),
    "biascope.fields": (mutual_coherence,),
    "biascope.geometry": (project_out,),
}
