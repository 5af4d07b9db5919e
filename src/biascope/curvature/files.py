"""Metrics on disk: one safetensors file, the structure in its header, a checksum per array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.kronecker import EigenPiece, KroneckerPiece
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.pieces import DensePiece, DiagonalPiece, Piece
from biascope.curvature.plan import Plan
from biascope.curvature.quasidiagonal import ArrowPiece
from biascope.curvature.space import ParameterSpace
from biascope.errors import CorruptError, InputError
from biascope.files import checksum, read_tensors, write_tensors
from biascope.functional import device_of
from biascope.signatures import checked

FORMAT = 1
PIECES: dict[str, type[Piece]] = {
    cls.kind: cls for cls in (DensePiece, DiagonalPiece, ArrowPiece, KroneckerPiece, EigenPiece, LowRankPiece)
}


def save_metric(F: BlockMetric, path: Path) -> Path:
    """Write a metric; the file appears whole or not at all."""
    arrays: dict[str, Tensor] = {}
    pieces = []
    for i, piece in enumerate(F.pieces):
        mine = {name: t.detach().cpu().contiguous().clone() for name, t in piece.arrays().items()}
        arrays |= {f"{i}/{name}": t for name, t in mine.items()}
        pieces.append(
            {
                "kind": piece.kind,
                "names": list(piece.names),
                "header": piece.header(),
                "arrays": {name: checksum(t) for name, t in mine.items()},
            }
        )
    header = {
        "format": FORMAT,
        "dtype": str(F.dtype).removeprefix("torch."),
        "shapes": {name: list(shape) for name, shape in F.space.shapes.items()},
        "plan": [F.plan.representation, [[n, list(s), k, w] for n, s, k, w in F.plan.rows]],
        "info": F.info,
        "pieces": pieces,
    }
    path = Path(path)
    write_tensors(path, arrays, {"biascope": json.dumps(header)})
    return path


@checked
def load_curvature(path: str | Path, device: torch.device | str = "cpu") -> BlockMetric:
    """Read a metric that `F.save(path)` wrote.

    Example:
        >>> import biascope as bs, tempfile
        >>> F = bs.fisher(torch.nn.Linear(3, 2), torch.randn(5, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     G = load_curvature(F.save(f"{folder}/fisher.safetensors"))
        >>> torch.equal(F.to_dense(), G.to_dense())
        True
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        arrays, metadata = read_tensors(path)
        header = json.loads(metadata.get("biascope", "{}"))
    except (CorruptError, json.JSONDecodeError) as e:
        raise CorruptError(f"{path}: not a readable metric ({e}); it may be truncated, save it again") from None
    if "pieces" not in header:
        raise CorruptError(f"{path}: a safetensors file, but not a metric saved by biascope")
    if header.get("format") != FORMAT:
        raise CorruptError(f"{path}: format {header.get('format')!r}, this version of biascope reads {FORMAT}")
    try:
        return _assemble(header, arrays, device_of(device), path)
    except (KeyError, TypeError, IndexError, AttributeError) as e:
        raise CorruptError(f"{path}: the header does not fit the arrays ({e!r}); save it again") from None


def _assemble(header: dict[str, Any], arrays: dict[str, Tensor], device: torch.device, path: Path) -> BlockMetric:
    pieces = []
    for i, entry in enumerate(header["pieces"]):
        mine = {}
        for name, expected in entry["arrays"].items():
            t = arrays[f"{i}/{name}"]
            if checksum(t) != expected:
                raise CorruptError(f"{path}: array {name} of {entry['names'][0]} is damaged (checksum); save it again")
            mine[name] = t.to(device)
        pieces.append(PIECES[entry["kind"]].load(tuple(entry["names"]), mine, entry["header"]))
    shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
    space = ParameterSpace(shapes, getattr(torch, header["dtype"]), device)
    representation, rows = header["plan"]
    plan = Plan(representation, tuple((n, tuple(s), k, w) for n, s, k, w in rows))
    return BlockMetric(space, pieces, plan, header["info"])
