"""Kronecker factors within a memory budget: the ladder down which a factor that does not fit is moved, rung by rung.

full -> low rank (exact: the gradients' rows, at most `WORDS`, span all there is) -> blocks on the diagonal (the heads
of attention, or parts of a wide layer) -> diagonal -> shared (one number). A layer whose outputs are the words of a
vocabulary has no blocks: a word and its neighbours in the list have nothing in common, and its factor diag p - p p^T is
nearly diagonal. The largest side goes down first, as far as it must. A vocabulary of more than `WORDS` goes down one
rung in any case: the eigendecomposition of its factor would take longer than everything else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from biascope.curvature import contract
from biascope.curvature.passes import Pass
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.plan import Plan, Side, Unit, describe, matrix_shape
from biascope.support.errors import InputError
from biascope.support.memory import readable

WORDS = 8192
LEAST = 64  # rows of the smallest block
WORK = 4  # matrices that an eigendecomposition holds beside its input: its result, a copy, and LAPACK's own two
KRONECKER = ("kfac", "ekfac")


@dataclass(frozen=True)
class Demand:
    """What the factors of some units need, in bytes, beside the passes over the data."""

    factors: int
    scalings: int
    largest: int  # of one eigendecomposition
    square: int  # of one layer's squared gradients while they are added up

    @property
    def bytes(self) -> int:
        """At the worst moment: an eigendecomposition, or the second pass."""
        return self.factors + max(self.largest, self.scalings + self.square)


def sides(unit: Unit) -> tuple[int, int, int, bool]:
    """Groups, outputs and inputs (with the bias) per group of a Kronecker unit; is the input side a table's?"""
    z = unit.blocks[0].matrix
    return z.groups, z.d_out, z.d_in + (len(unit.names) == 2), unit.blocks[0].is_embedding


def side_numbers(side: Side, d: int) -> int:
    """Numbers in a factor of d rows."""
    return {
        "full": d * d,
        "low rank": 2 * d * side.count,  # the rows, and the vectors they span
        "blocks": d * d // max(1, side.count),
        "diagonal": d,
        "shared": 1,
    }[side.kind]


def demand(units: Sequence[Unit], space: ParameterSpace) -> Demand:
    """Of all units, as their sides are held."""
    factors = scalings = largest = square = 0
    for u in units:
        if u.form == "gradients":
            shape = matrix_shape(space.shapes[u.names[0]])
            assert shape is not None
            factors += shape[0] * (shape[1] ** 2 + shape[2] ** 2)
            scalings += space.numel(u.names)
            largest = max(largest, WORK * max(shape[1:]) ** 2)
            continue
        if u.kind not in KRONECKER:
            factors += space.numel(u.names) ** (2 if u.kind == "dense" else 1)
            continue
        g, o, i, table = sides(u)
        held = side_numbers(u.output, o), i if table else side_numbers(u.input, i)
        factors += g * sum(held) * (2 if u.kind == "kfac" else 1)  # whose eigenvectors come when it is solved with
        scalings += g * i * (1 if u.output.kind == "shared" else o) if u.kind == "ekfac" or u.form == "reduced" else 0
        if u.kind == "ekfac" and not table and u.output.kind != "shared":
            square = max(square, 2 * g * o * i)  # an example's gradient, and the sum over some examples
        for side, d in ((u.output, o), (Side("diagonal") if table else u.input, i)):
            if side.kind in ("full", "blocks"):
                largest = max(largest, WORK * (d // max(1, side.count if side.kind == "blocks" else 1)) ** 2)
            if side.kind == "low rank":
                largest = max(largest, 2 * d * side.count)
    item = space.dtype.itemsize
    return Demand(factors * item, scalings * item, largest * item, square * item)


def rungs(unit: Unit, which: Literal["output", "input"], words: int, rows: Callable[[], int]) -> Iterator[Side]:
    """The sides below the one a unit has, in their order. `words`: size of the vocabulary; `rows`: of gradients."""
    _, o, i, table = sides(unit)
    now = unit.output if which == "output" else unit.input
    if unit.sua or (which == "input" and table):
        return
    d, bias = (o, False) if which == "output" else (i, len(unit.names) == 2)
    found = [Side("full")]
    if which == "output" and 4 * rows() <= d and rows() <= WORDS:
        found.append(Side("low rank", rows()))
    if not bias and not (which == "output" and d == words):
        found += [Side("blocks", h) for h in (2**j for j in range(1, 20)) if d % h == 0 and d // h >= LEAST]
    found.append(Side("diagonal"))
    if which == "output":
        found.append(Side("shared"))
    yield from found[found.index(now) + 1 :]


def fit(units: Sequence[Unit], space: ParameterSpace, room: int, words: int, rows: Callable[[Unit], int]) -> list[Unit]:
    """The units, with sides moved down the ladder until their demand is at most `room` bytes."""
    out = list(units)
    for j, u in enumerate(out):
        if u.kind in KRONECKER and u.form != "gradients" and sides(u)[1] == words > WORDS:
            below = next(rungs(u, "output", words, lambda u=u: rows(u)), None)  # type: ignore[misc]
            out[j] = u if below is None else replace(u, form="reduced", output=below)
    while (need := demand(out, space)).bytes > room:
        best: tuple[int, int, str, Side] | None = None
        for j, u in enumerate(out):
            if u.kind not in KRONECKER or u.form == "gradients":
                continue
            g, o, i, _ = sides(u)
            for which, d in (("output", o), ("input", i)):
                now = u.output if which == "output" else u.input
                count = lambda u=u: rows(u)  # noqa: E731
                below = next(rungs(u, which, words, count), None)  # type: ignore[arg-type]
                held = g * (side_numbers(now, d) + (o * i if now.kind == "diagonal" else 0))
                if below is not None and (best is None or held > best[0]):
                    best = held, j, which, below
        if best is None:
            raise InputError(
                f"the smallest Kronecker factors of this network need {readable(need.bytes)}, of {readable(room)}: use "
                "representation='diagonal' or 'implicit', fewer parameters (params=...), or raise max_memory"
            )
        _, j, which, below = best
        out[j] = replace(out[j], form="reduced", **{which: below})  # type: ignore[arg-type]
    return [_explained(u, space) if u.form == "reduced" else u for u in out]


def _explained(unit: Unit, space: ParameterSpace) -> Unit:
    """With what it got instead of full factors, and what these would have taken, as the reason."""
    _, o, i, _ = sides(unit)
    parts = [
        f"{which} factor {side} (full: {readable(d * d * space.dtype.itemsize)})"
        for which, side, d in (("output", unit.output, o), ("input", unit.input, i))
        if side.kind != "full"
    ]
    return replace(unit, why=f"{unit.why}; {', '.join(parts)}")


def within(units: list[Unit], space: ParameterSpace, over: Pass, words: int) -> list[Unit]:
    """The units, reduced to what the budget of a pass has room for; the pass is told what the metric takes of it."""
    blocks = list({b.names: b for u in units for b in u.blocks}.values())
    work = min(contract.WORKSPACE.get(space.device.type, 2**26), over.limit // 8)
    passes = max(2 * over.least(blocks), over.limit // 4) + work
    if passes > over.limit:
        raise InputError(
            f"max_memory is {readable(over.limit)}, and the passes over the data need {readable(passes)}: give more"
        )

    def rows(unit: Unit) -> int:
        z = unit.blocks[0].sizes
        return over.count() * over.family.width * (1 if z is None or unit.sharing == "reduce" else z.positions)

    out = fit(units, space, over.limit - passes, words, rows)
    over.reserved = demand(out, space).bytes + work
    return out


def with_errors(units: list[Unit], over: Pass, space: ParameterSpace, representation: str) -> Plan:
    """The plan, with the errors that were measured."""
    out = []
    for u in units:
        found = {k: e for k, e in over.errors.get(u.names, {}).items() if e is not None}
        text = ", ".join(f"{side} factor leaves out {error:.1%}" for side, error in found.items())
        out.append(replace(u, why=f"{u.why}; {text}") if text else u)
    return describe(out, space, representation)
