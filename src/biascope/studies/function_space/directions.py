"""The anisotropy directions of one network's tangent kernel (NTK-NADs), all of them.

D = E_x[d2f / dtheta dx] over Gaussian inputs, at the initial weights of a single network; its right singular vectors
u_i are the directions, and the kernel's alignment with x -> <u_i, x> is the squared singular value (Stein's lemma).
`biascope.nads(method="ntk")` finds the leading ones without a matrix; here D^T D is formed column by column, which
gives the whole basis and costs a single pass.

The lemma needs the derivative in the sense of distributions. Differentiating twice, as the published code does, leaves
out what the kinks of ReLU contribute: for smooth activations it agrees with the mean of df/dtheta x^T, for LeNet with
ReLU the alignments come out about half as large. Directions and alignments here are those of the published code.
"""

import torch
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import Initialiser, record
from biascope.geometry.mixed import MixedDerivative
from biascope.linalg import psd_eigh
from biascope.seeds import derive, generator
from biascope.studies.function_space.setting import design
from biascope.studies.runs import Run, Value


def initialiser(name: str, image_size: int) -> Initialiser:
    """The networks that are drawn: one output, one input channel.

    Example:
        >>> initialiser("lenet", 8).template(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 1])
    """
    kind, options = design(name, (1, image_size, image_size))
    return record(lambda: nets.build(kind, **options))


def first_network(drawn: Initialiser, seed: int, device: str) -> nn.Module:
    """The network whose directions are measured, in eval mode: the first one of a seed."""
    return drawn.draw(seed, 0, 1, torch.device(device)).module(0).eval()


def kernel_directions(
    drawn: Initialiser, image_size: int, seed: int, n_points: int, device: str = "cpu", columns: int = 16
) -> tuple[Tensor, Tensor]:
    """Directions [D, 1, side, side], leading first, and alignments [D] of the first network of a seed.

    `columns` directions are differentiated along at once, which decides how much memory is needed.

    Example:
        >>> directions, alignments = kernel_directions(initialiser("mlp", 4), 4, seed=0, n_points=8)
        >>> directions.shape, bool((alignments.diff() <= 0).all())
        (torch.Size([16, 1, 4, 4]), True)
    """
    size = image_size**2
    points = torch.randn(n_points, 1, image_size, image_size, generator=generator(seed, "points")).to(device)
    H = MixedDerivative(drawn.template, points)
    network = drawn.draw(seed, 0, 1, torch.device(device))
    basis = torch.eye(size, device=device)
    gram = torch.cat([H.gram(network, part.T) for part in torch.split(basis, columns)], 1)
    values, vectors = psd_eigh(gram)
    return vectors.T.reshape(size, 1, image_size, image_size).float().cpu(), values.cpu()


def cached_directions(run: Run, name: str, image_size: int, n_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """`kernel_directions`, kept in the run's folder."""

    def compute() -> dict[str, Value]:
        found = kernel_directions(
            initialiser(name, image_size), image_size, derive(run.seed, "init", name, seed), n_points, run.device
        )
        return {"directions": found[0], "alignments": found[1]}

    kept = run.cached(f"directions {name} {image_size} {n_points} {seed}", compute)
    return torch.as_tensor(kept["directions"]), torch.as_tensor(kept["alignments"])
