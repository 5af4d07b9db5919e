"""A layer between steps: its Kronecker eigenbasis, the momentum and the second moments of its gradient there.

`Whole` has all of the basis, V = U_B^T G U_A. Where a batch has few rows beside the sizes of a dense layer, turning its
o x i gradient there and back costs more than the training step itself: 4 o i (o + i) multiplications beside 3 o i for
every row. `Leading` keeps as many eigenvectors as that pays for, and takes what is left of each side as one direction
more. With P = U_B^T G, R = G U_A and Q = U_B^T G U_A the table of mean squares is

    Q^2                           what is left of P's rows
    what is left of R's columns   what is left of both                [r_B + 1, r_A + 1]

and a table of multipliers acts on these four parts of G. No factor is formed: a running factor is its leading part.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from biascope.curvature.kronecker import EigenPiece, eigh_of
from biascope.optim.checks import Batches
from biascope.optim.stacks import from_basis, to_basis
from biascope.optim.units import LayerUnit
from biascope.support.errors import InputError

Kind = Literal["kfac", "ekfac", "supernat"]
MEMORY = 0.95  # of SuperNat's modes
ROWS = 2  # of a batch, per eigenvector, from which leading eigenvectors are found


class Layer:
    """What both have.

    Attributes:
        G, D: the gradient and the last step [g, o, i e], with the bias as the last column; `grads` and `steps` are
            views of them in the shapes of the parameters.
        M: the momentum; `s` and `v`: the factors' eigenvalues and the running mean squares, in the basis.
        modes: SuperNat's, between 0 and 1.
        energy: the running mean of |G|^2.
    """

    M: Tensor
    s: Tensor
    v: Tensor
    modes: Tensor
    kept: tuple[str, ...] = ("M", "D", "s", "v", "modes", "energy")  # tensors that a resumed training needs

    def __init__(self, unit: LayerUnit, kind: Kind) -> None:
        self.unit, self.kind, self.ready = unit, kind, False
        L = unit.layout
        self.size = sum(p.numel() for p in unit.parameters)
        self.G, self.D = (self.zeros(L.groups, L.d_out, L.d_in * L.offsets + L.bias) for _ in range(2))
        self.grads, self.steps = self._views(self.G), self._views(self.D)
        self.energy, self.root = self.zeros(), self.zeros() + math.sqrt(self.size)

    def zeros(self, *shape: int) -> Tensor:
        """In the factors' precision."""
        return torch.zeros(shape, dtype=self.unit.space.dtype, device=self.unit.space.device)

    def _views(self, X: Tensor) -> list[Tensor]:
        return [part.view(p.shape) for part, p in zip(self.unit.layout.split(X), self.unit.parameters)]

    def renew(self, s: Tensor, total: Tensor) -> None:
        """New eigenvalues: the mean squares have their pattern, and their mean as before, or at first that of G^2."""
        mean = self.mean(self.v) if self.ready else total / self.size
        v = s * (mean / self.mean(s).clamp_min(torch.finfo(s.dtype).tiny))
        for name, value in (("s", s), ("v", v), ("modes", torch.ones_like(s))):
            self.put(name, value)
        self.ready = True

    def put(self, name: str, value: Tensor) -> None:
        """Overwrite a tensor where it is: a CUDA graph knows its address."""
        old = getattr(self, name, None)
        if isinstance(old, Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            setattr(self, name, value.contiguous())

    def mean(self, table: Tensor) -> Tensor:
        """Over the entries."""
        return table.mean()

    def read(self) -> tuple[list[Tensor], list[Tensor]]:
        """Running means, and what they are means of: the gradient in the basis."""
        raise NotImplementedError

    def direct(self, slope: Tensor, moving: Tensor, damping: Tensor, weight: Tensor) -> None:
        """The direction, in D. `slope` is |G|, `moving` |M|, `weight` that of the new mean squares."""
        if self.kind != "kfac":
            self.v.lerp_(self.squares(slope), weight)
        s = self.s if self.kind == "kfac" else self.v
        tiny = torch.finfo(s.dtype).tiny
        f = (s + (damping * self.mean(s)).clamp_min_(tiny)).reciprocal_()
        if self.kind == "supernat":
            snr = (self.signal(moving) / self.v.clamp_min(tiny)).clamp_(0, 1).sqrt_()
            f *= self.modes.lerp_(snr, 1 - MEMORY)
        self.act(f)

    def squares(self, slope: Tensor) -> Tensor:
        """The table of mean squares of G."""
        raise NotImplementedError

    def signal(self, moving: Tensor) -> Tensor:
        """That of M."""
        raise NotImplementedError

    def act(self, f: Tensor) -> None:
        """Multiply M by f in the basis, into D, up to a common factor."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The tensors that a resumed training needs; without a basis none."""
        return {name: getattr(self, name) for name in self.kept} if self.ready else {}

    def load(self, entry: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, which `check` has passed."""
        for name in self.kept if entry else ():
            self.put(name, entry[name].to(self.G.device, self.G.dtype))
        self.ready = bool(entry)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors of `state`."""
        raise NotImplementedError

    def check(self, entry: Mapping[str, Tensor]) -> None:
        """Raise if a state is of another layer."""
        for name, shape in self.shapes().items() if entry else ():
            value = entry.get(name)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                found = list(value.shape) if isinstance(value, Tensor) else value
                raise InputError(f"{self.unit.name}: {name} in the state is {found}, this model needs {shape}")


class Whole(Layer):
    """A layer with all of its eigenbasis."""

    U_B: Tensor
    U_A: Tensor

    def __init__(self, unit: LayerUnit, kind: Kind) -> None:
        super().__init__(unit, kind)
        names = ("U_B",) if unit.diagonal else ("U_B", "U_A")
        self.kept = (*Layer.kept, *names)

    @property
    def basis(self) -> EigenPiece:
        """The running metric."""
        L, U_A = self.unit.layout, None if self.unit.diagonal else self.U_A
        return EigenPiece(self.unit.names, self.U_B, U_A, self.v, self.energy, self.energy, L, factored=False)

    def refresh(self, E: EigenPiece, total: Tensor) -> None:
        """Go over to another basis."""
        M = to_basis(E, from_basis(self.basis, self.M)) if self.ready else torch.zeros_like(E.s)
        self.renew(E.s, total)
        self.put("M", M)
        self.put("U_B", E.U_B)
        if E.U_A is not None:
            self.put("U_A", E.U_A)

    def read(self) -> tuple[list[Tensor], list[Tensor]]:  # noqa: D102
        self.V = to_basis(self.basis, self.G)
        return [self.M], [self.V]

    def squares(self, slope: Tensor) -> Tensor:  # noqa: D102
        return self.V.square()

    def signal(self, moving: Tensor) -> Tensor:  # noqa: D102
        return self.M.square()

    def act(self, f: Tensor) -> None:  # noqa: D102
        self.D.copy_(from_basis(self.basis, f.mul_(self.M)))

    def shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        L = self.unit.layout
        g, o, i = L.groups, L.d_out, L.columns
        tables = dict.fromkeys(("M", "s", "v", "modes"), (g, L.offsets, o, i))
        return {**tables, "D": tuple(self.D.shape), "energy": (), "U_B": (g, o, o)} | (
            {} if self.unit.diagonal else {"U_A": (g, i, i)}
        )


class Leading(Layer):
    """A dense layer with the leading eigenvectors [o, r_B] and [i, r_A] of its factors.

    Attributes:
        P, R, Q: of M; R is transposed.
    """

    kept = (*Layer.kept, "U_B", "U_A", "s_B", "s_A", "P", "R", "Q")

    def __init__(self, unit: LayerUnit, kind: Kind, ranks: tuple[int, int]) -> None:
        super().__init__(unit, kind)
        self.ranks, self.sizes = ranks, (unit.layout.d_out, unit.layout.columns)
        self.M = torch.zeros_like(self.G[0])
        self.U_B, self.U_A = (self.zeros(d, r) for d, r in zip(self.sizes, ranks))
        self.s_B, self.s_A = (self.zeros(r + 1) for r in ranks)  # the last one is the mean of all others
        self.P, self.R, self.Q = self._blocks(self.M)
        self.inner = self.zeros(ranks[0] + 1, ranks[1] + 1)
        self.counts, self.sums, self.differences = (list[Tensor]() for _ in range(3))
        for d, r in zip(self.sizes, ranks):
            S, N = (torch.eye(r + 1, dtype=self.G.dtype, device="cpu") for _ in range(2))
            S[-1, :-1], N[:-1, -1] = -1, -1
            S[-1] *= 1 / (d - r) if d > r else 0
            count = torch.ones(r + 1, dtype=self.G.dtype, device="cpu")
            count[-1] = d - r
            for found, X in ((self.counts, count), (self.sums, S), (self.differences, N)):
                found.append(X.to(self.G.device))

    def refresh(self, factors: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> None:
        """Go over to other eigenvectors, with their eigenvalues [r + 1]."""
        (U_B, s_B), (U_A, s_A) = factors
        self.renew(s_B[:, None] * s_A, total)
        for name, value in (("U_B", U_B), ("U_A", U_A), ("s_B", s_B), ("s_A", s_A)):
            self.put(name, value)
        for old, new in zip((self.P, self.R, self.Q), self._blocks(self.M)):
            old.copy_(new)

    def _blocks(self, X: Tensor) -> list[Tensor]:
        P = self.U_B.T @ X
        return [P, self.U_A.T @ X.T, P @ self.U_A]  # R transposed: with few rows that is faster

    def _table(self, blocks: list[Tensor], whole: Tensor) -> Tensor:
        """Mean squares of the four parts, from the lengths of the blocks' rows and columns and of all."""
        P, R, Q = blocks
        self.inner[:-1, :-1] = Q
        torch.linalg.vector_norm(P, dim=1, out=self.inner[:-1, -1])
        torch.linalg.vector_norm(R, dim=1, out=self.inner[-1, :-1])
        self.inner[-1, -1] = whole
        return (self.sums[0] @ self.inner.square() @ self.sums[1].T).clamp_min_(0)

    def mean(self, table: Tensor) -> Tensor:  # noqa: D102
        total: Tensor = self.counts[0] @ table @ self.counts[1]
        return total / self.size

    def read(self) -> tuple[list[Tensor], list[Tensor]]:  # noqa: D102
        self.X = self._blocks(self.G[0])
        return [self.M, self.P, self.R, self.Q], [self.G[0], *self.X]

    def squares(self, slope: Tensor) -> Tensor:  # noqa: D102
        return self._table(self.X, slope)

    def signal(self, moving: Tensor) -> Tensor:  # noqa: D102
        return self._table([self.P, self.R, self.Q], moving)

    def act(self, f: Tensor) -> None:
        """D = M + U_B (..) + (..) U_A^T with f = 1 for what is left of both sides."""
        P, R, Q, D = self.P, self.R, self.Q, self.D[0]
        f = self.differences[0] @ (f / f[-1, -1]) @ self.differences[1].T
        X = torch.addmm(P * f[:-1, -1:], Q * f[:-1, :-1], self.U_A.T)
        torch.addmm(self.M, self.U_B, X, out=D).addmm_((R * f[-1, :-1, None]).T, self.U_A.T)

    def shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        table = tuple(r + 1 for r in self.ranks)
        found: dict[str, tuple[int, ...]] = dict.fromkeys(("s", "v", "modes"), table)
        found |= {"M": self.sizes, "D": (1, *self.sizes), "energy": (), "s_B": table[:1], "s_A": table[1:]}
        (o, i), (r_B, r_A) = self.sizes, self.ranks
        return found | {"U_B": (o, r_B), "U_A": (i, r_A), "P": (r_B, i), "R": (r_A, o), "Q": (r_B, r_A)}

    def rows(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Some of the output gradients [n, o] and of the homogeneous inputs [n, i] of the calls, evenly spread."""
        pairs = [self.unit.tensors(call) for batch in batches for call in batch]
        found = []
        for side, rank in enumerate(self.ranks):
            X = torch.cat([pair[1 - side].reshape(-1, pair[1 - side].shape[-1]) for pair in pairs])
            X = X[:: math.ceil(len(X) / max(ROWS * rank, 32))]
            found.append(torch.cat([X, X.new_ones(len(X), 1)], 1) if side and self.unit.layout.bias else X)
        return found[0], found[1]

    def stretched(self, batches: Batches, decay: float) -> list[Tensor]:
        """Per side Z [n, d] with Z^T Z + rest I = decay * the factor so far + (1 - decay) * that of the batch."""
        out, decay = [], decay if self.ready else 0.0
        for X, U, s in zip(self.rows(batches), (self.U_B, self.U_A), (self.s_B, self.s_A)):
            Z = X * math.sqrt((1 - decay) / len(X))
            old = U.T * (decay * (s[:-1] - s[-1]).clamp_min(0)).sqrt()[:, None]
            out.append(torch.cat([old, Z]) if self.ready else Z)
        return out


def renewed(layers: Sequence[Leading], seen: Iterable[Batches], decay: float) -> list[list[tuple[Tensor, Tensor]]]:
    """New factors of every layer: eigenvectors [d, r] and eigenvalues [r + 1] of either side."""
    stretched = [layer.stretched(batches, decay) for layer, batches in zip(layers, seen)]
    grams = [Z @ Z.T if len(Z) < Z.shape[1] else Z.T @ Z for pair in stretched for Z in pair]
    solved = iter(eigh_of([S[None] for S in grams]) if grams else [])
    out = []
    for layer, pair in zip(layers, stretched):
        old = [decay * s[-1] if layer.ready else s[-1] * 0 for s in (layer.s_B, layer.s_A)]
        solutions = [next(solved) for _ in pair]
        out.append([leading(Z, *found, r, rest) for Z, found, r, rest in zip(pair, solutions, layer.ranks, old)])
    return out


def leading(Z: Tensor, values: Tensor, U: Tensor, rank: int, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors [d, rank] of Z^T Z + rest I for Z [n, d], their eigenvalues and the mean of the others.

    `values` and `U` are those of Z Z^T, or of Z^T Z where it is smaller. Where Z has a lower rank, any vectors will do.
    """
    n, d = Z.shape
    W = U[0, :, :rank]
    if n < d:
        W = Z.T @ (W / values[0, :rank].clamp_min(torch.finfo(Z.dtype).eps ** 2 * values[0, 0]).sqrt().clamp_min(1e-30))
    if W.shape[1] < rank:
        W = torch.cat([W, W.new_zeros(d, rank - W.shape[1])], 1)
    if n < d:
        W = torch.linalg.qr(W)[0]
    s = (Z @ W).square().sum(0)
    others = (Z.square().sum() - s.sum()).clamp_min(0) / max(1, d - rank)
    return W.contiguous(), torch.cat([s, others[None]]) + rest
