"""Neural anisotropy directions: the input directions an architecture prefers before it has seen any data."""

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.ensembles import Factory, Initialiser, Precision, arithmetic, record
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.initialisers import with_something_to_train
from biascope.ensembles.trust import check_networks
from biascope.geometry.average import DENSE_UP_TO, FEW
from biascope.geometry.few_passes import few_passes, resolved
from biascope.geometry.gradients import NO_GRADIENT, OF_ROUNDING, ROUNDING, Sampler, chosen_output, dtype_of
from biascope.geometry.mixed import by_differences, by_products
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.geometry.nad_result import NADs
from biascope.linalg import psd_eigh, subspace_overlap
from biascope.linalg.lanczos import Eigenpairs
from biascope.linalg.stable import fix_signs, symmetrise
from biascope.network.derivatives import second_derivatives
from biascope.support.arguments import device_of
from biascope.support.bars import counted
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import check_shape
from biascope.support.limits import Count, FiniteTensor, Positive, Share, check_shapes
from biascope.support.memory import budget
from biascope.support.precision import without_autocast
from biascope.support.processes import Processes, processes
from biascope.support.seeds import generator
from biascope.support.signatures import checked

Method = Literal["finite-difference", "autograd", "mixed-derivative", "ntk"]
AUTO_START, AUTO_LIMIT = 256, 65_536
Stability = list[tuple[int, float]]
NO_DIFFERENCE = (
    "all differences are zero: the network is constant around x, or the step is lost in rounding; use a larger one or "
    "dtype=torch.float64"
)


@checked
@without_autocast()
def nads(
    factory: Factory | Initialiser,
    input_shape: Sequence[int] = (1, 32, 32),
    n_networks: Count | Literal["auto"] = 10_000,
    method: Method = "finite-difference",
    step: Positive = 100.0,
    device: torch.device | str | None = None,
    seed: int = 0,
    max_memory: str | int | None = None,
    top: Count | None = None,
    centered: bool = False,
    x: FiniteTensor | None = None,
    *,
    head: Literal["sampled", "marginal"] = "sampled",
    scalarise: Scalarise | None = None,
    tolerance: Share = 0.95,
    stability_k: Count = 10,
    n_points: Count = 256,
    average: Literal["gram", "operator"] = "gram",
    derivative: Literal["exact", "finite-difference"] = "exact",
    precision: Precision = "float32",
    dtype: torch.dtype | None = None,
    group: Any = None,
) -> NADs:
    """Neural anisotropy directions of an architecture, leading first.

    Args:
        factory: builds a freshly initialised network (or an `Initialiser`). It is evaluated in eval mode.
        input_shape: shape of one input, D entries.
        n_networks: T; "auto" doubles it until the leading directions of two halves of the networks overlap by
            `tolerance` (at most 65,536, with a warning when that is not enough).
        method: "finite-difference" is Algorithm 1, the eigenvectors of E[g g^T] with central differences of width
            `step`; "autograd" takes exact gradients instead (with ReLU these depend on x); "mixed-derivative" is
            Algorithm 2 corrected, eigenvectors of E[H^T H] with H = d2f/dtheta dx; "ntk" are the right singular
            vectors of E_x[H] of a single network (whatever `n_networks`) over `n_points` Gaussian inputs, their
            eigenvalues the alignment of the tangent kernel with linear functions; with ReLU a lower estimate, since
            autograd leaves the kinks out of the second derivative (1.4 to 3 times for LeNet's leading ones; none for
            smooth activations).
        step: h of the finite differences; 100 in the paper. Differences of small steps are made of rounding: a warning
            says when that explains more than a hundredth of the trace (a larger step or dtype=torch.float64 helps).
        device: where to compute.
        seed: of the networks and of x.
        max_memory: for example "4GB"; by default 60 % of what is free.
        top: how many directions; all by default when D <= 4096, else 64; with exact mixed derivatives 10.
        centered: subtract the mean gradient (zero in expectation; the paper's code does it through PCA).
        x: the evaluation point [*input_shape], the same for all networks. By default draws of N(0, I), so that no
            direction is that of one input: one for each network with autograd, one for the even and one for the odd
            networks with finite differences, whose halves are compared (`NADs.stability`); one with mixed derivatives.
        head: "marginal" averages over the last linear layer in closed form (finite differences only): the same
            expectation with far less noise per network; "sampled" is the algorithm as printed.
        scalarise: outputs [n, c] -> [n]; by default the one output, the difference of two logits, or the first of more
            outputs, which are alike in fresh networks.
        tolerance: for n_networks="auto", from 0 to 1.
        stability_k: how many leading directions the stability is about; at most D / 2, and no more than each half of
            the networks spans (with a sampled head half the networks, or fewer where the architecture has no more).
        n_points: Gaussian inputs of "ntk".
        average: of "mixed-derivative": "gram" is E[H^T H]; "operator" averages H over the networks first, as Algorithm
            2 is printed, which leaves the noise of one network however many there are, since E[H] is about zero; its
            standard errors, by leaving out an eighth of the networks, are then about twice too large.
        derivative: by x, of "mixed-derivative": "exact", or "finite-difference" of width `step` in every coordinate, as
            Algorithm 2 says, in float64 and for D <= 4096. With ReLU the exact one leaves the kinks out and depends on
            x; that of step 100 has the directions of Algorithm 1.
        precision: "tf32", "fp16" or "bf16" arithmetic of finite differences on CUDA.
        dtype: of the networks; by default the factory's own, float32 for half precision. Moments are in float64.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, each for its share of
            the networks; the same networks at any number of ranks. "ntk" and average="operator" are not shared: every
            rank computes all of it.

    Example:
        >>> from torch import nn
        >>> found = nads(lambda: nn.Linear(4, 1), input_shape=(4,), n_networks=2000)
        >>> found.directions.shape, bool((found.eigenvalues - 1 / 12).abs().max() < 0.01)
        (torch.Size([4, 4]), True)
    """
    shape, second_order = check_shape(input_shape), method in ("mixed-derivative", "ntk")
    differences = ("finite-difference", *(("mixed-derivative",) if derivative == "finite-difference" else ()))
    for name, value, usual, methods in (
        ("derivative", derivative, "exact", ("mixed-derivative",)),
        ("step", step, 100.0, differences),
        ("head", head, "sampled", ("finite-difference",)),
        ("precision", precision, "float32", ("finite-difference",)),
        ("centered", centered, False, ("finite-difference", "autograd")),
        ("n_networks='auto'", n_networks == "auto", False, ("finite-difference", "autograd")),
        ("average", average, "gram", ("mixed-derivative",)),
        ("x", x is not None, False, ("finite-difference", "autograd", "mixed-derivative")),
        ("n_points", n_points, 256, ("ntk",)),
    ):
        if value != usual and method not in methods:
            raise UnsupportedError(f"{name} is for method {' or '.join(methods)}; method={method!r} does not use it")
    initialiser = with_something_to_train(factory) if second_order else record(factory)
    if n_networks != 1 and not initialiser.draws:
        raise InputError("the factory gives the same network every time: nothing to average over; give n_networks=1")
    where, D = device_of(device), math.prod(shape)
    drawn = x is None
    if x is None:
        x = torch.randn(shape, generator=generator(seed, "x"), device="cpu")
    check_shapes(f"x [{', '.join(map(str, shape))}]", x)
    top = None if top is None else min(top, D)
    dtype = dtype_of(initialiser, dtype)
    first = initialiser.draw(seed, 0, 1, where, dtype)
    x = x.to(where, first.dtype)
    check_networks(initialiser, first, x[None])
    scalarise = scalarise if head == "marginal" else chosen_output(first, x[None], scalarise)
    sampler = Sampler(initialiser, x, seed, method, step, where, dtype, scalarise, precision, max_memory,
                      drawn=drawn, team=processes(group))  # fmt: skip
    with sampler.team:
        asked = (
            shape,
            n_networks,
            method,
            step,
            seed,
            top,
            centered,
            head,
            tolerance,
            stability_k,
            average,
            derivative,
        )
        sampler.team.agree(asked, "the ranks ask for different directions")
        return _by_method(
            sampler, n_networks, top, centered, head, tolerance, stability_k, n_points, average, derivative
        )


def _by_method(
    sampler: Sampler,
    n_networks: int | Literal["auto"],
    top: int | None,
    centered: bool,
    head: str,
    tolerance: float,
    stability_k: int,
    n_points: int,
    average: str,
    derivative: str,
) -> NADs:
    D, second_order = sampler.dimension, sampler.method in ("mixed-derivative", "ntk")
    if second_order and n_networks != "auto":
        if derivative == "finite-difference":
            if average == "operator" or D > DENSE_UP_TO:
                raise UnsupportedError(f"derivative='finite-difference' is for average='gram' and D <= {DENSE_UP_TO}")
            return by_differences(sampler, n_networks, top, stability_k)
        with arithmetic(sampler.device, "float32"), second_derivatives(sampler.initialiser.template):
            return by_products(sampler, n_networks, top or min(10, D), n_points, average == "operator")
    if head == "marginal":
        sampler = sampler.marginal()
    if D <= DENSE_UP_TO:
        return _dense(sampler, n_networks, top, centered, tolerance, stability_k)
    if n_networks == "auto" or centered or head == "marginal":
        raise InputError(f"D = {D} is done matrix-free: give a number of networks, centered=False, head='sampled'")
    return _matrix_free(sampler, n_networks, top or 64, stability_k)


def _dense(
    sampler: Sampler,
    n_networks: int | Literal["auto"],
    top: int | None,
    centered: bool,
    tolerance: float,
    stability_k: int,
) -> NADs:
    D, auto = sampler.dimension, n_networks == "auto"
    total = AUTO_LIMIT if n_networks == "auto" else n_networks
    team = sampler.team
    room = min(team.gather(budget(sampler.max_memory, sampler.device)))
    moments = BlockMoments(D, min(blocks_for(D, room), total), sampler.device)
    subtract = centered and sampler.head is None  # a head that is averaged out has the mean zero already
    # as many directions as there are entries always overlap, and half of T networks span T / 2
    most = k = min(stability_k, D // 2, total // 2 if sampler.head is None else D)
    checkpoint, stability = AUTO_START, Stability()

    def halves() -> tuple[float, int]:
        found = moments.split_half_overlap(most, subtract, sampler.floor(moments.trace))
        return team.gather(found)[0]  # ranks of different make may round differently, and then not agree when to stop

    for done in _filled(moments, sampler, total, auto):
        if done >= checkpoint and done < total:
            checkpoint = 2 * done
            if most:
                overlap, k = halves()
                stability.append((done, overlap))
            if auto and (not most or stability[-1][1] >= tolerance):
                break
    if most and len(moments.sums) > 1 and (not stability or stability[-1][0] != moments.count):
        overlap, k = halves()
        stability.append((moments.count, overlap))
    _warn_of_rounding(sampler, moments.trace)
    if auto and most and stability[-1][1] < tolerance:
        warnings.warn(
            f"n_networks='auto': the first {k} directions of two halves of {moments.count} networks overlap by "
            f"{stability[-1][1]:.2f}, not by {tolerance}: they may be no directions of the architecture (an isotropic "
            "one has none); see NADs.marchenko_pastur",
            stacklevel=6,
        )
    values, vectors = moments.eigh(subtract)
    trace = float(values.sum())
    values, vectors = values[:top], vectors[:, :top]
    exact = torch.zeros_like(values)
    pairs = Eigenpairs(values, vectors, exact, exact == 0, 0, D)
    errors = moments.spread(vectors, subtract)
    return _result(sampler, pairs, errors, trace, moments.count, stability, k, centered)


def _filled(moments: BlockMoments, sampler: Sampler, total: int, auto: bool) -> Iterator[int]:
    """Add the gradients of all networks, and say how many there are: after every piece, or, where several ranks have
    shares of the networks, when one process would next look at them.
    """
    team = sampler.team
    if team.size == 1:
        pieces = _checked(sampler, 0, total, total)
        pieces = _cut(pieces) if auto else pieces  # else checks are as far apart as pieces are large
        for start, rows in counted(pieces, "networks", total, lambda piece: len(piece[1])):
            moments.add(start, rows)
            yield moments.count
        return
    size, ends = 1 if auto else min(team.gather(sampler.piece)), [0, AUTO_START]
    while (end := -(-ends[-1] // size) * size) < total:
        ends[-1:] = [end, 2 * end]
    for first, end in itertools.pairwise([*ends[:-1], total]):
        if first and team.rank > 0:  # the first rank keeps the sum for all
            moments.clear()
        for start, rows in _checked(sampler, *sampler.share(first, end), total):
            team.check()
            moments.add(start, rows)
        sampler.together()
        moments.merge(team)
        if not moments.sums.any():
            raise InputError(NO_GRADIENT.format("another x") if sampler.method == "autograd" else NO_DIFFERENCE)
        yield end


def _matrix_free(sampler: Sampler, T: int, top: int, stability_k: int) -> NADs:
    """Top directions of inputs whose D x D matrix is never formed.

    Gradients are kept if they fit, and then the T x T matrix of their products has everything; else, or with too many
    networks for that, by block Krylov, for which the networks are drawn again in each pass.
    """
    D, team = sampler.dimension, sampler.team
    room = min(team.gather(budget(sampler.max_memory, sampler.device)))
    keep = room // 3 >= T * D * 4
    kept: list[tuple[int, Tensor]] = []

    def pieces() -> Iterator[tuple[int, Tensor]]:
        if kept:
            yield from kept
            return
        first, end = sampler.share(0, T)
        own = _checked(sampler, first, end, T)
        for start, rows in counted(own, "networks", end - first, lambda piece: len(piece[1])):
            team.check()
            if keep:
                kept.append((start, rows[:, 0]))
            yield start, rows[:, 0]

    # float64 where it leaves room for a dozen blocks: eigenvalues below 1e-5 of the first are lost in float32
    held = room // 3 // (D * (top + 10))  # bytes for each entry of a block
    kind = torch.float64 if held >= 12 * 16 else torch.float32

    def top_of(parity: int | None, k: int) -> Eigenpairs:
        def own(start: int, rows: Tensor) -> Tensor:
            return rows if parity is None else rows[(start + parity) % 2 :: 2]

        def product(X: Tensor) -> Tensor:
            found = torch.zeros_like(X)
            for start, rows in pieces():
                part = own(start, rows).to(X)
                found += part.T @ (part @ X)
            return team.sum(found) / max(count, 1)

        count = T if parity is None else len(range(parity, T, 2))
        if keep and T <= DENSE_UP_TO:
            parts = [own(start, rows) for start, rows in kept]
            return _by_gram(torch.cat(parts) if parts else torch.zeros(0, D, device=sampler.device), k, team)
        passes = min(20 if keep else 12, max(6, held // (16 if kind == torch.float64 else 8)))  # blocks are held
        return few_passes(product, D, k, passes=passes, seed=sampler.seed, device=sampler.device, dtype=kind)

    for _ in pieces():  # the first pass fills what is kept
        pass
    sampler.together()
    top = min(top, T)
    pairs = top_of(None, top)
    squares = torch.zeros(T, top, dtype=torch.float64, device=sampler.device)
    for start, rows in pieces():
        squares[start : start + len(rows)] = (rows.double() @ pairs.vectors.double()).square()
    whole = sum((rows.double().square().sum() for _, rows in pieces()), start=squares.new_zeros(()))
    trace = float(team.sum(whole, squares)) / T
    errors = squares.std(0) / T**0.5 if T > 1 else torch.full((top,), float("nan"), device="cpu")
    stability, k = Stability(), min(stability_k, T // 2)
    if keep and k >= 1:
        halves = [top_of(parity, k) for parity in (0, 1)]
        # any basis would do for eigenvalues that are rounding; by Krylov these are larger
        zero = D * torch.finfo(torch.float64).eps if T <= DENSE_UP_TO else 100 * torch.finfo(kind).eps
        k = min(int((half.values > max(sampler.floor(trace), zero * trace)).sum()) for half in halves)
        spans = (half.vectors[:, :k].double().cpu() for half in halves)
        stability.append((T, subspace_overlap(*spans) if k else 0.0))
    _warn_of_rounding(sampler, trace)
    return _result(sampler, pairs, errors, trace, T, stability, k)


def _by_gram(rows: Tensor, k: int, team: Processes) -> Eigenpairs:
    """The k leading eigenpairs of rows^T rows / T for rows [T, D], by the eigenvectors of rows rows^T, in float64.

    Every rank has some of the rows; of the columns, a piece at a time, every rank gets all.
    """
    lengths = team.gather(len(rows))
    T, first = sum(lengths), sum(lengths[: team.rank])
    mine = slice(first, first + len(rows))
    pieces = torch.split(rows, 2**24 // T, dim=1)  # in float64 all at once would be twice the rows
    gram = torch.zeros(T, T, dtype=torch.float64, device=rows.device)
    for part in pieces:
        whole = gram.new_zeros(T, part.shape[1])
        whole[mine] = part.double()
        gram += team.sum(whole) @ whole.T
    values, mixing = psd_eigh(symmetrise(gram))
    values, mixing = values[:k] / T, mixing[:, :k]
    vectors = team.sum(torch.cat([part.double().T @ mixing[mine] for part in pieces]))
    vectors = fix_signs(torch.linalg.qr(vectors)[0])
    certain = torch.ones(k, dtype=torch.bool, device=values.device)
    return Eigenpairs(values, vectors, torch.zeros_like(values), certain, 0, T)


def _checked(sampler: Sampler, first: int, end: int, total: int) -> Iterator[tuple[int, Tensor]]:
    """Gradients of networks first, ..., end - 1 of `total`, by pieces; what is no number, or all zero, is refused."""
    silent = first == 0
    for start, rows in sampler.chunks(first, end):
        size = rows.abs().max()
        if not torch.isfinite(size):
            raise InputError(f"a network among {start} to {start + len(rows) - 1} gave NaN or infinite outputs")
        silent = silent and bool(size == 0)
        if silent and start + len(rows) >= min(total, FEW):  # one network alone may be dead
            raise InputError(NO_GRADIENT.format("another x") if sampler.method == "autograd" else NO_DIFFERENCE)
        yield start, rows


def _cut(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """The same, but no piece reaches over 256, 512, 1024, ...: where "auto" stops is not up to memory or device."""
    for start, rows in pieces:
        end = start + len(rows)
        while start < end:
            stop = min(end, max(AUTO_START, 1 << start.bit_length()))  # the next power of two
            yield start, rows[len(rows) - (end - start) :][: stop - start]
            start = stop


def _warn_of_rounding(sampler: Sampler, trace: float) -> None:
    share = sampler.rounding(trace)
    if share > ROUNDING and sampler.method == "autograd":
        warnings.warn(OF_ROUNDING.format(min(share, 1.0)), stacklevel=7)
    elif share > ROUNDING:
        finer = "precision='float32'" if sampler.precision in ("fp16", "bf16") else "dtype=torch.float64"
        warnings.warn(
            f"step={sampler.step:g} is so small that rounding of the outputs explains about {min(share, 1.0):.0%} of "
            f"the trace: use a larger step or {finer}",
            stacklevel=7,
        )


def _result(
    sampler: Sampler, pairs: Eigenpairs, errors: Tensor, trace: float, count: int, stability: Stability, k: int,
    centered: bool = False,
) -> NADs:  # fmt: skip
    about = {"head": "sampled" if sampler.head is None else "marginal", "stability": tuple(stability), "stability_k": k}
    about |= {"resolved": resolved(pairs), "center": centered, "precision": sampler.precision}
    step = sampler.step if sampler.method == "finite-difference" else 0.0
    return sampler.result(pairs.vectors, pairs.values, errors, trace, count, step, **about)
