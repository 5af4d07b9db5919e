"""A metric whose pieces belong to several processes: each holds its own, and all operations are collective calls.

Vectors are whole on every rank: of F v a rank computes the rows of its own pieces, and the rows are put together by one
sum. The files are shards, one per rank with pieces, and an index that says which piece lies where: they are read by any
number of processes, also by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.curvature.blockwise import INDEX, BlockMetric
from biascope.curvature.kronecker import EigenPiece, eigh_of
from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.metric import Vector
from biascope.curvature.pieces import Mode, ParameterSpace, Piece
from biascope.curvature.plan import Plan
from biascope.network.shards import Cut, dtensor, is_sharded, local
from biascope.support.errors import InputError
from biascope.support.files import write_json, write_tensors
from biascope.support.inputs import finite
from biascope.support.processes import Processes


class OwnedMetric(BlockMetric):
    """Pieces with owners; `pieces` are those of this process, `numbers` their places among all of them."""

    def __init__(
        self,
        space: ParameterSpace,
        pieces: list[Piece],
        plan: Plan,
        info: dict[str, Any],
        team: Processes,
        numbers: Sequence[int],
        ask: Callable[[list[Tensor]], list[bool]] = finite,
    ) -> None:
        self.team, self.numbers = team, tuple(numbers)
        with team:
            super().__init__(space, pieces, plan, info, ask)
            self.symmetric = all(team.gather(self.symmetric))
            names = {i: piece.names for i, piece in zip(self.numbers, pieces)}
            found = [(i, rank, some[i]) for rank, some in enumerate(team.gather(names)) for i in some]
            self.owners = [(rank, own) for _, rank, own in sorted(found)]  # of all pieces

    def _repr_html_(self) -> str:
        """One process may show it, which can ask nothing of the others."""
        return f"<pre>{self!r}, pieces of rank {self.team.rank} of {self.team.size}</pre>"

    def _each(self, X: Tensor, do: Callable[[Piece, Tensor], Tensor]) -> Tensor:
        out = torch.zeros_like(X)
        with self.team:
            for piece in self.pieces:
                self.space.put(piece.names, do(piece, self.space.take(piece.names, X)), out)
            return self._sum(out)

    def __matmul__(self, v: Any) -> Any:
        """F @ v; of a dict of DTensors, a dict of DTensors, for which a layer at a time is put together."""
        if _is_spread(v):
            return self._layer_by_layer(v, lambda piece, X: piece.matmat(X))
        with self.team:
            return super().__matmul__(v)

    def solve(
        self, v: Vector, damping: float = 0.0, mode: Mode = "exact", complement: Literal["keep", "drop"] = "keep"
    ) -> Any:
        """(F + damping I)^-1 v, in v's form; of a dict of DTensors layer by layer."""
        if _is_spread(v):
            self._check_damping(damping, mode)
            return self._layer_by_layer(v, lambda piece, X: piece.solve(X, damping, mode))
        with self.team:
            return super().solve(v, damping, mode, complement)

    def _layer_by_layer(self, v: dict[str, Tensor], do: Callable[[Piece, Tensor], Tensor]) -> dict[str, Tensor]:
        if set(v) != set(self.space.shapes):
            raise InputError(f"a dict of DTensors must have all {len(self.space.shapes)} parameters of the metric")
        pieces, out = iter(self.pieces), dict[str, Tensor]()
        with self.team:
            for owner, names in self.owners:
                cuts = [Cut(self.team, self.space.shapes[name]) for name in names]
                parts = [cut.gather(local(v[name]).detach().to(self.dtype)) for cut, name in zip(cuts, names)]
                X = torch.cat([t.reshape(-1) for t in parts])
                Y = do(next(pieces), X[:, None])[:, 0].contiguous() if owner == self.team.rank else X
                self.team.broadcast(Y, owner)
                for cut, name, y in zip(cuts, names, torch.split(Y, [t.numel() for t in parts])):
                    out[name] = dtensor(cut.own(y.view(cut.shape)).contiguous(), v[name])
        return {name: out[name] for name in v}

    def _sum(self, t: Tensor) -> Tensor:
        return self.team.sum(t)

    def _places(self) -> tuple[list[slice], int]:
        with self.team:
            mine = {i: len(piece.eigenvalues()) for i, piece in zip(self.numbers, self.pieces)}
            every: dict[int, int] = {}
            for theirs in self.team.gather(mine):
                every |= theirs
        starts = {i: sum(every[j] for j in range(i)) for i in mine}
        return [slice(starts[i], starts[i] + mine[i]) for i in self.numbers], sum(every.values())

    def _whole(self, pieces: list[Piece | None]) -> list[Piece] | None:
        found = super()._whole(pieces)
        return found if all(self.team.gather(found is not None)) else None

    def _like(self, pieces: list[Piece], what: str) -> OwnedMetric:
        return OwnedMetric(self.space, pieces, self.plan, {**self.info, "what": what}, self.team, self.numbers)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file per rank with pieces, and an index: `bs.load_curvature(path)` reads them."""
        path, team = Path(path), self.team
        shard = path.with_name(f"{path.stem}-{team.rank + 1:05d}-of-{team.size:05d}{path.suffix}")
        with team:
            arrays, entries = self._entries(self.numbers)
            if arrays:
                write_tensors(shard, arrays, {})
            mine = [(i, {**entry, "file": shard.name}) for i, entry in zip(self.numbers, entries)]
            every = sorted((pair for some in team.gather(mine) for pair in some), key=lambda pair: pair[0])
            if team.rank == 0:
                write_json(path.with_name(path.name + INDEX), self._header([entry for _, entry in every]))
                path.unlink(missing_ok=True)  # an older metric in one file
        return path


def _is_spread(v: Any) -> bool:
    return isinstance(v, dict) and bool(v) and all(map(is_sharded, v.values()))


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error of one rank is an error of all."""

    @wraps(method)
    def call(self: OwnedMetric, *args: Any, **kwargs: Any) -> Any:
        with self.team:
            return method(self, *args, **kwargs)

    return call


PIECEWISE = {
    "eigen": ("eigenvalues", "eigh", "to_eigenbasis", "from_eigenbasis", "sample", "power", "inverse"),
    "numbers": ("diagonal", "trace", "frobenius_norm", "spectral_norm", "to_dense", "quadratic_form"),
    "algebra": ("__add__", "__sub__", "__mul__"),
}
for _names in PIECEWISE.values():
    for _name in _names:
        setattr(OwnedMetric, _name, _collective(getattr(BlockMetric, _name)))


def decomposed(team: Processes, pieces: Sequence[Any], summed: bool = False) -> list[EigenPiece]:
    """Kronecker pieces of local sums, added up and decomposed: a factor by the rank it is dealt to, for all ranks.

    With `summed`, all ranks have the same factors already.

    A factor travels twice, as a sum to its rank and as its eigenvectors back; it is freed in between.
    """
    factors = [(piece, side) for piece in pieces for side in ("B", "A") if side == "B" or piece.full]
    owners = team.deal([float(getattr(piece, side).shape[-1]) ** 3 for piece, side in factors])
    mine = []
    for (piece, side), owner in zip(factors, owners, strict=True):
        S = getattr(piece, side)
        if not summed:
            team.reduce(S, owner)
        if owner == team.rank:
            mine.append(S)
        else:
            setattr(piece, side, S.new_empty(S.shape[:-1]))  # its size
        del S
    found = iter(eigh_of(mine) if mine else [])
    del mine
    for (piece, side), owner in zip(factors, owners, strict=True):
        S = getattr(piece, side)
        if owner == team.rank:
            values, U = next(found)
        else:
            values, U = S, S.new_empty(*S.shape, S.shape[-1])
        team.broadcast(values, owner)
        team.broadcast(U, owner)
        setattr(piece, side, (values, U))
    out = []
    for piece in pieces:
        (s_B, U_B), (s_A, U_A) = (
            piece.B,
            piece.A if isinstance(piece.A, tuple) else (piece.A if summed else team.sum(piece.A), None),
        )
        out.append(EigenPiece(piece.names, U_B, U_A, piece._outer(s_B, s_A), s_B, s_A, piece.layout))
    return out


def to_owners(team: Processes, pieces: list[Piece], load: list[float]) -> tuple[list[Piece], list[int]]:
    """Add up the pieces of local sums, each on its owner: what this rank owns, and the places of it among all."""
    owners = team.deal([piece.cost() for piece in pieces], load)
    mine: list[Piece] = []
    for j, owner in enumerate(owners):
        piece = pieces[j]
        if isinstance(piece, LowRankPiece):
            piece = _rows(team, piece, owner)
        else:  # of an eigenpiece, all but the scalings is the same everywhere
            for name, t in piece.arrays().items():
                if name == "s" or not isinstance(piece, EigenPiece):
                    team.reduce(t, owner)
        if owner == team.rank:
            mine.append(piece)
        pieces[j] = None  # type: ignore[call-overload]
    return mine, [j for j, owner in enumerate(owners) if owner == team.rank]


def _rows(team: Processes, piece: LowRankPiece, owner: int) -> LowRankPiece:
    """The rows of all ranks, on their owner; those of one rank at a time are on their way."""
    assert piece.owner is not None
    kept: list[tuple[Tensor, Tensor]] = []
    for rank, count in enumerate(team.gather(len(piece.J))):
        if count:
            here = rank == team.rank
            J = piece.J if here else piece.J.new_empty(count, piece.J.shape[1])
            ks = piece.owner if here else piece.owner.new_empty(count)
            team.broadcast(J, rank)
            team.broadcast(ks, rank)
            if owner == team.rank:
                kept.append((J, ks))
    return LowRankPiece(piece.names, *(torch.cat(some) for some in zip(*kept))) if kept else piece
