"""What `nads` gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.geometry import files
from biascope.linalg import effective_rank, marchenko_pastur, principal_angles, subspace_overlap
from biascope.linalg.spectra import MarchenkoPastur
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.limits import Count, check_shapes
from biascope.support.signatures import checked
from biascope.support.tables import facts, grid, number


@dataclass(frozen=True, eq=False, repr=False)
class NADs:
    """Neural anisotropy directions: eigenvectors of the second moment of the input gradient, leading first.

    Equal (==) only to itself; `overlap` compares directions.

    Attributes:
        directions: [k, *input_shape], orthonormal; signs and bases inside repeated eigenvalues are arbitrary.
        eigenvalues: [k], of the second moment itself (not singular values).
        standard_errors: [k], of the eigenvalues (delta method over blocks of networks; without the bias of sample
            eigenvalues, for which see `marchenko_pastur`).
        trace: of the whole second moment; NaN where it is only known by products.
        n_networks: how many networks were drawn.
        seed: of the networks and of the evaluation points.
        method: finite-difference, autograd, mixed-derivative or ntk.
        step: of the finite differences.
        head: "sampled", or "marginal" when the last layer was averaged out in closed form.
        stability: (n_networks, split-half overlap) pairs as networks accumulated; the overlap of the leading
            directions of one half of the networks with those of the other, at other inputs unless x was given. The
            whole is better than its halves.
        stability_k: how many leading directions the last of `stability` is about: fewer than asked for where a half
            spans fewer.
        fallback: {parameter: why} if the factory had to be called for each network.
        resolved: how many leading directions the eigensolver is certain of; None: all of them.
        center: whether the mean gradient was taken off.
        precision: arithmetic of the networks.
        x: the evaluation point [*input_shape]; None where there were several.
        inputs: how many evaluation points there were: 1 of a given x, 2 of finite differences (one for the even
            networks and one for the odd ones), else one for each network.
    """

    directions: Tensor
    eigenvalues: Tensor
    standard_errors: Tensor
    trace: float
    n_networks: int
    seed: int
    method: str
    step: float
    head: str = "sampled"
    stability: tuple[tuple[int, float], ...] = ()
    stability_k: int = 10
    fallback: dict[str, str] = field(default_factory=dict)
    resolved: int | None = None
    center: bool = False
    precision: str = "float32"
    x: Tensor | None = None
    inputs: int = 1

    def __repr__(self) -> str:
        """How many directions of what, how they were measured, and the first eigenvalues with their errors."""
        leading = zip(self.eigenvalues[:3].tolist(), self.standard_errors[:3].tolist())
        more = ", ..." if len(self.eigenvalues) > 3 else ""
        agree = f", {self._halves}: {self.stability[-1][1]:.3g}" if self.stability else ""
        agree += f", cosine of the first with x {self.towards_x:.2f}" if self.x is not None else ""
        return (
            f"NADs({len(self.directions)} directions of inputs {list(self.input_shape)} by {self.method}, "
            f"{self.n_networks} networks, head {self.head}, seed {self.seed}: eigenvalues "
            f"{', '.join(number(*pair) for pair in leading)}{more}, trace {self.trace:.4g}{agree})"
        )

    @property
    def towards_x(self) -> float:
        """|cosine| between the first direction and the input x; 0 where there were several inputs, or x = 0.

        Near 1, the direction says where the networks were looked at, not what they are.
        """
        if self.x is None or not bool(self.x.any()):
            return 0.0
        x = self.x.double().flatten()
        return float((self.directions[0].double().flatten() @ x / x.norm()).abs())

    @property
    def _halves(self) -> str:
        """What `stability` compares."""
        where = "at other inputs" if self.inputs > 1 else "at the same input"
        return f"overlap of the first {self.stability_k} between halves of the networks {where}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.directions.shape[1:])

    @property
    def dimension(self) -> int:
        """D."""
        return math.prod(self.input_shape)

    @checked
    def fourier_energy(self, dims: Count = 2) -> Tensor:
        """|FFT|^2 of each direction over its last `dims` dimensions, each adding up to 1, DC central: [k, *shape].

        2 for images, 1 for signals [channels, length] (two would take a frequency over channels too), 3 for volumes.

        Example:
            >>> flat = NADs(torch.full((1, 1, 4, 4), 0.25), torch.ones(1), torch.zeros(1), 1.0, 1, 0, "autograd", 0.0)
            >>> flat.fourier_energy()[0, 0, 2, 2].item()
            1.0
        """
        if len(self.input_shape) < dims:
            raise UnsupportedError(f"inputs {list(self.input_shape)} have no {dims} dimensions: use fourier_energy(1)")
        last = tuple(range(-dims, 0))
        energy = torch.fft.fftn(self.directions.double(), dim=last).abs().square()
        energy = energy / energy.flatten(1).sum(1).view(-1, *[1] * len(self.input_shape))
        shifted: Tensor = torch.fft.fftshift(energy, dim=last)
        return shifted

    @checked
    def overlap(self, other: NADs | Tensor, k: Count) -> float:
        """Mean squared cosine between the spans of the first k directions of both; k / D for random ones.

        `other` may be a tensor of directions, [>= k, *input_shape] or [>= k, D].
        """
        return subspace_overlap(*self._spans(other, k))

    @checked
    def principal_angles(self, other: NADs | Tensor, k: Count) -> Tensor:
        """Principal angles [k] in radians, ascending, between the spans of the first k directions of both.

        `other` as in `overlap`; its first k must be linearly independent.
        """
        angles = principal_angles(*self._spans(other, k))
        if len(angles) < k:
            raise InputError(f"k={k}, but the first {k} directions of other span {len(angles)} dimension(s) only")
        return angles

    def _spans(self, other: NADs | Tensor, k: int) -> tuple[Tensor, Tensor]:
        theirs = other.directions if isinstance(other, NADs) else other
        check_shapes("other [k, D, ...]", theirs)
        if k > min(len(self.directions), len(theirs)):
            raise InputError(f"k={k} of {len(self.directions)} directions and of {len(theirs)} others")
        own, their = self.input_shape, tuple(theirs.shape[1:])
        # a flat list has the order of the other; sides of length 1 do not change it
        alike = min(len(own), len(their)) == 1 or [n for n in own if n > 1] == [n for n in their if n > 1]
        if math.prod(own) != math.prod(their) or not alike:
            raise InputError(f"inputs of different shape: {list(own)} and {list(their)}")
        return self.directions[:k].flatten(1).double().T.cpu(), theirs[:k].flatten(1).double().T.cpu()

    @checked
    def effective_rank(self, kind: Literal["entropy", "participation"] = "entropy") -> float:
        """How many directions matter, from 1 to D: exp of the entropy of the eigenvalues' shares, or the participation
        ratio (sum lambda)^2 / sum lambda^2.

        Example:
            >>> flat = NADs(torch.eye(4), torch.ones(4), torch.zeros(4), 4.0, 1, 0, "autograd", 0.0)
            >>> round(flat.effective_rank(), 6), flat.effective_rank("participation"), flat.decay_index()
            (4.0, 4.0, 0.0)
        """
        return effective_rank(self._all(), kind)

    def decay_index(self) -> float:
        """a of the power law lambda_i ~ i^-a through all positive eigenvalues, by least squares in logarithms."""
        values = self._all()
        values = values[values > 1e-12 * values[0]]
        index, height = torch.arange(1, len(values) + 1, dtype=torch.float64, device="cpu").log(), values.log()
        index, height = index - index.mean(), height - height.mean()
        return float(-(index @ height) / (index @ index).clamp(min=1e-300)) + 0.0

    def _all(self) -> Tensor:
        if len(self.eigenvalues) < self.dimension:
            raise UnsupportedError(
                f"all {self.dimension} eigenvalues are needed: leave out top={len(self.eigenvalues)}"
            )
        return self.eigenvalues.double().clamp(min=0.0)

    def marchenko_pastur(self) -> MarchenkoPastur:
        """Where the eigenvalues of as many isotropic gradients of the same total variance would lie.

        An isotropic network fills this band; only eigenvalues outside are evidence of anisotropy.
        """
        if self.head != "sampled" or self.method not in ("finite-difference", "autograd"):
            raise UnsupportedError("the Marchenko-Pastur law is for independent gradients: method and head must sample")
        return marchenko_pastur(self.n_networks, self.dimension, max(self.trace / self.dimension, 1e-300))

    def _repr_html_(self) -> str:
        """How it was measured, and the leading eigenvalues with errors and shares of the trace, for notebooks."""
        rows: dict[str, object] = {
            "directions": f"{len(self.directions)} of inputs {list(self.input_shape)}",
            "networks": self.n_networks,
        }
        rows |= {} if math.isnan(self.trace) else {"trace": self.trace}
        if self.resolved is not None and self.resolved < len(self.directions):
            rows["certain"] = f"the first {self.resolved}; the others did not converge"
        if self.stability:
            rows[self._halves] = self.stability[-1][1]
        if self.x is not None:
            rows["cosine of the first with x"] = self.towards_x
        rows |= {"head": self.head, "seed": self.seed}
        leading = zip(self.eigenvalues[:5].tolist(), self.standard_errors[:5].tolist())
        shares = [
            (i + 1, number(value, error), f"{value / self.trace:.2%}" if self.trace > 0 else "")
            for i, (value, error) in enumerate(leading)
        ]
        head = ["NAD", "eigenvalue", "share of the trace"]
        return facts(f"NADs by {self.method}", rows) + grid("Leading directions", head, shares)

    @checked
    def plot(self, first: Count = 3) -> Any:
        """The first directions in pixels and in Fourier space, and the spectrum (matplotlib figure).

        Of several channels the pixels are those of the one with the most energy, which the title names; the Fourier
        picture is the sum over all of them.
        """
        from biascope.geometry.figures import plot_nads

        return plot_nads(self, first)

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        tensors = {name: getattr(self, name) for name in ("directions", "eigenvalues", "standard_errors")}
        tensors |= {} if self.x is None else {"x": self.x}
        files.write(path, "nads", tensors, {name: getattr(self, name) for name in _PLAIN})

    @classmethod
    @checked
    def load(cls, path: str | Path) -> NADs:
        """Read what `save` wrote."""
        tensors, about = files.read(path, "nads", "NADs")
        about["stability"] = tuple((int(n), float(value)) for n, value in about["stability"])
        return cls(**tensors, **about)


_PLAIN = (
    *("trace", "n_networks", "seed", "method", "step", "head", "stability", "stability_k", "fallback"),
    *("resolved", "center", "precision", "inputs"),
)
