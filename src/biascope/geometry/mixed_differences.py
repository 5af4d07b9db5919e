"""Algorithm 2 of the NAD paper with finite differences, as it is printed, out of tangent kernels.

The paper takes the derivative of grad_theta f by x as a central difference of width h. Along the coordinates that is
H_h [p, D] with the columns (grad_theta f(x + h e_i) - grad_theta f(x - h e_i)) / 2h, and H_h^T H_h is made of the
tangent kernel K of the 2D perturbed inputs: (K++ - K+- - K-+ + K--) / 4h^2. H_h tends to d2f/dtheta dx as h goes to 0.
With ReLU it does not leave out the kinks; of a wide step it hardly depends on x, as the differences of Algorithm 1.

Printed is the difference along v itself, the vector of the power iteration, of length h for all of v and not for each
coordinate, and then the exact H^T. That is no linear map of v: its iteration may settle, but on no eigenvector (LeNet,
16 x 16 pixels, h = 100, 24 networks, H^T H averaged: on a direction with 0.70 of its energy in the first ten of
Algorithm 1; h = 0.01: 0.07).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from biascope.ensembles import Initialiser, scalar_of
from biascope.ensembles.evaluate import Scalarise
from biascope.errors import InputError
from biascope.functional import as_rows
from biascope.geometry.gradients import ROUNDING, perturbed
from biascope.geometry.mixed import NO_MIXED
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.geometry.nad_result import NADs
from biascope.kernels import ntk
from biascope.memory import budget
from biascope.progress import progress


def difference_gram(
    module: nn.Module, x: Tensor, step: float, scalarise: Scalarise | None = None, max_memory: str | int | None = None
) -> Tensor:
    """H_h^T H_h [D, D] of one network at x [*shape], in float64 throughout: kernels of small steps cancel.

    Example:
        >>> difference_gram(nn.Linear(2, 1), torch.ones(2), step=10.0)  # f = w x + b, so H = I for w and 0 for b
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    D = x.numel()
    points = perturbed(x.double(), 0, D, step)

    def output(out: Tensor) -> Tensor:
        return scalar_of(as_rows(out, len(out), None, module), scalarise)[:, None]

    K = ntk(module, points, outputs="sum", precision="float64", max_memory=max_memory, output=output).tensor
    both = K[:D] - K[D:]
    gram: Tensor = (both[:, :D] - both[:, D:]) / (4 * step**2)
    rounding = torch.finfo(torch.float64).eps * float(K.diagonal().sum()) / (4 * step**2)
    if rounding > ROUNDING * float(gram.diagonal().sum()):
        said = f"step={step:g} is so small that the differences are made of rounding: use a larger one"
        warnings.warn(said, stacklevel=2)
    return (gram + gram.T) / 2


def by_differences(
    initialiser: Initialiser,
    x: Tensor,
    step: float,
    T: int,
    top: int | None,
    stability_k: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    scalarise: Scalarise | None,
    max_memory: str | int | None,
) -> NADs:
    """Directions of E[H_h^T H_h], formed in full, of T networks at x: `nads` with derivative="finite-difference"."""
    D = x.numel()
    moments = BlockMoments(D, min(blocks_for(D, budget(max_memory, device)), T), device)
    for start in progress(range(0, T, initialiser.block), "networks"):
        networks = initialiser.draw(seed, start, min(start + initialiser.block, T), device, dtype)
        for i in range(len(networks)):
            moments.add_matrix(start + i, difference_gram(networks.module(i), x, step, scalarise, max_memory))
    if not moments.trace > 0:
        raise InputError(NO_MIXED)
    stability, k = list[tuple[int, float]](), min(stability_k, D // 2)
    if k and len(moments.sums) > 1:
        overlap, k = moments.split_half_overlap(k)
        stability.append((T, overlap))
    values, vectors = moments.eigh()
    vectors = vectors[:, :top]
    return NADs(
        vectors.T.reshape(-1, *x.shape).cpu().contiguous(),
        values[:top].cpu(),
        moments.spread(vectors),
        moments.trace,
        T,
        seed,
        "mixed-derivative",
        step,
        stability=tuple(stability),
        stability_k=k,
        fallback=dict(initialiser.reasons),
        x=x.cpu(),
    )
