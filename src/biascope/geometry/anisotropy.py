"""Neural anisotropy directions: the input directions an architecture prefers before it has seen any data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from biascope.ensembles import Factory, Initialiser, Networks, record
from biascope.ensembles.arithmetic import Precision, arithmetic
from biascope.ensembles.engines import try_input
from biascope.ensembles.evaluate import Scalarise
from biascope.ensembles.initialisers import with_something_to_train
from biascope.errors import InputError
from biascope.functional import device_of
from biascope.geometry.few_passes import few_passes
from biascope.geometry.gradients import Sampler
from biascope.geometry.mixed import MixedDerivative
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.geometry.nad_result import NADs
from biascope.linalg import psd_eigh, subspace_overlap
from biascope.memory import budget
from biascope.precision import without_autocast
from biascope.progress import progress
from biascope.seeds import generator

Method = Literal["finite-difference", "autograd", "mixed-derivative", "ntk"]
DENSE_UP_TO = 4096  # larger inputs never see a D x D matrix
AUTO_START, AUTO_LIMIT = 256, 65_536


@without_autocast()
def nads(
    factory: Factory | Initialiser,
    input_shape: Sequence[int] = (1, 32, 32),
    n_networks: int | Literal["auto"] = 10_000,
    method: Method = "finite-difference",
    step: float = 100.0,
    device: torch.device | str | None = None,
    seed: int = 0,
    max_memory: str | int | None = None,
    top: int | None = None,
    center: bool = False,
    x: Tensor | None = None,
    *,
    head: Literal["sampled", "marginal"] = "sampled",
    scalarise: Scalarise | None = None,
    tolerance: float = 0.95,
    stability_k: int = 10,
    n_points: int = 256,
    precision: Precision = "float32",
    dtype: torch.dtype | None = None,
) -> NADs:
    """Neural anisotropy directions of an architecture, leading first.

    Args:
        factory: builds a freshly initialised network (or an `Initialiser`). It is evaluated in eval mode.
        input_shape: shape of one input, D entries.
        n_networks: T; "auto" doubles it until the leading directions of two halves of the networks overlap by
            `tolerance` (at most 65,536).
        method: "finite-difference" is Algorithm 1, the eigenvectors of E[g g^T] with central differences of width
            `step`; "autograd" takes exact gradients instead (with ReLU these depend more on x); "mixed-derivative" is
            Algorithm 2 corrected, eigenvectors of E[H^T H] with H = d2f/dtheta dx; "ntk" are the right singular vectors
            of E_x[H] of a single network over `n_points` Gaussian inputs, their eigenvalues the alignment of the
            tangent kernel with linear functions; with ReLU a lower estimate, since autograd leaves the kinks out of
            the second derivative (1.4 to 3 times for LeNet's leading ones; none for smooth activations).
        step: h of the finite differences; 100 in the paper.
        device: where to compute.
        seed: of the networks and of x.
        max_memory: for example "4GB".
        top: how many directions; all by default when D <= 4096, else 64; for the last two methods 10.
        center: subtract the mean gradient (zero in expectation; the paper's code does it through PCA).
        x: the evaluation point [*input_shape], the same for all networks; by default one draw of N(0, I).
        head: "marginal" averages over the last linear layer in closed form (finite differences only): the same
            expectation with far less noise per network; "sampled" is the algorithm as printed.
        scalarise: outputs [n, c] -> [n], for networks with more than two outputs (two: the difference of logits).
        tolerance: for n_networks="auto".
        stability_k: how many leading directions the stability is about.
        n_points: Gaussian inputs of "ntk".
        precision: "tf32" or "bf16" arithmetic on CUDA.
        dtype: of the networks, the factory's own by default. Moments are always summed in float64.

    Example:
        >>> from torch import nn
        >>> found = nads(lambda: nn.Linear(4, 1), input_shape=(4,), n_networks=2000)
        >>> found.directions.shape, bool((found.eigenvalues - 1 / 12).abs().max() < 0.01)
        (torch.Size([4, 4]), True)
    """
    shape = tuple(int(extent) for extent in input_shape)
    if not shape or min(shape) < 1:
        raise InputError(f"input_shape={tuple(input_shape)} has no entries")
    if method not in get_args(Method):
        raise InputError(f"method={method!r} is not one of {', '.join(get_args(Method))}")
    if step <= 0:
        raise InputError(f"step must be positive, not {step}")
    if n_networks != "auto" and (not isinstance(n_networks, int) or n_networks < 1):
        raise InputError(f"n_networks must be a number of at least 1 or 'auto', not {n_networks!r}")
    second_order = method in ("mixed-derivative", "ntk")
    initialiser = with_something_to_train(factory) if second_order else record(factory)
    where = device_of(device)
    if x is None:
        x = torch.randn(shape, generator=generator(seed, "x"), device="cpu")
    if tuple(x.shape) != shape:
        raise InputError(f"x has shape {list(x.shape)}, but input_shape is {list(shape)}")
    if top is not None and not 1 <= top <= x.numel():
        raise InputError(f"top must be between 1 and {x.numel()}, not {top}")
    kind = dtype or next(initialiser.template.parameters()).dtype
    x = x.to(where, kind)
    if second_order:
        if n_networks == "auto":
            raise InputError("n_networks='auto' is for finite differences and autograd")
        with arithmetic(where, "float32"):
            return _second_order(
                initialiser, x, method, n_networks, top or min(10, x.numel()), n_points, seed, where, dtype, scalarise
            )
    sampler = Sampler(initialiser, x, seed, method, step, where, dtype, scalarise, precision, max_memory, None, 0.0)
    if head == "marginal":
        sampler = sampler.marginal()
    elif head != "sampled":
        raise InputError(f"head={head!r} is not 'sampled' or 'marginal'")
    if x.numel() <= DENSE_UP_TO:
        return _dense(sampler, n_networks, top, center, tolerance, stability_k, max_memory)
    if n_networks == "auto" or center or head == "marginal":
        raise InputError(
            f"D = {x.numel()} is done matrix-free: give a number of networks, center=False, head='sampled'"
        )
    return _matrix_free(sampler, n_networks, top or 64, stability_k, max_memory)


def _dense(
    sampler: Sampler,
    n_networks: int | Literal["auto"],
    top: int | None,
    center: bool,
    tolerance: float,
    stability_k: int,
    max_memory: str | int | None,
) -> NADs:
    D, auto = sampler.dimension, n_networks == "auto"
    total = AUTO_LIMIT if n_networks == "auto" else n_networks
    moments = BlockMoments(D, min(blocks_for(D, budget(max_memory, sampler.device)), total), sampler.device)
    k = min(stability_k, D)
    checkpoint, stability = AUTO_START, list[tuple[int, float]]()
    for start, rows in progress(_checked(sampler.chunks(0, total)), "networks", leave=False):
        moments.add(start, rows)
        done = moments.count
        if done >= checkpoint and done < total:
            stability.append((done, moments.split_half_overlap(k)))
            checkpoint = 2 * done
            if auto and stability[-1][1] >= tolerance:
                break
    if len(moments.sums) > 1 and (not stability or stability[-1][0] != moments.count):
        stability.append((moments.count, moments.split_half_overlap(k)))
    matrix = moments.matrix(center)
    values, vectors = psd_eigh(matrix)
    values, vectors = values[:top], vectors[:, :top]
    directions = vectors.T.reshape(-1, *sampler.x.shape).cpu().contiguous()
    return _result(
        sampler, directions, values.cpu(), moments.spread(vectors), float(matrix.trace()), moments.count, stability, k
    )


def _matrix_free(sampler: Sampler, T: int, top: int, stability_k: int, max_memory: str | int | None) -> NADs:
    """Top directions by block Krylov over the gradients; they are kept if they fit, else drawn again for each pass."""
    D, room = sampler.dimension, budget(max_memory, sampler.device)
    keep = room // 3 >= T * D * 4
    kept: list[tuple[int, Tensor]] = []

    def pieces() -> Iterator[tuple[int, Tensor]]:
        if kept:
            yield from kept
            return
        for start, rows in progress(_checked(sampler.chunks(0, T)), "networks", leave=False):
            if keep:
                kept.append((start, rows[:, 0]))
            yield start, rows[:, 0]

    def top_of(parity: int | None, k: int) -> tuple[Tensor, Tensor]:
        def product(X: Tensor) -> Tensor:
            found, count = torch.zeros_like(X), 0
            for start, rows in pieces():
                own = rows if parity is None else rows[(start + parity) % 2 :: 2]
                found += own.T.to(X) @ (own.to(X) @ X)
                count += len(own)
            return found / max(count, 1)

        passes = min(20 if keep else 12, max(6, room // 3 // (8 * D * (k + 10))))  # as many blocks are held
        pairs = few_passes(product, D, k, passes=passes, seed=sampler.seed, device=sampler.device)
        return pairs.values, pairs.vectors

    for _ in pieces():  # the first pass fills what is kept
        pass
    top = min(top, T)
    values, vectors = top_of(None, top)
    squares = torch.cat([(rows.double() @ vectors.double()).square() for _, rows in pieces()])
    trace = sum(float(rows.double().square().sum()) for _, rows in pieces()) / T
    errors = squares.std(0) / T**0.5 if T > 1 else torch.full((top,), float("nan"), device="cpu")
    stability, k = list[tuple[int, float]](), min(stability_k, T // 2)
    if keep and k >= 1:
        stability.append((T, subspace_overlap(top_of(0, k)[1].double().cpu(), top_of(1, k)[1].double().cpu())))
    directions = vectors.T.reshape(-1, *sampler.x.shape).cpu().contiguous()
    return _result(sampler, directions, values.double().cpu(), errors.double().cpu(), trace, T, stability, k)


def _second_order(
    initialiser: Initialiser,
    x: Tensor,
    method: str,
    n_networks: int,
    top: int,
    n_points: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    scalarise: Scalarise | None,
) -> NADs:
    """Algorithm 2 and NTK-NADs by block Krylov."""
    D, ntk = x.numel(), method == "ntk"
    T = 1 if ntk else n_networks
    points = x[None]
    if ntk:
        points = torch.randn(n_points, *x.shape, generator=generator(seed, "points"), device="cpu").to(x)
    try_input(initialiser.draw(seed, 0, 1, device, dtype), points)
    H = MixedDerivative(initialiser.template, points, scalarise)
    weight = sum(p.numel() for p in initialiser.template.parameters()) * (top + 10) * 4
    group = max(1, min(T, initialiser.block, 2**27 // max(1, weight)))

    def groups() -> Iterator[Networks]:
        for start in range(0, T, group):
            yield initialiser.draw(seed, start, min(start + group, T), device, dtype)

    def product(X: Tensor) -> Tensor:
        total = torch.zeros(X.shape, dtype=torch.float64, device=X.device)
        for networks in progress(groups(), "networks", leave=False):
            total += H.gram(networks, X)
        return (total / T).to(X)

    tol = 1e-8 if x.dtype == torch.float64 else 1e-4
    pairs = few_passes(product, D, top, passes=20, tol=tol, seed=seed, device=device, dtype=x.dtype)
    if ntk:
        errors = H.jackknife(initialiser.draw(seed, 0, 1, device, dtype), pairs.vectors, groups=16)
    else:
        energies = torch.cat([H.energies(networks, pairs.vectors) for networks in groups()])
        errors = energies.std(0) / T**0.5 if T > 1 else torch.full((top,), float("nan"), device="cpu")
    trace = float("nan")  # would cost D products
    directions = pairs.vectors.T.reshape(-1, *x.shape).cpu().contiguous()
    return NADs(
        directions,
        pairs.values.double().cpu(),
        errors.cpu(),
        trace,
        T,
        seed,
        method,
        0.0,
        fallback=dict(initialiser.reasons),
    )


def _checked(chunks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Refuse gradients that are not numbers, or all zero."""
    for start, rows in chunks:
        size = rows.abs().max()
        if not torch.isfinite(size):
            raise InputError(f"a network among {start} to {start + len(rows) - 1} gave NaN or infinite outputs")
        if start == 0 and size == 0:
            raise InputError(
                "all gradients are zero: at x = 0 a ReLU network without biases has none; use another x, "
                "or method='finite-difference'"
            )
        yield start, rows


def _result(
    sampler: Sampler,
    directions: Tensor,
    values: Tensor,
    errors: Tensor,
    trace: float,
    count: int,
    stability: list[tuple[int, float]],
    k: int,
) -> NADs:
    head = "sampled" if sampler.head is None else "marginal"
    step = sampler.step if sampler.method == "finite-difference" else 0.0
    return NADs(
        directions,
        values,
        errors,
        trace,
        count,
        sampler.seed,
        sampler.method,
        step,
        head,
        tuple(stability),
        k,
        dict(sampler.initialiser.reasons),
    )
