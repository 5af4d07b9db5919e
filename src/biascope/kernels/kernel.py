"""The kernel as an object: its values, how it was computed, and the questions people ask of it."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from biascope.kernels import figures
from biascope.kernels.alignment import alignment, targets_of
from biascope.kernels.plan import Plan
from biascope.kernels.spectrum import Centring, Spectrum, centre, spectrum
from biascope.support.arguments import check_count
from biascope.support.errors import CorruptError, InputError, UnsupportedError
from biascope.support.files import read_tensors, write_tensors
from biascope.support.signatures import checked
from biascope.support.tables import facts, several

SHOWN_UP_TO = 512  # rows up to which a notebook may wait for the spectrum
SAVED = ("outputs", "mode", "symmetric", "error", "centring", "model_outputs")
FORMS = "[c, n1, c, n2] (full), [n1, n2] (trace) or [c, n1, n2] (diagonal)"
DIMS = {"full": 4, "trace": 2, "diagonal": 3}  # dimensions of the values, by mode


@dataclass(frozen=True, repr=False)
class Kernel:
    """A tangent kernel.

    `values` is kept in the layout in which it was summed; use `tensor` (shapes of the API) or `matrix()`.

    Example:
        >>> import biascope as bs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> K = bs.ntk(net, torch.randn(6, 3))
        >>> K.matrix().shape, K.eigh(k=2).values.shape
        (torch.Size([12, 12]), torch.Size([2]))
    """

    values: Tensor
    outputs: str | int
    mode: str  # "full" [k, n1, k, n2] | "trace" [n1, n2] | "diagonal" [k, n1, n2]
    symmetric: bool
    plan: Plan | None = None
    error: float | None = None  # relative Frobenius error against float64 on sampled examples, where measured
    layers: dict[str, Tensor] | None = field(default=None, compare=False)  # values of every layer, where asked for
    centring: str | None = None
    model_outputs: int | None = None  # of the model, where known: with one output, integer labels are values

    def __post_init__(self) -> None:
        v, full = self.values, self.mode == "full"
        if not (isinstance(v, Tensor) and v.dim() == DIMS.get(self.mode) and v.is_floating_point()):
            got = f"a {type(v).__name__} {list(getattr(v, 'shape', []))} {getattr(v, 'dtype', '')}"
            raise InputError(f"values of mode {self.mode!r}: a floating-point tensor {FORMS} is needed, not {got}")
        if self.symmetric and v.shape[-3 if full else -2] != v.shape[-1]:
            raise InputError(f"a symmetric kernel is square, not {list(v.shape)}: pass symmetric=False")

    @property
    def tensor(self) -> Tensor:
        """full: [n1, c, n2, c]; trace, sum, single output: [n1, n2]; diagonal: [c, n1, n2]."""
        return self.values.permute(1, 0, 3, 2) if self.mode == "full" else self.values

    @property
    def n(self) -> tuple[int, int]:
        """Number of examples (rows, columns)."""
        if self.mode == "full":
            return self.values.shape[1], self.values.shape[3]
        return self.values.shape[-2], self.values.shape[-1]

    def matrix(self) -> Tensor:
        """As a matrix: full [n1 * c, n2 * c] (examples major), otherwise [n1, n2]."""
        if self.mode == "diagonal":
            raise UnsupportedError("a 'diagonal' kernel is one matrix per output: use K.tensor[i]")
        t = self.tensor
        return t.reshape(t.shape[0] * t.shape[1], -1) if self.mode == "full" else t

    def numpy(self) -> Any:
        """`tensor` as a numpy array."""
        return self.tensor.cpu().numpy()

    def _square(self, what: str) -> None:
        if not self.symmetric:
            raise UnsupportedError(f"{what} needs the symmetric kernel K(x, x); this one is K(x, x2): leave x2 out")

    def _with(self, values: Tensor, **changes: Any) -> Kernel:
        return replace(self, values=values, layers=None, **changes)

    # ------------------------------------------------------------------------------------------------- the matrix

    @checked
    def centered(self, kind: Centring = "per-output") -> Kernel:
        """Kernel of centred tangent features.

        "per-output" subtracts the mean over examples for every output (C K C on example indices of every block);
        "global" subtracts the mean over all (example, output) pairs. They differ for "full" kernels only.
        """
        self._square("centring")
        return self._with(centre(self.values, self.mode, kind), centring=kind)

    def normalized(self) -> Kernel:
        """K_ij / sqrt(K_ii K_jj), the cosine of tangent features."""
        self._square("normalising")
        k, n = (self.values.shape[0], self.values.shape[1]) if self.mode == "full" else (1, self.values.shape[-1])
        M = self.values if self.mode == "diagonal" else self.values.reshape(k * n, k * n)
        # one factor at a time: the product K_ii K_jj leaves float32 long before its root does
        d = M.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(M.dtype).tiny).rsqrt()
        return self._with((M * d[..., :, None] * d[..., None, :]).view_as(self.values))

    def trace(self) -> float:
        """Sum of the diagonal (over examples and outputs), summed in float64."""
        self._square("the trace")
        if self.mode == "diagonal":
            return float(self.values.diagonal(dim1=1, dim2=2).double().sum())
        return float(self.matrix().diagonal().double().sum())

    def frobenius_norm(self) -> float:
        """Frobenius norm of all entries, accumulated in float64."""
        return float(torch.linalg.vector_norm(self.values, dtype=torch.float64))

    # ------------------------------------------------------------------------------------------------ the spectrum

    @checked
    def eigh(self, k: int | None = None, normalize: bool = False) -> Spectrum:
        """Eigenvalues (descending) and eigenvectors of the matrix; the top k only if k is given.

        Returns:
            Spectrum(values [k], vectors [N, k], residuals [k]); `resolved` [k] says which pairs are found. With
            `normalize` the values are those of the kernel operator under the empirical measure (divided by n) and
            vectors are eigenfunctions with mean square 1.
        """
        self._square("the spectrum")
        return spectrum(self.matrix(), k, self.n[0], normalize)

    @checked
    def effective_rank(self, kind: Literal["entropy", "participation"] = "entropy") -> float:
        """exp(entropy of the normalised eigenvalues), or the participation ratio (sum)^2 / (sum of squares)."""
        return self.eigh().effective_rank(kind)

    @checked
    def trace_ratios(self, ks: tuple[int, ...] = (40, 80, 160)) -> dict[int, float]:
        """Share of the trace in the top k eigenvalues, for several k."""
        values = self.eigh().values.double()
        return {k: float(values[: check_count(k, "k")].sum() / values.sum()) for k in ks}

    # --------------------------------------------------------------------------------------------------- the task

    @checked
    def alignment(self, other: Tensor | Kernel, centered: Centring | bool = "per-output") -> float:
        """Centred kernel alignment (CKA) with labels or with another kernel, in [0, 1] for PSD kernels.

        With c balanced classes a trace kernel can reach 1, a full kernel that treats all outputs alike no more than
        1 / sqrt(c (c - 1)): compare trace kernels.

        Args:
            other: class indices [n], targets [n, d] (or [n]), or a Kernel of the same shape. Integers are class indices
                unless they are all -1 or +1, or the model has one output (`model_outputs`, known of kernels made by
                `ntk`; of a kernel put together by hand it is taken to have several unless that says so).
            centered: "per-output" (default), "global", or False for the uncentred alignment.
        """
        return alignment(self, other, centered)

    @checked
    def energy_concentration(self, y: Tensor, k: int, squared: bool = True) -> float:
        """Share of the labels' energy in the top k eigenvectors: ||Phi_k y||^2 / ||y||^2 (or the norms' ratio).

        The paper prints a ratio of norms and calls it energy; squared is the default. Random labels give about k / N.
        Eigenvectors that could not be resolved are refused; a warning says where some of the k eigenvalues are zero.
        """
        target = targets_of(self, y)
        target = target if self.mode == "trace" else target.reshape(-1, 1)
        spec = self.eigh(k)
        if not spec.whole and not bool(spec.resolved.all()):
            _warn_of_span(spec)
        vectors = spec.vectors.to(target)
        share = float((vectors.mT @ target).square().sum() / target.square().sum())
        return share if squared else share**0.5

    def by_layer(self) -> dict[str, Kernel]:
        """Kernels of the single layers, which sum to this one: of a kernel made with `bs.ntk(..., by_layer=True)`."""
        if self.layers is None:
            raise UnsupportedError(
                "this kernel has no layers: ask for them with bs.ntk(..., by_layer=True), and take by_layer() before "
                "centring, normalising or saving it"
            )
        return {name: self._with(values) for name, values in self.layers.items()}

    @checked
    def pca(self, k: int = 2) -> Tensor:
        """Kernel PCA coordinates [N, k] of the centred kernel."""
        spec = self.centered().eigh(k)
        return spec.vectors * spec.values.clamp_min(0).sqrt()

    # ------------------------------------------------------------------------------------------------ in and out

    @checked
    def save(self, path: str | Path) -> None:
        """Write values (safetensors) with the description in the header; the file appears whole or not at all."""
        meta = {"format": "biascope-kernel-1", **{name: getattr(self, name) for name in SAVED}}
        write_tensors(Path(path), {"values": self.values}, {"biascope": json.dumps(meta)})

    @staticmethod
    @checked
    def load(path: str | Path) -> Kernel:
        """Read a kernel written by `save`."""
        try:
            tensors, metadata = read_tensors(Path(path))
            meta, values = json.loads(metadata["biascope"]), tensors["values"]
        except (CorruptError, KeyError, json.JSONDecodeError) as error:
            raise CorruptError(f"{path} is not a kernel saved by biascope: {error}") from error
        meta.pop("format")
        return Kernel(values, **meta)

    def plot(self, ax: Any = None) -> Any:
        """Heat map of the kernel and its spectrum; returns the matplotlib figure."""
        return figures.plot_kernel(self, ax)

    def _repr_html_(self) -> str:
        """Size, trace and, of a small kernel, the head of the spectrum, for notebooks."""
        n1, n2 = self.n
        rows: dict[str, object] = {"examples": f"{n1} x {n2}", "tensor": str(list(self.tensor.shape))}
        if self.symmetric:
            rows["trace"] = self.trace()
        small = self.symmetric and self.mode != "diagonal" and self.values.numel() <= SHOWN_UP_TO**2
        if small and bool(torch.isfinite(self.values).all()):
            found = self.eigh()
            rows["leading eigenvalues"] = several(found.values[:5])
            rows["effective rank"] = found.effective_rank()
        rows |= {"centred": self.centring} if self.centring else {}
        rows |= {"error against float64": f"{self.error:.1e}"} if self.error is not None else {}
        rows["numbers"] = f"{str(self.values.dtype).removeprefix('torch.')} on {self.values.device}"
        return facts(f"Tangent kernel, outputs = {self.outputs}", rows)

    def __repr__(self) -> str:
        n1, n2 = self.n
        text = f"Kernel(outputs={self.outputs!r}, {n1} x {n2} examples, tensor {list(self.tensor.shape)}"
        text += f", {str(self.values.dtype).removeprefix('torch.')} on {self.values.device}"
        text += f", centred {self.centring}" if self.centring else ""
        text += f", error {self.error:.1e} against float64" if self.error is not None else ""
        return text + ")"


def _warn_of_span(spec: Spectrum) -> None:
    """Warn of a span of leading eigenvectors that is not defined; one that was not found is refused."""
    if isnan(spec.negative):  # not all eigenvalues are known: others may be larger than these
        spec.refuse_unresolved()
    rank = int(spec.resolved.long().cumprod(0).sum())
    warnings.warn(
        f"only {rank} of the first {len(spec.values)} eigenvalues are above zero: which other vectors count is "
        f"rounding; ask for k={rank}",
        stacklevel=4,
    )
