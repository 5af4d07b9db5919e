"""Which parameters get which representation, and why: the ladder, written down for the user.

`kfac` and `ekfac` are ladders: Kronecker factors where a layer has them (linear, convolution, embedding, attention
projections), an exact block for what is small, unit-wise arrows for large normalisation layers, a diagonal for the
rest. No parameter is left out.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from biascope.curvature.pieces import ParameterSpace
from biascope.network.layers.blocks import Anatomy, Block
from biascope.support.errors import InputError
from biascope.support.memory import readable
from biascope.support.tables import columns, grid

Name = Literal["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank", "implicit", "mixed", "eye"]
REPRESENTATIONS: tuple[Name, ...] = get_args(Name)
BLOCK_LIMIT = 1024  # parameters up to which an exact block is cheap
SIDE_LIMIT = 8192  # rows or columns up to which factors are made of whole gradients
WHOLE = ("dense", "lowrank")
LAYERWISE = ("diagonal", "block", "quasidiagonal", "kfac", "ekfac")


@dataclass(frozen=True)
class Side:
    """How one of the two Kronecker factors of a layer is held; `count` blocks, or rows of low rank."""

    kind: Literal["full", "low rank", "blocks", "diagonal", "shared"] = "full"
    count: int = 0

    def __str__(self) -> str:
        return f"in {self.count} blocks" if self.kind == "blocks" else self.kind


@dataclass(frozen=True)
class Unit:
    """Parameters that form one piece."""

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    kind: str  # dense | diagonal | quasidiagonal | kfac | ekfac | lowrank
    why: str
    sharing: str = "expand"
    sua: bool = False
    output: Side = Side()
    input: Side = Side()
    form: str = ""  # of the factors: "reduced", held as less than a matrix, or "gradients", made of whole gradients


@dataclass(frozen=True)
class Plan:
    """What every parameter got; `print(F.plan)` is a table."""

    representation: str
    rows: tuple[tuple[str, tuple[int, ...], str, str], ...]  # parameter, shape, representation, why

    def __getitem__(self, name: str) -> str:
        """The representation of one parameter."""
        for row in self.rows:
            if row[0] == name:
                return row[2]
        raise InputError(f"no parameter is called {name!r}")

    def _repr_html_(self) -> str:
        """The table of `print(F.plan)`, for notebooks."""
        rows = [(name, list(shape), kind, why) for name, shape, kind, why in self.rows]
        title = f"{self.representation}: {len(rows)} parameters"
        return grid(title, ["parameter", "shape", "representation", "why"], rows)

    def __str__(self) -> str:
        rows = [(name, list(shape), kind, why) for name, shape, kind, why in self.rows]
        return columns(["parameter", "shape", "representation", "why"], rows)


def make_units(
    found: Anatomy,
    space: ParameterSpace,
    representation: str | Mapping[str, str],
    sharing: str,
    sua: bool,
    limit: Callable[[], int],  # bytes; asked only where something large is wanted
) -> list[Unit]:
    """The units of a representation, in the model's order; not to be changed."""
    units = _units(found, space, representation, sharing, sua)
    for unit in units:
        _fits(unit, space, limit)
    return units


def _units(
    found: Anatomy, space: ParameterSpace, representation: str | Mapping[str, str], sharing: str, sua: bool
) -> list[Unit]:
    if representation in WHOLE:
        return [Unit(tuple(space.shapes), found.blocks, str(representation), "one matrix for everything")]
    layers: dict[str, list[Block]] = {}
    for b in found.blocks:
        layers.setdefault(b.layer, []).append(b)
    units: list[Unit] = []
    used: set[str] = set()
    for layer, blocks in layers.items():
        wanted = _wanted(representation, layer, blocks, used)
        units += _layer_units(blocks, space, wanted, sharing, sua)
    if isinstance(representation, Mapping) and (unknown := set(representation) - used - {"*"}):
        raise InputError(f"no layer, parameter or rule matches {sorted(unknown)[0]!r}; layers: {', '.join(layers)}")
    return units


def _wanted(representation: str | Mapping[str, str], layer: str, blocks: list[Block], used: set[str]) -> str:
    if isinstance(representation, str):
        return "ekfac" if representation == "mixed" else representation
    kinds = {b.reason.split(" ")[0] for b in blocks}
    keys = [layer, *(n for b in blocks for n in b.names)]
    for pattern, choice in representation.items():
        if choice not in LAYERWISE:
            raise InputError(f"{pattern!r}: {choice!r} is not a layer's representation; choose {', '.join(LAYERWISE)}")
        if pattern in kinds or any(fnmatch.fnmatchcase(key, pattern) for key in keys):
            used.add(pattern)
            return choice
    return "ekfac"


def _layer_units(blocks: list[Block], space: ParameterSpace, wanted: str, sharing: str, sua: bool) -> list[Unit]:
    """Units of one layer."""
    if wanted == "block":
        return [Unit(_ordered(blocks, space), tuple(blocks), "dense", "exact block of the layer")]
    if wanted == "diagonal":
        return [Unit(b.names, (b,), "diagonal", "diagonal") for b in blocks]
    units = []
    pair = _affine_pair(blocks)
    rest = [b for b in blocks if b not in pair] if pair else blocks
    for b in rest:
        if wanted == "quasidiagonal":
            arrow = b.kind == "matrix" and len(b.names) == 2
            kind, why = ("quasidiagonal", "an arrow per unit") if arrow else ("diagonal", "no bias to go with it")
            units.append(Unit(b.names, (b,), kind, why))
        elif b.kind == "matrix":
            units += _kronecker_units(b, wanted, sharing, sua)
        elif b.numel > BLOCK_LIMIT and (shape := matrix_shape(space.shapes[b.names[0]])) is not None:
            each = f"factors of the gradients of {shape[0]} matrices" if shape[0] > 1 else "factors of the gradients"
            units.append(Unit(b.names, (b,), "ekfac", f"{b.reason}; {each}", form="gradients"))
        elif b.numel <= BLOCK_LIMIT:
            units.append(Unit(b.names, (b,), "dense", f"no Kronecker factors ({b.reason}); exact block"))
        else:
            units.append(Unit(b.names, (b,), "diagonal", f"no Kronecker factors ({b.reason}); too large for a block"))
    if pair:
        names = tuple(n for b in pair for n in b.names)
        if wanted != "quasidiagonal" and space.numel(names) <= BLOCK_LIMIT:
            units.append(Unit(names, tuple(pair), "dense", "normalisation layer; exact block"))
        else:
            units.append(Unit(names, tuple(pair), "quasidiagonal", "normalisation layer; scale and shift per unit"))
    return units


def _kronecker_units(b: Block, wanted: str, sharing: str, sua: bool) -> list[Unit]:
    if sua and b.reason.startswith("conv rule"):  # the bias would be repeated at every kernel offset: it stands alone
        bias = [Unit(b.names[1:], (b,), "dense", "bias of an SUA convolution; exact block")] if b.names[1:] else []
        return [Unit(b.names[:1], (b,), wanted, f"{b.reason}, SUA", sharing, True), *bias]
    shared = b.matrix.positions > 1 and "embedding" not in b.reason
    note = f", {sharing} over {b.matrix.positions} positions" if shared else ""
    return [Unit(b.names, (b,), wanted, b.reason + note, "expand" if "embedding" in b.reason else sharing)]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Groups, rows and columns of a parameter whose gradients are matrices with factors of a bearable size, else None.

    Vectors, tables of a vocabulary and what broadcasts have none.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < 2 or max(shape[-2:]) > SIDE_LIMIT:
        return None
    return (1, *shape) if len(shape) == 2 else shape  # type: ignore[return-value]


def _affine_pair(blocks: list[Block]) -> list[Block]:
    """Scale and shift of a normalisation layer, if these are what the layer has."""
    pair = [b for b in blocks if b.kind == "rows" and b.reason.startswith("affine rule")]
    if not pair:
        return []
    weights = [b for b in pair if b.names[0].endswith("weight")]
    biases = [b for b in pair if b.names[0].endswith("bias")]
    return [*weights, *biases] if len(weights) == len(biases) == 1 and weights[0].numel == biases[0].numel else []


def _ordered(blocks: list[Block], space: ParameterSpace) -> tuple[str, ...]:
    mine = {n for b in blocks for n in b.names}
    return tuple(n for n in space.shapes if n in mine)


def _fits(unit: Unit, space: ParameterSpace, limit: Callable[[], int]) -> None:
    if unit.kind != "dense":
        return
    p = space.numel(unit.names)
    if 2 * p * p * space.dtype.itemsize > limit():
        raise InputError(
            f"a dense matrix of {p} parameters ({', '.join(unit.names[:2])}{', ...' if unit.names[2:] else ''}) needs "
            f"{readable(p * p * space.dtype.itemsize)}, the budget is {readable(limit())}: use representation='ekfac', "
            "'diagonal' or 'implicit', or raise max_memory"
        )


def describe(units: list[Unit], space: ParameterSpace, representation: str) -> Plan:
    """The plan of the units."""
    of = {name: unit for unit in units for name in unit.names}
    rows = tuple((name, shape, of[name].kind, of[name].why) for name, shape in space.shapes.items())
    return Plan(representation, rows)
