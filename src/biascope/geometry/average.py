"""The average geometry G = E[grad_x f grad_x f^T] over networks (and probes), and its change at the start of training.

GIH paper, Defs 2.1 and 2.2. Gradients come from backpropagation at probes x ~ N(0, probe_std^2 I). The paper estimates
G with GELU and a small probe_std (1e-3 to 1e-5), which measures the network linearised at 0.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biascope.ensembles import Factory, Initialiser, Networks, input_gradients, record
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.trust import check_networks
from biascope.geometry import files
from biascope.geometry.few_passes import few_passes
from biascope.geometry.gradients import NO_GRADIENT, OF_ROUNDING, ROUNDING, chosen_output, dtype_of, share_of_rounding
from biascope.geometry.measures import Comparison, compare, size_of, symmetric
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.linalg import FromFunction, LinearOperator, eigsh, psd_eigh
from biascope.linalg.elementary import Dense
from biascope.linalg.lanczos import Eigenpairs
from biascope.linalg.resolved import settled
from biascope.support.arguments import device_of
from biascope.support.bars import progress
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import check_shape, is_finite
from biascope.support.limits import Count, FiniteTensor, NonNegative, check_shapes
from biascope.support.memory import budget
from biascope.support.precision import without_autocast
from biascope.support.processes import ALONE, Processes, processes
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts, number, one_line

DENSE_UP_TO = 4096  # larger inputs never see a D x D matrix
FEW = 16  # networks: if all of these are dead, so is the architecture
# first network and gradients g [networks, probes, D] of each group; of an evolution the moved ones u before them
Rows = Callable[[], Iterator[tuple[int, *tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class AverageGeometry:
    """G, or its evolution Delta: a symmetric matrix on input space.

    Attributes:
        operator: what `G @ v` uses.
        dense: [D, D] in float64, None when D is too large for a matrix, or the memory too small.
        input_shape: of one input.
        n_networks: networks averaged; 0 where G is exact.
        n_probes: inputs per network.
        seed: of networks and probes.
        relative_error: expected ||G - truth||_F / ||G||_F, from blocks of networks; NaN if not known.
        kind: "geometry" or "evolution".
        fallback: {parameter: why} if the factory had to be called for each network.

    Example:
        >>> from torch import nn
        >>> G = average_geometry(lambda: nn.Linear(3, 1), (3,), n_networks=500)
        >>> (G @ torch.ones(3)).shape, len(G.eigh(2).values)
        (torch.Size([3]), 2)
    """

    operator: LinearOperator = field(repr=False)
    dense: Tensor | None = field(repr=False)
    input_shape: tuple[int, ...]
    n_networks: int
    n_probes: int
    seed: int
    relative_error: float
    kind: str = "geometry"
    fallback: dict[str, str] = field(default_factory=dict)
    __repr__ = one_line

    @classmethod
    @checked
    def exact(cls, matrix: Tensor, input_shape: Sequence[int]) -> AverageGeometry:
        """A matrix [D, D] that is known without sampling, such as that of `analytic_geometry`.

        Example:
            >>> AverageGeometry.exact(torch.eye(3), (3,)).trace()
            3.0
        """
        matrix = symmetric(matrix, "matrix").double()
        if math.prod(input_shape) != len(matrix):
            raise InputError(f"matrix {list(matrix.shape)} and input_shape {list(input_shape)} do not fit")
        return cls(Dense(matrix, symmetric=True), matrix, tuple(input_shape), 0, 0, 0, 0.0)

    @property
    def matrix(self) -> Tensor:
        """The matrix [D, D], float64."""
        if self.dense is None:
            raise UnsupportedError("G is matrix-free (D > 4096, or a small max_memory): use G @ v and G.eigh(k)")
        return self.dense

    @without_autocast()
    @checked
    def __matmul__(self, v: Tensor) -> Tensor:
        """G v for v [D] or [D, k]."""
        return self.operator @ v.to(self.operator.dtype)

    @checked
    @without_autocast()
    def eigh(self, k: Count | None = None) -> Eigenpairs:
        """Eigenpairs with the largest eigenvalues (largest magnitudes for an evolution); by default all of them,
        or 64 where the matrix is not formed.

        `converged` is about each eigenvalue on its own: a residual of at most 1e-3 of it, or zero up to rounding. What
        Lanczos, which measures against the largest one, leaves open is decomposed densely where the matrix is formed.
        """
        D = self.operator.shape[0]
        if self.dense is None:
            kind, device = self.operator.dtype, self.operator.device
            product = lambda X: self.operator @ X  # noqa: E731
            return few_passes(product, D, min(k or 64, D), passes=12, seed=self.seed, device=device, dtype=kind)
        if k is not None and k < D // 4:
            found = eigsh(self.operator, k, which="LA" if self.kind == "geometry" else "LM", tol=1e-12)
            sure = settled(found.values, found.residuals, D)
            if bool(sure.all()):
                return replace(found, converged=sure)
        values, vectors = psd_eigh(self.matrix, clip=self.kind == "geometry")
        if self.kind != "geometry":
            order = values.abs().argsort(descending=True)
            values, vectors = values[order], vectors[:, order]
        values, vectors = values[:k], vectors[:, :k]
        residuals = (self.matrix @ vectors - vectors * values).norm(dim=0)
        return Eigenpairs(values, vectors, residuals, settled(values, residuals, D), 0, D)

    @checked
    def correlation(self, other: AverageGeometry | Tensor) -> Comparison:
        """Correlation with another matrix, the baselines that two positive matrices need, and by how much the sampling
        of networks may move it (see `compare`); a tensor is taken as exact."""
        if isinstance(other, AverageGeometry):
            return compare(self.matrix, other.matrix, (self.relative_error, other.relative_error))
        return compare(self.matrix, other, (self.relative_error, 0.0))

    @checked
    def rank(self, threshold: float | None = None, share: float | None = None) -> int:
        """Number of eigenvalues above `threshold` (1e-3) times the largest; refused where the known do not get so low.

        With `share`: how many of the largest add up to that share of the trace (of the sum of magnitudes for an
        evolution), see `subspace_size`; for a matrix that is formed.
        """
        if share is not None:
            values = torch.linalg.eigvalsh(self.matrix).abs().sort(descending=True).values
            return size_of(values, threshold, share)
        threshold = 1e-3 if threshold is None else threshold
        values = self.eigh().values.abs().sort(descending=True).values
        above = size_of(values, threshold, None)
        if above == len(values) < self.operator.shape[0]:
            raise UnsupportedError(f"all {above} known eigenvalues exceed {threshold:g} of the first; use G.eigh(k)")
        return above

    def trace(self) -> float:
        """tr G."""
        return float(self.matrix.trace())

    def _repr_html_(self) -> str:
        """How it was measured and, where the matrix is at hand, its trace and leading eigenvalues, for notebooks."""
        rows: dict[str, object] = {"inputs": str(list(self.input_shape))}
        if self.dense is not None:
            rows["trace"] = self.trace()
            rows["leading eigenvalues"] = ", ".join(number(float(v)) for v in self.eigh(min(5, len(self.dense))).values)
        else:
            rows["matrix"] = "not formed: use G @ v and G.eigh(k)"
        if not math.isnan(self.relative_error):
            rows["relative error (Frobenius norm)"] = f"{self.relative_error:.2g}"
        rows |= {"networks": self.n_networks, "probes per network": self.n_probes, "seed": self.seed}
        return facts("Average geometry" if self.kind == "geometry" else f"Average geometry: {self.kind}", rows)

    def plot(self) -> Any:
        """Heat map and spectrum (matplotlib figure)."""
        from biascope.geometry.figures import plot_geometry

        return plot_geometry(self)

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        files.write(path, "geometry", {"matrix": self.matrix}, {name: getattr(self, name) for name in _PLAIN})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> AverageGeometry:
        """Read what `save` wrote."""
        tensors, about = files.read(path, "geometry", "an average geometry")
        matrix, shape = tensors["matrix"], tuple(about.pop("input_shape"))
        return cls(Dense(matrix, symmetric=True), matrix, shape, **about)


_PLAIN = ("input_shape", "n_networks", "n_probes", "seed", "relative_error", "kind", "fallback")


@checked
@without_autocast()
def average_geometry(
    factory: Factory | Initialiser,
    input_shape: Sequence[int],
    n_networks: Count = 10_000,
    n_probes: Count | None = None,
    seed: int = 0,
    probe_std: NonNegative = 1.0,
    scalarise: Scalarise | None = None,
    device: torch.device | str | None = None,
    max_memory: str | int | None = None,
    probes: FiniteTensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    group: Any = None,
) -> AverageGeometry:
    """G at initialisation: the second moment of the input gradient over networks and Gaussian probes.

    Args:
        factory: builds a freshly initialised network; evaluated in eval mode.
        input_shape: of one input, D entries; above 4096, or where three matrices do not fit into `max_memory`, the
            result is matrix-free (`G @ v`, `G.eigh(k)`).
        n_networks: 10,000 in the paper.
        n_probes: inputs drawn for each network, 1 by default; not together with `probes`.
        seed: of networks and probes.
        probe_std: of the probes; small with smooth activations. Zero means G(0); a ReLU network without biases has no
            gradient there.
        scalarise: outputs [n, c] -> [n]; by default the one output, the difference of two logits, or the first of more
            outputs, which are alike in fresh networks.
        device: where to compute.
        max_memory: for example "4GB".
        probes: [n, *input_shape], used for all networks instead of fresh draws.
        dtype: of the networks; None for the factory's own, float32 for half precision.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, each for its share of
            the networks; the same networks at any number of ranks. Products with a matrix-free result are such calls
            too.

    Example:
        >>> from torch import nn
        >>> average_geometry(lambda: nn.Linear(3, 1), (3,), n_networks=200).matrix.shape
        torch.Size([3, 3])
    """
    shape, initialiser = check_shape(input_shape), record(factory)
    each = count_probes(n_probes, probe_std, probes, shape)
    where, D = device_of(device), math.prod(shape)
    at = draw_probes(seed, 0, 1, each, shape, probe_std)[0] if probes is None else probes
    dtype = dtype_of(initialiser, dtype)
    first = initialiser.draw(seed, 0, 1, where, dtype)
    scalarise = chosen_output(first, at.to(where, first.dtype), scalarise)
    team = processes(group)
    size = max(1, min(initialiser.block, 2**27 // (D * each)))

    def rows() -> Iterator[tuple[int, Tensor]]:
        for start, stop in progress(pieces_of(team.share(n_networks), size), "networks", leave=False):
            networks = initialiser.draw(seed, start, stop, where, dtype)
            own = draw_probes(seed, start, stop, each, shape, probe_std) if probes is None else probes
            if start == 0:
                check_networks(initialiser, networks, (own[0] if probes is None else own).to(where, networks.dtype))
            alone = probes is None
            yield start, input_gradients(networks, own, per_network=alone, scalarise=scalarise, max_memory=max_memory)

    about = Average(
        shape, n_networks, each, seed, where, budget(max_memory, where), dict(initialiser.reasons), team=team
    )
    made = about.of(rows, enough=min(n_networks, FEW), fix="probe_std > 0" if probes is None else "other probes")
    share = share_of_rounding(initialiser, at[:1], seed, where, dtype, scalarise)
    if share > ROUNDING:
        warnings.warn(OF_ROUNDING.format(min(share, 1.0)), stacklevel=4)
    return made


@checked
@without_autocast()
def geometry_of(
    networks: Networks, probes: FiniteTensor, scalarise: Scalarise | None = None, max_memory: str | int | None = None
) -> AverageGeometry:
    """G^t of networks at hand (for example trained ones) at probes [n, *input_shape]; rank at most T n.

    Use the same probes at every time: the noise then cancels in comparisons such as `velocity`. Above D = 4096, or
    where three matrices do not fit into `max_memory`, the result is matrix-free (`G @ v`, `G.eigh(k)`).

    Example:
        >>> from torch import nn
        >>> drawn = record(lambda: nn.Linear(3, 1)).draw(seed=0, start=0, stop=50)
        >>> geometry_of(drawn, torch.randn(2, 3)).n_networks
        50
    """
    check_shapes("probes [n, D, ...]", probes)
    room = budget(max_memory, networks.device)
    size = max(1, min(len(networks), 2**27 // probes.numel(), room // (16 * probes.numel())))

    def rows() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(networks), size):
            group = networks[start : start + size]
            yield start, input_gradients(group, probes, scalarise=scalarise, max_memory=max_memory)

    about = Average(tuple(probes.shape[1:]), len(networks), len(probes), 0, networks.device, room)
    return about.of(rows, enough=len(networks))


@dataclass(frozen=True)
class Average:
    """What an average of gradients is over, and the memory in bytes it may take."""

    shape: tuple[int, ...]
    n_networks: int
    n_probes: int
    seed: int
    device: torch.device
    room: int
    fallback: dict[str, str] = field(default_factory=dict)
    kind: str = "geometry"
    dtype: torch.dtype | None = None  # of the gradients, if it is known
    team: Processes = ALONE  # whose ranks have shares of the networks

    def of(self, rows: Rows, enough: int = 0, fix: str = "other probes") -> AverageGeometry:
        """G from the gradients that every call of `rows` gives: a matrix, or a product where there is no room for one.

        If the gradients of the first `enough` networks are all zero, there is no use in waiting for the others.
        """
        with self.team:
            return self._of(rows, enough, fix)

    def _of(self, rows: Rows, enough: int, fix: str) -> AverageGeometry:
        team = self.team
        asked = (self.shape, self.n_networks, self.n_probes, self.seed, self.kind)
        team.agree(asked, "the ranks ask for different averages (shape, networks, probes, seed, kind)")
        D, scale = math.prod(self.shape), math.sqrt(self.n_probes)

        alive = False

        def pieces() -> Iterator[tuple[int, list[Tensor]]]:
            nonlocal alive
            silent = enough > 0
            for start, *parts in rows():
                team.check()
                silent = silent and (start == 0 or team.rank == 0)  # those of other ranks are not the first
                if not all(map(is_finite, parts)):
                    raise InputError("a network gave NaN or infinite gradients at the probes")
                alive = alive or bool(parts[-1].any())
                silent = silent and not alive
                if silent and start + len(parts[-1]) >= enough:
                    raise InputError(NO_GRADIENT.format(fix))
                yield start, [part.flatten(2) / scale for part in parts]

        def product(X: Tensor) -> Tensor:
            total = torch.zeros_like(X)
            for _, parts in pieces():
                a, b = parts[0].reshape(-1, D).to(X), parts[-1].reshape(-1, D).to(X)
                total += a.T @ (b @ X) if len(parts) == 1 else a.T @ (b @ X) + b.T @ (a @ X)
            with team:
                return team.sum(total) / self.n_networks

        about = (self.shape, self.n_networks, self.n_probes, self.seed)
        blocks = blocks_within(D, min(team.gather(self.room)), self.n_networks)
        if blocks:
            moments = BlockMoments(D, blocks, self.device)
            for start, parts in pieces():
                moments.add(start, *parts)
            moments.merge(team)
            if enough and not any(team.gather(alive)):  # the first networks may have been shared by several ranks
                raise InputError(NO_GRADIENT.format(fix))
            matrix, error = moments.matrix().cpu(), moments.relative_error()
            return AverageGeometry(Dense(matrix, symmetric=True), matrix, *about, error, self.kind, self.fallback)
        own = self.dtype or next((parts[-1].dtype for _, parts in pieces() if parts[-1].any()), None)
        own = next((kind for kind in team.gather(own) if kind is not None), torch.float32)
        operator = FromFunction(product, (D, D), torch.promote_types(own, torch.float32), self.device, symmetric=True)
        return AverageGeometry(operator, None, *about, math.nan, self.kind, self.fallback)


def pieces_of(share: slice, size: int) -> list[tuple[int, int]]:
    """A share of the networks in pieces (first, end) that do not reach over multiples of `size`."""
    cuts = [share.start, *range((share.start // size + 1) * size, share.stop, size), share.stop]
    return [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]


def blocks_within(D: int, room: int, n_networks: int) -> int:
    """Blocks [D, D] in float64 that leave room for two more in a budget in bytes; 0 where no matrix is to be formed."""
    return 0 if D > DENSE_UP_TO else max(0, min(blocks_for(D, room), room // (8 * D**2) - 2, n_networks))


def count_probes(n_probes: int | None, probe_std: float, probes: Tensor | None, shape: tuple[int, ...]) -> int:
    """Inputs per network: of those given, or the number to draw (1 by default)."""
    if probes is None:
        return n_probes or 1
    if n_probes is not None or probe_std != 1.0:
        raise InputError(f"probes are given: leave out n_probes={n_probes} and probe_std={probe_std}")
    check_shapes(f"probes [n, {', '.join(map(str, shape))}]", probes)
    return len(probes)


def draw_probes(seed: int, start: int, stop: int, n: int, shape: Sequence[int], std: float) -> Tensor:
    """Probes [networks, n, *shape] of networks start, ..., stop - 1: network t's depend on (seed, t) alone."""
    drawn = [torch.randn(n, *shape, generator=generator(seed, "probe", t), device="cpu") for t in range(start, stop)]
    return std * torch.stack(drawn)
