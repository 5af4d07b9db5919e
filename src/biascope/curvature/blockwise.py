"""A metric made of pieces, one per layer (or one for everything): all explicit representations, also on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.curvature.lowrank import LowRankPiece
from biascope.curvature.metric import Metric, Vector
from biascope.curvature.pieces import Mode, ParameterSpace, Piece
from biascope.curvature.plan import Plan
from biascope.linalg.lanczos import Eigenpairs
from biascope.linalg.operator import LinearOperator
from biascope.support.arguments import check_between, check_count, check_number, device_of
from biascope.support.errors import CorruptError, InputError, UnsupportedError
from biascope.support.files import checksum, read_json, read_tensors, write_tensors
from biascope.support.inputs import finite
from biascope.support.processes import Processes, processes
from biascope.support.signatures import checked

FORMAT = 1  # of files
INDEX = ".index.json"  # behind the name of a metric in shards


class BlockMetric(Metric):
    """Block diagonal over pieces; every operation is done piece by piece."""

    def __init__(
        self,
        space: ParameterSpace,
        pieces: list[Piece],
        plan: Plan,
        info: dict[str, Any],
        ask: Callable[[list[Tensor]], list[bool]] = finite,  # which of the pieces' tensors hold numbers only
    ) -> None:
        super().__init__(space, plan, info, symmetric=all(piece.symmetric for piece in pieces))
        self.pieces = pieces
        arrays = [(piece, name, t) for piece in pieces for name, t in piece.arrays().items()]
        good = ask([t for _, _, t in arrays])
        if not all(good):
            piece, name, _ = arrays[good.index(False)]
            raise InputError(f"the metric of {piece.names[0]} has NaN or infinity ({name}): gradients overflowed")

    def _each(self, X: Tensor, do: Callable[[Piece, Tensor], Tensor]) -> Tensor:
        """Apply `do` to every piece's share of X [p, k]."""
        out = torch.empty_like(X)
        for piece in self.pieces:
            self.space.put(piece.names, do(piece, self.space.take(piece.names, X)), out)
        return out

    def _matmat(self, X: Tensor) -> Tensor:
        return self._each(X, lambda piece, part: piece.matmat(part))

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self.symmetric:
            return self._matmat(Y)
        raise UnsupportedError("a product of two metrics has no adjoint here; multiply in the other order")

    def _sum(self, t: Tensor) -> Tensor:
        """The sum over all that hold pieces of the metric: here, that is one process."""
        return t

    def _places(self) -> tuple[list[slice], int]:
        """Where the pieces' eigenvalues lie among all of them, and how many there are."""
        ends = list(accumulate(len(piece.eigenvalues()) for piece in self.pieces))
        return [slice(a, b) for a, b in zip([0, *ends], ends)], ends[-1]

    def _whole(self, pieces: list[Piece | None]) -> list[Piece] | None:
        """The pieces; None where one is missing."""
        found = [piece for piece in pieces if piece is not None]
        return found if len(found) == len(pieces) else None

    @checked
    def diagonal(self, chunk: int = 256) -> Tensor:
        """[p]."""
        out = torch.zeros(self.shape[0], 1, dtype=self.dtype, device=self.device)
        for piece in self.pieces:
            self.space.put(piece.names, piece.diagonal()[:, None], out)
        return self._sum(out)[:, 0]

    def trace(self) -> Tensor:
        """Sum of the pieces' traces."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return self._sum(torch.stack([zero, *(piece.trace() for piece in self.pieces)]).sum())

    def frobenius_norm(self) -> Tensor:
        """Root of the sum of the pieces' squared norms."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return self._sum(torch.stack([zero, *(piece.frobenius_squared() for piece in self.pieces)]).sum()).sqrt()

    def spectral_norm(self) -> Tensor:
        """Largest |eigenvalue|."""
        try:
            zero = torch.zeros(1, dtype=self.dtype, device=self.device)  # which low rank has but does not hold
            return torch.cat([self.eigenvalues().abs(), zero]).max()
        except UnsupportedError:
            return super().spectral_norm()

    @checked
    def to_dense(self, chunk: int = 256) -> Tensor:
        """[p, p], in the flat parameter order; the pieces are put in as they are, whatever the chunk."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        index = torch.arange(self.shape[0], device=self.device)
        for piece in self.pieces:
            mine = self.space.take(piece.names, index)
            out[mine[:, None], mine] = piece.to_dense()
        return self._sum(out)

    def _check_damping(self, damping: float, mode: Mode) -> None:
        check_number(damping, "damping", least=0)
        if mode == "factored" and not any(kind in {"kfac", "ekfac"} for _, _, kind, _ in self.plan.rows):
            raise UnsupportedError(f"{self.representation!r} has no factored damping: kfac and ekfac have it")

    @checked
    def solve(
        self, v: Vector, damping: float = 0.0, mode: Mode = "exact", complement: Literal["keep", "drop"] = "keep"
    ) -> Any:
        """(F + damping I)^-1 v, in v's form.

        mode "factored": KFAC damps its factors, (A + pi sqrt(damping) I) (x) (B + sqrt(damping) / pi I), EKFAC uses
        the deep-net damping made of the factors' eigenvalues; other pieces are damped exactly.
        complement "drop" (lowrank only): solve in the span of the rows instead of all of the space.
        """
        self._check_damping(damping, mode)
        X, back = self._columns(v, "solve")
        if complement == "keep":
            return back(self._each(X, lambda piece, part: piece.solve(part, damping, mode)))

        def drop(piece: Piece, part: Tensor) -> Tensor:
            if not isinstance(piece, LowRankPiece):
                raise UnsupportedError("complement is a choice of representation='lowrank' only")
            return piece.solve(part, damping, mode, complement)

        return back(self._each(X, drop))

    @checked
    def inverse(self, damping: float = 0.0, mode: Mode = "exact") -> LinearOperator:
        """(F + damping I)^-1 as a metric; lazily for quasidiagonal and lowrank pieces, whose inverses are full."""
        self._check_damping(damping, mode)
        pieces = self._whole([piece.inverse(damping, mode) for piece in self.pieces])
        what = f"inverse {self.info.get('what', 'metric')}"
        return super().inverse(damping, mode) if pieces is None else self._like(pieces, what)

    @checked
    def power(self, exponent: float, cutoff: float = 0.0) -> BlockMetric:
        """F^e, piece by piece."""
        return self._like([piece.power(exponent, cutoff) for piece in self.pieces], f"power {exponent:g}")

    @checked
    def sample(
        self, n: int, damping: float = 0.0, generator: torch.Generator | None = None, mode: Mode = "exact"
    ) -> Tensor:
        """n draws of N(0, (F + damping I)^-1), [n, p]; the generator is one of the CPU (seed 0 if None)."""
        self._check_damping(damping, mode)
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        Z = torch.randn(self.shape[0], check_count(n, "n"), generator=generator, dtype=torch.float64, device="cpu")
        Z = Z.to(self.device, self.dtype)
        return self._each(Z, lambda piece, part: piece.sample(part, damping, mode)).T

    def _spectrum(self) -> Tensor:
        """All eigenvalues that the representation holds, piece after piece."""
        places, count = self._places()
        out = torch.zeros(count, dtype=self.dtype, device=self.device)
        for piece, at in zip(self.pieces, places):
            out[at] = piece.eigenvalues()
        return self._sum(out)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues the representation holds, descending."""
        return self._spectrum().sort(descending=True).values

    @checked
    def eigh(self, k: int | None = None) -> Eigenpairs:
        """The k largest eigenpairs (all if None), by pieces; low rank gives its non-zero ones by duality."""
        values = self._spectrum()
        k = len(values) if k is None else check_between(k, "k", 1, len(values))
        values, index = values.sort(descending=True)
        hot = torch.zeros(len(values), k, dtype=self.dtype, device=self.device)
        hot[index[:k], torch.arange(k, device=self.device)] = 1.0
        vectors = self.from_eigenbasis(hot)
        residuals = (self._matmat(vectors) - vectors * values[:k]).norm(dim=0)
        done = torch.ones(k, dtype=torch.bool, device=self.device)
        return Eigenpairs(values[:k], vectors, residuals, done, 0, k)

    @checked
    def to_eigenbasis(self, v: Tensor) -> Tensor:
        """Coordinates of v [p] or [p, k] in the eigenbasis, piece after piece."""
        X, back = self._columns(v, "to_eigenbasis")
        places, count = self._places()
        coordinates = torch.zeros(count, X.shape[1], dtype=self.dtype, device=self.device)
        for piece, at in zip(self.pieces, places):
            coordinates[at] = piece.to_eigenbasis(self.space.take(piece.names, X))
        out: Tensor = back(self._sum(coordinates))
        return out

    @checked
    def from_eigenbasis(self, v: Tensor) -> Tensor:
        """Back from coordinates to [p] or [p, k]."""
        places, _ = self._places()
        X = v.reshape(len(v), -1)
        out = torch.zeros(self.shape[0], X.shape[1], dtype=self.dtype, device=self.device)
        for piece, at in zip(self.pieces, places):
            self.space.put(piece.names, piece.from_eigenbasis(X[at]), out)
        out = self._sum(out)
        return out[:, 0] if v.dim() == 1 else out

    def _like(self, pieces: list[Piece], what: str) -> BlockMetric:
        return BlockMetric(self.space, pieces, self.plan, {**self.info, "what": what})

    def _pairwise(self, other: Any, do: Callable[[Piece, Piece], Piece | None]) -> list[Piece] | None:
        """Pieces of a binary operation, or None where a pair does not fit."""
        if not isinstance(other, BlockMetric) or other.space.shapes != self.space.shapes:
            return None
        theirs = {piece.names: piece for piece in other.pieces}
        if set(theirs) != {piece.names for piece in self.pieces}:
            return self._whole([None])
        return self._whole([do(piece, theirs[piece.names]) for piece in self.pieces])

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """F + G: a metric where the representation is closed under sums, else a lazy operator."""
        pieces = self._pairwise(other, lambda a, b: a.add(b))
        return super().__add__(other) if pieces is None else self._like(pieces, "sum")

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return self + (-1.0 * other) if isinstance(other, BlockMetric) else super().__sub__(other)

    def __mul__(self, scalar: float) -> LinearOperator:
        lazy = super().__mul__(scalar)  # checks the number
        pieces = self._whole([piece.scale(float(scalar)) for piece in self.pieces])
        return lazy if pieces is None else self._like(pieces, str(self.info.get("what", "metric")))

    def __matmul__(self, v: Any) -> Any:
        """F @ v, or the product of two metrics: a metric where the representation is closed, else lazy."""
        pieces = self._pairwise(v, lambda a, b: a.product(b)) if isinstance(v, BlockMetric) else None
        return super().__matmul__(v) if pieces is None else self._like(pieces, "product")

    @checked
    def save(self, path: str | Path) -> Path:
        """Write to one safetensors file, with a checksum per array; it appears whole or not at all."""
        path = Path(path)
        arrays, entries = self._entries(range(len(self.pieces)))
        write_tensors(path, arrays, {"biascope": json.dumps(self._header(entries))})
        path.with_name(path.name + INDEX).unlink(missing_ok=True)  # an older metric in shards
        return path

    def _entries(self, numbers: Iterable[int]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """What is saved of the pieces, which have these numbers: arrays, and what a header says of them."""
        arrays: dict[str, Tensor] = {}
        entries = []
        for i, piece in zip(numbers, self.pieces):
            mine = {name: t.detach().cpu().contiguous().clone() for name, t in piece.arrays().items()}
            arrays |= {f"{i}/{name}": t for name, t in mine.items()}
            sums = {name: checksum(t) for name, t in mine.items()}
            entries.append(
                {
                    "kind": piece.kind,
                    "names": list(piece.names),
                    "header": piece.header(),
                    "arrays": sums,
                    "cost": piece.cost(),
                }
            )
        return arrays, entries

    def _header(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """What is saved beside the arrays."""
        return {
            "format": FORMAT,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shapes": {name: list(shape) for name, shape in self.space.shapes.items()},
            "plan": [self.plan.representation, [[n, list(s), k, w] for n, s, k, w in self.plan.rows]],
            "info": self.info,
            "pieces": entries,
        }


@checked
def load_curvature(path: str | Path, device: torch.device | str = "cpu", *, group: Any = None) -> BlockMetric:
    """Read a metric that `F.save(path)` wrote, by one process or by several.

    Args:
        path: what `save` was given.
        device: where to put it.
        group: a `torch.distributed` process group or device mesh, all of whose ranks make this call: each keeps a
            share. It need not be of as many ranks as have written the metric.

    Example:
        >>> import biascope as bs, tempfile
        >>> F = bs.fisher(torch.nn.Linear(3, 2), torch.randn(5, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     G = load_curvature(F.save(f"{folder}/fisher.safetensors"))
        >>> torch.equal(F.to_dense(), G.to_dense())
        True
    """
    path, team = Path(path), processes(group)
    index = path.with_name(path.name + INDEX)
    try:
        with team:
            if index.exists() and not path.exists():
                header = read_json(index)
            else:
                header = json.loads(read_tensors(path, ())[1]["biascope"])
            if header["format"] != FORMAT:
                raise CorruptError(f"{path}: format {header['format']!r}, this version of biascope reads {FORMAT}")
            return _assemble(header, device_of(device), path, team)
    except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as e:
        raise CorruptError(f"{path} is not a metric saved by biascope, or damaged ({e!r}); save it again") from None


def _assemble(header: dict[str, Any], device: torch.device, path: Path, team: Processes) -> BlockMetric:
    entries = header["pieces"]
    owners = team.deal([entry["cost"] for entry in entries]) if team.size > 1 else [0] * len(entries)
    mine = [i for i, owner in enumerate(owners) if owner == team.rank]
    files: dict[Path, list[str]] = {}
    for i in mine:
        file = path.with_name(entries[i]["file"]) if "file" in entries[i] else path
        files.setdefault(file, []).extend(f"{i}/{name}" for name in entries[i]["arrays"])
    arrays = {name: t for file, names in files.items() for name, t in read_tensors(file, names)[0].items()}
    pieces = []
    for i in mine:
        entry, own = entries[i], {}
        for name, expected in entry["arrays"].items():
            t = arrays.pop(f"{i}/{name}")
            if checksum(t) != expected:
                raise CorruptError(f"{path}: array {name} of {entry['names'][0]} is damaged (checksum); save it again")
            own[name] = t.to(device)
        pieces.append(Piece.kinds[entry["kind"]].load(tuple(entry["names"]), own, entry["header"]))
    shapes = {name: tuple(shape) for name, shape in header["shapes"].items()}
    space = ParameterSpace(shapes, getattr(torch, header["dtype"]), device)
    representation, rows = header["plan"]
    plan = Plan(representation, tuple((n, tuple(s), k, w) for n, s, k, w in rows))
    if team.size > 1:
        from biascope.curvature.owned import OwnedMetric

        return OwnedMetric(space, pieces, plan, header["info"], team, mine)
    return BlockMetric(space, pieces, plan, header["info"])
