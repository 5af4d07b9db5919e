"""Who has the inverses of a layer, and how the other ranks come by its natural gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from biascope.curvature.kronecker import EigenPiece
from biascope.network.shards import is_sharded
from biascope.optim.stacks import Curvature
from biascope.optim.team import like, whole
from biascope.optim.units import LayerUnit
from biascope.support.errors import InputError
from biascope.support.processes import Processes


class Dealt:
    """Every unit has an owner, dealt by the work of decomposing it; a share of the ranks from there are its workers.

    Attributes:
        mine: names of the units whose inverses this rank keeps, of all if `share` is 1.
        elsewhere: names of those that it has let go, which others have.
    """

    def __init__(self, team: Processes, units: Sequence[LayerUnit], share: float) -> None:
        if not 0 < share <= 1:
            raise InputError(f"gradient_workers is {share}: a share of the ranks above 0, up to 1, is needed")
        self.team, self.everywhere = team, round(share * team.size) >= team.size
        self.owners = dict(zip((u.name for u in units), team.deal([u.layout.cost for u in units]), strict=True))
        count = max(1, round(share * team.size))
        self.mine = {name for name, owner in self.owners.items() if (team.rank - owner) % team.size < count}
        self.elsewhere: set[str] = set()

    def any(self, one: bool) -> bool:
        """Is it so on any of the ranks?"""
        return one if self.team.size == 1 else bool(self.team.sum(torch.tensor(float(one), device="cpu")) > 0)

    def gradients(self, units: Sequence[LayerUnit]) -> dict[Tensor, Tensor]:
        """Of what is spread out, where not every rank works on all: put together by all, kept by the workers."""
        found: dict[Tensor, Tensor] = {}
        for unit in () if self.everywhere else units:
            for p in unit.parameters:
                if is_sharded(p) and p.grad is not None:
                    together = whole(p.grad, self.team)
                    found |= {p: together} if unit.name in self.mine else {}
        return found

    def complete(self, units: Sequence[LayerUnit], directions: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The natural gradients of all units, spread out as the parameters are; owners send what others lack."""
        for unit in () if self.everywhere else units:
            for p in unit.parameters:
                found = directions.get(p)
                found = torch.empty(p.shape, dtype=p.dtype, device=p.device) if found is None else found
                self.team.broadcast(found, self.owners[unit.name])
                directions[p] = like(found, p, self.team)
        return {p: like(d, p, self.team) for p, d in directions.items()}

    def kept(self, curvatures: Mapping[str, Curvature]) -> dict[str, Curvature]:
        """Of a whole state, what this rank keeps."""
        self.elsewhere = {name for name, c in curvatures.items() if c.basis is not None} - self.mine
        return {name: replace(c, basis=None) if name in self.elsewhere else c for name, c in curvatures.items()}

    def gathered(self, units: Sequence[LayerUnit], curvatures: dict[str, Curvature]) -> dict[str, Curvature]:
        """The whole state, for which owners send what others have let go."""
        if self.everywhere:
            return curvatures
        found = dict(curvatures)
        with self.team:
            for unit in units:
                c, owner = curvatures[unit.name], self.owners[unit.name]
                if c.updates:
                    found[unit.name] = replace(c, basis=self._sent(unit, c.basis, owner))
        return found

    def _sent(self, unit: LayerUnit, basis: EigenPiece | None, owner: int) -> EigenPiece:
        L, space = unit.layout, unit.space
        g, o, i = L.groups, L.d_out, L.columns
        shapes: dict[str, tuple[int, ...]] = {"U_B": (g, o, o), "s": (g, L.offsets, o, i), "s_B": (g, o), "s_A": (g, i)}
        if not unit.diagonal:
            shapes["U_A"] = (g, i, i)
        arrays = {k: torch.empty(shape, dtype=space.dtype, device=space.device) for k, shape in shapes.items()}
        if basis is not None:
            arrays = {k: t.contiguous() for k, t in basis.arrays().items()}
        for name in shapes:
            self.team.broadcast(arrays[name], owner)
        a = arrays
        return basis or EigenPiece(unit.names, a["U_B"], a.get("U_A"), a["s"], a["s_B"], a["s_A"], L)
