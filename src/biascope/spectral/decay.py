"""How fast a spectrum falls: exponents of its envelope, and the bounds on its size (theorem 3.3, equation 7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from biascope.spectral.norms import spectral_norm
from biascope.spectral.regions import Polygons, Segments
from biascope.spectral.relu_network import ReLUNetwork, affine_map, relu_network
from biascope.spectral.transform import fourier_transform
from biascope.support.errors import InputError
from biascope.support.limits import Count, Positive
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import facts, number, one_line

Transform = Callable[[Tensor], Tensor]  # wave vectors [n, d] -> f~ [n]


@dataclass(frozen=True)
class Decay:
    """|f~(k)| falls like k^exponent between k_min and k_max; its standard error is that of the least-squares line."""

    exponent: float
    standard_error: float
    k: Tensor
    envelope: Tensor
    __repr__ = one_line

    def _repr_html_(self) -> str:
        """The exponent with its error, for notebooks."""
        rows = {"exponent": number(self.exponent, self.standard_error)}
        return facts("Decay of the Fourier transform", rows | {"over k": f"{self.k.min():.4g} to {self.k.max():.4g}"})


@dataclass(frozen=True)
class LipschitzBounds:
    """local_max <= L_f <= spectral_product <= maxnorm_bound, for the regions or points that were seen.

    Attributes:
        local_max: the largest spectral norm of W_eps found, a lower bound of L_f.
        spectral_product: the product of the layers' spectral norms.
        maxnorm_bound: |theta|_max^{L+1} sqrt(d c) d_1 ... d_L over the weights, for c outputs.
    """

    local_max: float
    spectral_product: float
    maxnorm_bound: float

    def _repr_html_(self) -> str:
        """The bounds, smallest first, for notebooks."""
        return facts("Bounds of the Lipschitz constant", vars(self))


@checked
def decay_exponent(
    transform: Segments | Polygons | Transform,
    direction: Sequence[float] = (1.0,),
    k_min: Positive = 30.0,
    k_max: Positive = 3000.0,
    bins: Count = 24,
    per_bin: Count = 160,
    boundary: bool = False,
) -> Decay:
    """Slope of log |f~(k u)| over log k along a direction u, on the largest value in each of `bins` ranges of k.

    The phases make |f~| dip; the largest value in a range follows the envelope. `boundary=False` looks at the sum of
    Lemma 3.1, without the jump that cutting a network off at a box would add. A network itself is refused: it has no
    transform before it is said on which box, so give `linear_regions_1d(net, low, high)` or `linear_regions_2d`.

    Example:
        >>> hat = Segments.through([0.0, 0.5, 1.0], [0.0, 0.5, 0.0])
        >>> round(decay_exponent(hat).exponent, 1)
        -2.0
    """
    if isinstance(transform, nn.Module | ReLUNetwork):
        raise InputError(f"{type(transform).__name__} is a network: pass linear_regions_1d(net, low, high), or _2d")
    u = torch.tensor([float(v) for v in direction], dtype=torch.float64, device="cpu")
    if not k_min < k_max or bins < 3 or not u.any():
        raise InputError(f"need k_min={k_min} < k_max={k_max}, bins={bins} >= 3, direction={tuple(direction)} not zero")
    edges = torch.logspace(0, 1, bins + 1, base=k_max / k_min, dtype=torch.float64, device="cpu") * k_min
    k = torch.cat(
        [torch.linspace(a, b, per_bin + 1, dtype=torch.float64, device="cpu")[:-1] for a, b in pairwise(edges.tolist())]
    )
    waves = k[:, None] * (u / u.norm())
    if isinstance(transform, Segments | Polygons):
        values = fourier_transform(transform, waves, boundary=boundary)
    else:
        values = transform(waves)
    envelope, place = values.abs().reshape(bins, per_bin, -1).norm(dim=2).max(dim=1)
    at = k.reshape(bins, per_bin).gather(1, place[:, None])[:, 0]
    if not bool(((envelope > 0) & envelope.isfinite()).all()):
        raise InputError("the transform is zero in a whole range of k, NaN or infinite: there is no exponent")
    x, y = at.log(), envelope.log()
    x = x - x.mean()
    slope = float((x * y).sum() / x.square().sum())
    rest = y - y.mean() - slope * x
    error = float((rest.square().sum() / (bins - 2) / x.square().sum()).sqrt())
    return Decay(slope, error, at, envelope)


@checked
@without_autocast()
def lipschitz_bounds(model: nn.Module | ReLUNetwork, x: Tensor) -> LipschitzBounds:
    """The chain of equation 7 for a network; W_eps is that of the regions that x [n, d] falls in.

    Example:
        >>> found = lipschitz_bounds(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(50, 2))
        >>> found.local_max <= found.spectral_product <= found.maxnorm_bound
        True
    """
    net = relu_network(model, x)
    local = torch.linalg.matrix_norm(affine_map(net, x)[0], 2).max()
    product = torch.stack([spectral_norm(w) for w in net.weights]).prod()
    largest = max(float(w.abs().max()) for w in net.weights)
    d, *hidden, c = net.widths
    bound = largest ** len(net.weights) * (d * c) ** 0.5
    for width in hidden:
        bound *= width
    return LipschitzBounds(float(local), float(product), bound)
