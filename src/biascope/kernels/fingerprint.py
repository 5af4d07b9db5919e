"""What a kernel was computed from, as hashes of tensors that are the same in another process."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from biascope.support.inputs import Inputs


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, values, shapes and types."""
    h = hashlib.blake2b(digest_size=16)
    for name, t in tensors.items():
        h.update(f"{name!r} {tuple(t.shape)} {t.dtype} ".encode())
        for kind, part in _parts(t):
            h.update(kind.encode())
            h.update(part.cpu().view(torch.uint8).numpy().data)
    return h.hexdigest()


def _parts(t: Tensor) -> list[tuple[str, Tensor]]:
    """What a tensor holds, as vectors: itself under no name, or the indices and values of a sparse one."""
    t = t.detach()
    if t.layout == torch.sparse_coo:
        t = t.coalesce()
        found = [t.indices(), t.values()]
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        found = [t.crow_indices(), t.col_indices(), t.values()]
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        found = [t.ccol_indices(), t.row_indices(), t.values()]
    else:
        return [("", _flat(t))]
    return [(f"{t.layout} {tuple(p.shape)} ", _flat(p)) for p in found]


def _flat(t: Tensor) -> Tensor:
    """All entries in a row, one after another in memory: torch lets a single one keep any stride."""
    return t.resolve_conj().resolve_neg().contiguous().as_strided((t.numel(),), (1,))


def inputs_fingerprint(*inputs: Inputs | None) -> str:
    """A hash of batches, with the keywords of keyword tensors."""
    return fingerprint(_named(inputs))


def _named(inputs: Sequence[Inputs | None]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for i, batch in enumerate(inputs):
        if batch is not None:
            named |= {f"{i} {k}": t for k, t in (batch if isinstance(batch, dict) else {"": batch}).items()}
    return named
