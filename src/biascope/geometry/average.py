"""The average geometry G = E[grad_x f grad_x f^T] over networks (and probes), and its change at the start of training.

GIH paper, Defs 2.1 and 2.2. Gradients come from backpropagation at probes x ~ N(0, probe_std^2 I). The paper estimates
G with GELU and a small probe_std (1e-3 to 1e-5), which measures the network linearised at 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biascope.arguments import check_count
from biascope.ensembles import Factory, Initialiser, Networks, input_gradients, record
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.trust import check_networks
from biascope.errors import InputError, UnsupportedError
from biascope.functional import device_of
from biascope.geometry import files
from biascope.geometry.few_passes import few_passes
from biascope.geometry.gradients import NO_GRADIENT, OF_ROUNDING, ROUNDING, share_of_rounding
from biascope.geometry.measures import Comparison, compare, size_of, symmetric
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.inputs import check_inputs, check_shape, is_finite
from biascope.linalg import Dense, Eigenpairs, FromFunction, LinearOperator, eigsh, psd_eigh
from biascope.linalg.resolved import settled
from biascope.memory import budget
from biascope.precision import without_autocast
from biascope.progress import progress
from biascope.refusals import refuse_batch_dependence
from biascope.seeds import generator
from biascope.signatures import checked
from biascope.tables import facts, number, one_line

DENSE_UP_TO = 4096
FEW = 16  # networks that are not all dead by chance
Rows = Callable[[], Iterator[tuple[int, Tensor]]]  # first network and gradients [networks, probes, D] of each group


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
        shape, matrix = check_shape(input_shape), symmetric(matrix, "matrix").double()
        if math.prod(shape) != len(matrix):
            raise InputError(f"matrix {list(matrix.shape)} and input_shape {list(shape)} do not fit")
        return cls(Dense(matrix, symmetric=True), matrix, shape, 0, 0, 0, 0.0)

    @property
    def matrix(self) -> Tensor:
        """The matrix [D, D], float64."""
        if self.dense is None:
            raise UnsupportedError(
                f"D = {self.operator.shape[0]} is done matrix-free: use G @ v and G.eigh(k) instead of G.matrix; up to "
                f"D = {DENSE_UP_TO} a larger max_memory makes room for the matrix"
            )
        return self.dense

    @without_autocast()
    @checked
    def __matmul__(self, v: Tensor) -> Tensor:
        """G v for v [D] or [D, k]."""
        return self.operator @ v.to(self.operator.dtype)

    @checked
    @without_autocast()
    def eigh(self, k: int | None = None) -> Eigenpairs:
        """Eigenpairs with the largest eigenvalues (largest magnitudes for an evolution); by default all of them,
        or 64 where the matrix is not formed.

        `converged` is about each eigenvalue on its own: a residual of at most 1e-3 of it, or zero up to rounding. What
        Lanczos, which measures against the largest one, leaves open is decomposed densely where the matrix is formed.
        """
        D = self.operator.shape[0]
        if k is not None:
            check_count(k, "k")
            if k > D:
                raise InputError(f"k={k}: a matrix of size {D} has between 1 and {D} eigenpairs")
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
            raise UnsupportedError(
                f"rank: the {above} eigenvalues known of {self.operator.shape[0]} are all above {threshold:g} of the "
                "largest; give a larger threshold, or count those of G.eigh(k) with a larger k"
            )
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
    n_networks: int = 10_000,
    n_probes: int | None = None,
    seed: int = 0,
    probe_std: float = 1.0,
    scalarise: Scalarise | None = None,
    device: torch.device | str | None = None,
    max_memory: str | int | None = None,
    probes: Tensor | None = None,
    dtype: torch.dtype | None = None,
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
        scalarise: outputs [n, c] -> [n]; one output, or the difference of two logits, by default.
        device: where to compute.
        max_memory: for example "4GB".
        probes: [n, *input_shape], used for all networks instead of fresh draws.
        dtype: of the networks.

    Example:
        >>> from torch import nn
        >>> average_geometry(lambda: nn.Linear(3, 1), (3,), n_networks=200).matrix.shape
        torch.Size([3, 3])
    """
    shape = check_shape(input_shape)
    each = count_probes(n_probes, probe_std, probes, shape)
    if n_networks < 1 or each < 1 or not 0 <= probe_std < math.inf:
        raise InputError(f"need positive sizes: n_networks={n_networks}, n_probes={each}, probe_std={probe_std}")
    initialiser = record(factory)
    refuse_batch_dependence(initialiser.template)
    where, D = device_of(device), math.prod(shape)

    def rows() -> Iterator[tuple[int, Tensor]]:
        size, silent = max(1, min(initialiser.block, 2**27 // (D * each))), True
        for start in progress(range(0, n_networks, size), "networks", leave=False):
            stop = min(start + size, n_networks)
            networks = initialiser.draw(seed, start, stop, where, dtype)
            own = draw_probes(seed, start, stop, each, shape, probe_std) if probes is None else probes
            if start == 0:
                some = (own[0] if probes is None else own).to(where, networks.dtype)
                check_networks(initialiser, networks, some)
            found = input_gradients(
                networks, own, per_network=probes is None, scalarise=scalarise, max_memory=max_memory
            )
            silent = silent and not found.any()
            if silent and stop >= min(n_networks, FEW):  # the others are drawn alike: no need to wait for them
                raise InputError(NO_GRADIENT.format("", "probe_std > 0" if probes is None else "other probes"))
            yield start, found.flatten(2)

    room = budget(max_memory, where)
    made = _average(rows, shape, n_networks, each, seed, where, room, initialiser.reasons)
    at = draw_probes(seed, 0, 1, each, shape, probe_std)[0] if probes is None else probes
    share = share_of_rounding(initialiser, at[:1], seed, where, dtype, scalarise)
    if share > ROUNDING:
        warnings.warn(OF_ROUNDING.format(min(share, 1.0)), stacklevel=4)
    return made


@checked
@without_autocast()
def geometry_of(
    networks: Networks, probes: Tensor, scalarise: Scalarise | None = None, max_memory: str | int | None = None
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
    check_inputs(probes, "probes")
    if probes.dim() < 2:
        raise InputError(f"probes have shape {list(probes.shape)}; they must be [n, *input_shape]")
    shape, room = tuple(probes.shape[1:]), budget(max_memory, networks.device)
    size = max(1, min(len(networks), 2**27 // probes.numel(), room // (16 * probes.numel())))

    def rows() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(networks), size):
            found = input_gradients(networks[start : start + size], probes, scalarise=scalarise, max_memory=max_memory)
            yield start, found.flatten(2)

    return _average(rows, shape, len(networks), len(probes), 0, networks.device, room, {})


def _average(
    rows: Rows,
    shape: tuple[int, ...],
    n_networks: int,
    n_probes: int,
    seed: int,
    where: torch.device,
    room: int,
    fallback: Mapping[str, str],
) -> AverageGeometry:
    """G from the gradients that every call of `rows` gives: a matrix, or a product where there is no room for one."""
    D = math.prod(shape)

    def checked() -> Iterator[tuple[int, Tensor]]:
        zero = True
        for start, found in rows():
            refuse_infinite(found)
            zero = zero and not found.any()
            yield start, found / math.sqrt(n_probes)
        if zero:
            raise InputError(NO_GRADIENT.format(f" of the {n_networks} networks", "other probes"))

    blocks = blocks_within(D, room, n_networks)
    if blocks:
        moments = BlockMoments(D, blocks, where)
        for start, r in checked():
            moments.add(start, r)
        return from_moments(moments, shape, n_probes, seed, "geometry", fallback)

    def product(X: Tensor) -> Tensor:
        total = torch.zeros_like(X)
        for _, r in checked():
            flat = r.reshape(-1, D).to(X)
            total += flat.T @ (flat @ X)
        return total / n_networks

    kind = next(r.dtype for _, r in checked() if r.any())  # without a gradient that is not zero, it refuses
    operator = FromFunction(product, (D, D), at_least_float32(kind), where, symmetric=True)
    unknown, about = float("nan"), dict(fallback)
    return AverageGeometry(operator, None, shape, n_networks, n_probes, seed, unknown, "geometry", about)


def blocks_within(D: int, room: int, n_networks: int) -> int:
    """Blocks [D, D] in float64 that leave room for two more in a budget in bytes; 0 where a matrix is not to be formed.

    Example:
        >>> blocks_within(100, 10**9, 1000), blocks_within(100, 320_000, 1000), blocks_within(100, 200_000, 1000)
        (16, 2, 0)
    """
    return 0 if D > DENSE_UP_TO else max(0, min(blocks_for(D, room), room // (8 * D**2) - 2, n_networks))


def at_least_float32(kind: torch.dtype) -> torch.dtype:
    """What products of gradients of a dtype are summed in where there is no matrix; matrices are float64.

    Example:
        >>> at_least_float32(torch.float16), at_least_float32(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(kind, torch.float32)


def refuse_infinite(gradients: Tensor) -> None:
    """Raise if a gradient is NaN or infinite.

    Example:
        >>> refuse_infinite(torch.ones(2, 3))
    """
    if not is_finite(gradients):
        raise InputError("a network gave NaN or infinite gradients at the probes")


def check_probes(probes: Tensor, shape: tuple[int, ...]) -> int:
    """How many probes [n, *shape] there are; refused where they are not finite or of another shape.

    Example:
        >>> check_probes(torch.ones(5, 3), (3,))
        5
    """
    check_inputs(probes, "probes")
    if tuple(probes.shape[1:]) != shape:
        raise InputError(f"probes have shape {list(probes.shape)}; they must be [n, {', '.join(map(str, shape))}]")
    return len(probes)


def count_probes(n_probes: int | None, probe_std: float, probes: Tensor | None, shape: tuple[int, ...]) -> int:
    """Inputs per network: of those given, or the number to draw (1 if not said); both at once are refused.

    Example:
        >>> count_probes(None, 1.0, None, (3,)), count_probes(None, 1.0, torch.ones(5, 3), (3,))
        (1, 5)
    """
    if probes is None:
        return 1 if n_probes is None else n_probes
    for name, value, usual in (("n_probes", n_probes, None), ("probe_std", probe_std, 1.0)):
        if value != usual:
            raise InputError(
                f"{name}={value} is for probes that are drawn, and probes are given: leave one of them out"
            )
    return check_probes(probes, shape)


def draw_probes(seed: int, start: int, stop: int, n: int, shape: Sequence[int], std: float) -> Tensor:
    """Probes [networks, n, *shape] of networks start, ..., stop - 1: network t's depend on (seed, t) alone.

    Example:
        >>> torch.equal(draw_probes(0, 2, 3, 1, (4,), 1.0)[0], draw_probes(0, 0, 5, 1, (4,), 1.0)[2])
        True
    """
    drawn = [torch.randn(n, *shape, generator=generator(seed, "probe", t), device="cpu") for t in range(start, stop)]
    return std * torch.stack(drawn)


def from_moments(
    moments: BlockMoments,
    shape: tuple[int, ...],
    n_probes: int,
    seed: int,
    kind: str,
    fallback: Mapping[str, str],
) -> AverageGeometry:
    """The result behind block sums."""
    matrix = moments.matrix().cpu()
    if not torch.isfinite(matrix).all():
        raise InputError("a network gave NaN or infinite gradients at the probes")
    operator, error, count = Dense(matrix, symmetric=True), moments.relative_error(), moments.count
    return AverageGeometry(operator, matrix, shape, count, n_probes, seed, error, kind, dict(fallback))
