"""The passes over the data: Kronecker factors, EKFAC's scalings, and one `build_pieces` for all kinds of sums."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from biascope.curvature import contract
from biascope.curvature.centring import COPIES, centred_pieces, wide, widened, widened_inputs
from biascope.curvature.contract import (
    add_gradients,
    add_homogeneous,
    add_inputs,
    add_rows,
    add_squares,
    add_turned_squares,
    by_example,
    mean_moment,
    pieces_of,
    rotate,
    squared_cost,
    squares,
    summed_rows,
    token_gradients,
)
from biascope.curvature.kronecker import ROOM, EigenPiece, Homogeneous, KroneckerPiece, decompose
from biascope.curvature.ladder import demand
from biascope.curvature.owned import decomposed, to_owners
from biascope.curvature.passes import Chunk, InputFactors, Pass
from biascope.curvature.patches import PatchMoment, patch_moment
from biascope.curvature.pieces import ParameterSpace, Piece
from biascope.curvature.plain_sums import Sum
from biascope.curvature.plan import Unit
from biascope.network.layers.blocks import Block, MatrixFactor
from biascope.network.layers.rules import Conv
from biascope.support.errors import UnsupportedError

FEW_BYTES = 2**28  # of sums, for which free memory is not measured


class KroneckerSum(Sum):
    """A = mean over examples of sum_t a a^T, B = mean over positions of sum_k g g^T (expand).

    With reduce, a is first averaged and g summed over the positions. Several uses of one weight count as more
    positions. Under SUA, A is the channels' part of the patches' second moment: its nearest matrix A_c (x) I. Pixels
    count as often as patches cover them; a covariance pooled over all pixels alike differs at borders and strides.

    Where labels are given and some positions have none (-100), the inputs of those are left out (expand), and so are
    they from the number of positions: A is of what is labelled. But only where a layer has the positions of the outputs
    and no gradient at the one in question: below attention, a token without a label is read by others and counts. Of
    embeddings and of weights that are used several times, all positions count.
    """

    kinds = ("kfac", "ekfac")

    def __init__(self, unit: Unit, space: ParameterSpace) -> None:
        self.unit, self.space = unit, space
        self.layout = homogeneous(unit)
        self.A: Tensor | None = None
        self.B: Tensor | None = None
        self.moment: PatchMoment | None = None
        self.positions = 0

    def _begin(self, factor: MatrixFactor, patches: bool = False) -> None:
        """Empty sums; with `patches`, those of a convolution are formed, as some are left out."""
        L = self.layout
        if len(factor.rules) == 1 and self.unit.sharing == "expand" and not self.unit.sua and not patches:
            self.moment = patch_moment(factor.rules[0], factor.inputs[0].shape, self.space.dtype, self.space.device)
        if self.moment is None:
            table = factor.block.is_embedding
            self.A = self.zeros(L.groups, L.d_in) if table else self.zeros(L.groups, L.columns, L.columns)
        self.B = self.zeros(L.groups, L.d_out, L.d_out)

    def add_inputs(self, factors: InputFactors) -> None:  # noqa: D102
        factor, L = factors[self.unit.blocks[0].names], self.layout
        if factor.block.is_plain:  # the first products are the sums
            add = add_homogeneous if L.bias else add_rows
            for s in pieces_of(factor, 2 * L.d_in):
                a = factor.plain_inputs(s)
                self.positions += a.shape[0]
                self.A = add(None if self.A is None else self.A[0], a).unsqueeze(0)
            return
        if self.B is None:
            self._begin(factor)
        self._add_inputs(factor, L)

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        factor = chunk.matrix(self.unit.blocks[0].names)
        if chunk.with_inputs:
            counted = self._counted(factor, chunk)
            if counted is None:
                self.add_inputs({factor.block.names: factor})
            else:
                self._add_counted(factor, counted)
        self._add_gradients(factor)

    def _add_gradients(self, factor: MatrixFactor) -> None:
        z = factor.block.matrix
        if factor.block.is_plain:
            for s in pieces_of(factor, 2 * factor.k * z.d_out):
                g = factor.plain_gradients(s).flatten(0, 1)
                self.B = add_rows(None if self.B is None else self.B[0], g).unsqueeze(0)
            return
        assert self.B is not None
        alone = by_example(z.d_out, z.positions, self.B.device)
        for s in pieces_of(factor, z.groups * z.d_out * (z.d_out if alone else 2 * factor.k * z.positions)):
            G = factor.cotangents(s)
            if factor.block.is_embedding:
                G = G * (factor.indices(s) >= 0)[None, :, None, None]
            add_gradients(self.B, G.sum(-1, keepdim=True) if self.unit.sharing == "reduce" else G)

    def _add_inputs(self, factor: MatrixFactor, L: Homogeneous) -> None:
        z = factor.block.matrix
        if self.moment is not None:
            self.positions += factor.n * z.positions
            for s in pieces_of(factor, factor.inputs[0].shape[1] * self.moment.columns):
                self.moment.add(factor.inputs[0][s].flatten(0, 1))
            return
        if factor.block.is_embedding:
            assert self.A is not None
            idx = factor.indices(slice(0, factor.n))
            self.A[0] += torch.bincount(idx[idx >= 0], minlength=L.d_in).to(self.A.dtype)
            self.positions += int((idx >= 0).sum())
            return
        for s in pieces_of(factor, 2 * z.groups * z.positions * z.d_in):
            A = factor.operand(s)
            self.positions += len(A) * A.shape[-1]
            self._add_rows(A)

    def _add_rows(self, A: Tensor) -> None:
        L = self.layout
        if self.A is None:
            self.A = self.zeros(L.groups, L.columns, L.columns)
        if L.offsets > 1:
            A = offsets_apart(A, L).movedim(3, 0).flatten(0, 1) / L.offsets**0.5
        add_inputs(self.A, A.mean(-1, keepdim=True) if self.unit.sharing == "reduce" else A, L.bias)

    def _counted(self, factor: MatrixFactor, chunk: Chunk) -> Tensor | None:
        """Which positions [n, T] of a layer count: those with a label or a gradient; None where all do."""
        z, has_label = factor.block.matrix, chunk.has_label
        if has_label is None or self.unit.sharing == "reduce" or factor.block.is_embedding or len(factor.rules) > 1:
            return None
        if z.positions != has_label.shape[1]:
            return None
        if not chunk.whole:
            raise UnsupportedError(
                "KFAC with labels that are missing (-100) needs all cotangents of an example at once, which do not fit "
                "max_memory: take estimator='monte-carlo', or more memory"
            )
        pieces = pieces_of(factor, 2 * factor.k * z.groups * z.d_out * z.positions)
        return has_label | torch.cat([(factor.cotangents(s) != 0).any(3).any(2).any(0) for s in pieces])

    def _add_counted(self, factor: MatrixFactor, counted: Tensor) -> None:
        """Inputs of some positions only, each as an example of its own."""
        z = factor.block.matrix
        if self.B is None:
            self._begin(factor, patches=True)
        for s in pieces_of(factor, 2 * z.groups * z.positions * z.d_in):
            A = factor.operand(s).movedim(-1, 1)[counted[s]][..., None]  # [positions, g, i, 1]
            self.positions += len(A)
            self._add_rows(A)

    def finish(self, n: int) -> KroneckerPiece:  # noqa: D102
        if self.B is None:  # a process without examples
            L, table = self.layout, self.unit.blocks[0].is_embedding
            self.A = self.zeros(L.groups, L.d_in) if table else self.zeros(L.groups, L.columns, L.columns)
            self.B = self.zeros(L.groups, L.d_out, L.d_out)
        count = n if self.unit.sharing == "reduce" else max(1, self.positions)
        if self.moment is not None:
            A = self.moment.finish(self.layout.bias)[None].div_(n)
            if self.A is not None:
                A += mean_moment(self.A, n)
        else:
            assert self.A is not None
            A = self.A.div_(n) if self.A.dim() == 2 else mean_moment(self.A, n)
        return KroneckerPiece(self.unit.names, mean_moment(self.B, count), A, self.layout)


class EigenSum(Sum):
    """EKFAC's scalings: mean of squared per-example gradients in the eigenbasis. They take the memory of `basis.s`."""

    def __init__(self, unit: Unit, space: ParameterSpace, basis: EigenPiece) -> None:
        self.unit, self.space = unit, space
        self.basis = basis
        g, e, o, i = basis.s.shape
        self.by_offset = basis.s.contiguous().view(g, o, e, i).zero_()  # its memory: it is not needed any more
        self.s = self.by_offset.view(g, o, e * i)

    def add(self, chunk: Chunk) -> None:  # noqa: D102
        factor, E = chunk.matrix(self.unit.blocks[0].names), self.basis
        z, L = factor.block.matrix, self.basis.layout
        assert E.U_B is not None
        if factor.block.is_embedding:
            for s in pieces_of(factor, 4 * factor.k * z.d_out * z.positions):
                tokens, g = token_gradients(factor, s)
                self.s[0].index_add_(1, tokens, (g @ E.U_B[0]).square().sum(0).T)
            return
        assert E.U_A is not None
        for s in pieces_of(factor, 2 * squared_cost(factor, L.bias)):
            if factor.block.is_plain:
                a, U_A = factor.plain_inputs(s), E.U_A[0]
                turned = torch.addmm(U_A[-1], a, U_A[:-1]) if L.bias else a @ U_A
                self.s[0].addmm_(squares(factor.plain_gradients(s) @ E.U_B[0]).T, turned.square_())
                continue
            A, G = factor.operand(s), rotate(E.U_B, factor.cotangents(s))
            if L.offsets == 1:
                if L.groups == 1 and z.positions > factor.k * L.d_out:
                    add_turned_squares(self.s[0], G, A, E.U_A[0], L.bias)
                else:
                    add_squares(self.s, G, rotate(E.U_A, A, L.bias))
                continue
            apart = offsets_apart(A, L)
            if A.device.type in contract.CACHED:
                for e, own in enumerate(self.by_offset.unbind(2)):
                    add_squares(own, G, rotate(E.U_A, apart[:, :, :, e]))
            else:  # one copy, to [g, b, T, e, c], and one product for all
                rows = apart.permute(1, 0, 4, 3, 2)
                turned = rows.reshape(L.groups, -1, L.d_in) @ E.U_A
                add_squares(self.s, G, turned.view(*rows.shape[:3], -1).mT.transpose(0, 1))

    def finish(self, n: int) -> Piece:  # noqa: D102
        return replace(self.basis, s=self.by_offset.transpose(1, 2).contiguous().div_(n))


SCALINGS: dict[str, Callable[..., Sum]] = {"": EigenSum}  # by the form of a unit's factors


def offsets_apart(A: Tensor, L: Homogeneous) -> Tensor:
    """Patches [b, g, c e, T] as [b, g, c, e, T]: the entries of channel c at kernel offset e."""
    return A.reshape(*A.shape[:2], L.d_in, L.offsets, A.shape[3])


def homogeneous(unit: Unit) -> Homogeneous:
    """Layout of a matrix block's parameters."""
    z, rule = unit.blocks[0].matrix, unit.blocks[0].rule
    assert rule is not None
    offsets = prod(rule.kernel) if unit.sua and isinstance(rule, Conv) else 1
    return Homogeneous(z.groups, z.d_out, z.d_in // offsets, offsets, len(unit.names) == 2, rule.input_major)


def build_pieces(data: Pass, units: list[Unit], space: ParameterSpace, centred: bool) -> tuple[list[Piece], list[int]]:
    """One pass over the data for all sums, a second for EKFAC's scalings (on the kept factors where they fit).

    Of several processes, each gets the pieces that it owns, in rounds of layers whose sums fit in memory, each with
    passes of its own; the numbers say of which units they are. Sums of a centred metric are in float64, which a
    difference of two of them needs. The caller asks `data.finite` whether the outputs,
    and the pieces, are numbers: one wait for all of them.
    """
    data.copies = COPIES if centred else data.copies
    summed = wide(space) if centred else space
    found: list[Piece] = []
    mine: list[int] = []
    load, first = [0.0] * data.team.size, 0
    for some in rounds(data, units, summed) if data.team.size > 1 else [units]:
        own, places = _summed_pieces(data, some, summed, keep=centred), list(range(len(some)))
        if data.team.size > 1:
            own, places = to_owners(data.team, own, load)
        if centred:
            means = mean_gradients(data, some, summed)
            data.kept = None
            own = centred_pieces(own, [means[some[j]] for j in places], space.dtype)
        found += own
        mine += [first + j for j in places]
        first += len(some)
    return found, mine


def rounds(data: Pass, units: list[Unit], space: ParameterSpace) -> list[list[Unit]]:
    """Units whose sums every process can hold at once, beside the passes: in as few rounds as that takes."""
    needs = [unit_bytes(u, space) for u in units]
    if data.max_memory is None and sum(needs) <= FEW_BYTES:
        return [units]
    room = min(data.team.gather(data.limit)) // 2
    out: list[list[Unit]] = [[]]
    held = 0
    for unit, need in zip(units, needs, strict=True):
        if out[-1] and held + need > room:
            out.append([])
            held = 0
        out[-1].append(unit)
        held += need
        data.reserved = max(data.reserved, min(held, room))
    return out


def unit_bytes(unit: Unit, space: ParameterSpace) -> int:
    """Of the sums of a unit, with what its decomposition takes."""
    if unit.kind in {"kfac", "ekfac"}:
        return demand([unit], space).bytes
    p = space.numel(unit.names)
    return space.dtype.itemsize * (p * p if unit.kind == "dense" else 2 * p)


def _summed_pieces(data: Pass, units: list[Unit], space: ParameterSpace, keep: bool) -> list[Piece]:
    """Second moments in the precision of `space`; with `keep`, the factors are kept for one more pass."""
    second = [j for j, u in enumerate(units) if u.kind == "ekfac"]
    sums: list[Sum] = [Sum.of_kind[u.form or u.kind](u, space) for u in units]
    widen = space.dtype != data.f.dtype
    for step in data.steps(blocks_of(units), keep=bool(second) or keep, check=False):
        if step.inputs is not None:
            inputs = widened_inputs(step.inputs) if widen else step.inputs
            for total in sums:
                total.add_inputs(inputs)
        for chunk in widened(step.chunks) if widen else step.chunks:
            for total in sums:
                total.add(chunk)
    if data.team.size > 1:
        add_positions(data, sums)
    data.errors = {total.unit.names: total.errors() for total in sums if total.unit.form}  # and samples are freed
    pieces = [total.finish(data.stream.n) for total in sums]
    del sums
    if second:
        data.finite()
        factors = [piece for j in second if isinstance(piece := pieces[j], KroneckerPiece)]
        full, room = [j for j in second if units[j].form != "reduced"], ROOM if space.device.type == "cuda" else 0
        while full:  # together, on a GPU side by side, as far as there is room; what is decomposed is freed
            count, held = 0, 0
            while count < len(full) and (not count or held < room or data.team.size > 1):
                held += factors[count].B.nbytes + factors[count].A.nbytes
                count += 1
            some, factors = factors[:count], factors[count:]
            bases = decompose(some) if data.team.size == 1 else decomposed(data.team, some)
            for j, basis in zip(full[:count], bases, strict=True):
                pieces[j] = basis
            full = full[count:]
            del some, bases
        scalings = [SCALINGS[units[j].form](units[j], space, pieces[j]) for j in second]
        chunks = data.chunks(blocks_of([units[j] for j in second]))
        for chunk in widened(chunks) if widen else chunks:
            for scaling in scalings:
                scaling.add(chunk)
        for j, scaling in zip(second, scalings, strict=True):
            pieces[j] = scaling.finish(data.stream.n)
    if not keep:
        data.kept = None
    return pieces


def add_positions(data: Pass, sums: list[Sum]) -> None:
    """Positions that were counted by any of the processes, over which the output factors are means."""
    counted = [total for total in sums if isinstance(total, KroneckerSum)]
    counts = torch.tensor([total.positions for total in counted], dtype=torch.float64, device=data.f.device)
    for total, count in zip(counted, data.team.sum(counts).tolist(), strict=True):
        total.positions = round(count)


def blocks_of(units: list[Unit]) -> list[Block]:
    """All blocks, each once."""
    return list({b.names: b for u in units for b in u.blocks}.values())


def mean_gradients(data: Pass, units: list[Unit], space: ParameterSpace) -> dict[Unit, Tensor]:
    """Mean over the examples of the gradient for every cotangent: {unit: [p, k]}, in the precision of `space`."""
    width = data.family.width
    totals = {u: torch.zeros(width, space.numel(u.names), dtype=space.dtype, device=space.device) for u in units}
    chunks = data.chunks(blocks_of(units))
    for chunk in chunks if space.dtype == data.f.dtype else widened(chunks):
        for u in units:
            parts: dict[str, Tensor] = {}
            for b in u.blocks:
                parts |= summed_rows(chunk.factors[b.names], u.names)
            totals[u][chunk.ks.start : chunk.ks.stop] += torch.cat([parts[name] for name in u.names], -1)
    if data.team.size > 1:
        data.team.sum(*totals.values())
    return {u: t.T / data.stream.n for u, t in totals.items()}
