"""Alignment of the tangent kernel with labels, without ever forming the kernel.

The numerator is exact: y^T K y = ||J^T y||^2, one backward pass per batch. The norm is sampled: for independent random
signs u, w the number u^T K w has mean square ||K||_F^2, and u^T K w = <J^T u, J^T w>. So m probes, pulled back once
each, give m (m - 1) / 2 pairs, for the whole network and for every layer alike. Centring K is centring y, u and w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from biascope.kernels.alignment import centring, kernel_targets
from biascope.kernels.pullback import add_pulled, group_size, layer_columns, no_vectors
from biascope.kernels.spectrum import Centring
from biascope.network.functional import ParamSelection, functional
from biascope.network.stream import Cut, Part, Stream, anatomy
from biascope.support.errors import InputError
from biascope.support.inputs import mark
from biascope.support.limits import Count
from biascope.support.precision import Precision, arithmetic
from biascope.support.processes import processes
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import grid, number, one_line


@dataclass(frozen=True)
class LabelAlignment:
    """How well labels align with a tangent kernel; the labels are centred as `centring` says ("" for not at all).

    Attributes:
        value: CKA, y^T K y / (||K||_F ||y||^2) of the centred kernel and labels; at most 1, whatever the sketch says.
        standard_error: of the value, from the sketch of the norm; 0 where the norm is exact.
        numerator: y^T K y of the labels as centred, exact.
        target_norm_squared: ||y||^2 = y^T y.
        alpha: y^T K y / n^2 = || mean_i y_i df(x_i)/dtheta ||^2 of the labels as centred here, so by default of
            centred ones. The papers' alpha(f*) under the empirical measure takes the labels as they are: it is this
            number with `centered=False`.
        alpha_normalized: y^T K y / y^T y, of the same labels; uncentred, an eigenvector of K gives its eigenvalue.
        frobenius: ||K||_F, estimated.
        frobenius_standard_error: of ||K||_F.
        samples: number of examples.
        sketch: number of probes (n * c when exact).
        seed: of the probes.
        centring: "per-output", "global" or "".
        layers: the same for the kernel of every layer, if asked for.
    """

    value: float
    standard_error: float
    numerator: float
    target_norm_squared: float
    alpha: float
    alpha_normalized: float
    frobenius: float
    frobenius_standard_error: float
    samples: int
    sketch: int
    seed: int
    centring: str
    layers: dict[str, LabelAlignment] = field(default_factory=dict, repr=False)
    __repr__ = one_line

    def __float__(self) -> float:
        return self.value

    def _repr_html_(self) -> str:
        """The alignment with its error, whole and by layer, for notebooks."""
        parts = {"all layers": self, **self.layers}
        rows = [(name, number(part.value, part.standard_error), part.alpha) for name, part in parts.items()]
        title = f"Alignment with the labels of {self.samples} examples, {self.sketch} probes"
        return grid(title, ["kernel of", "alignment", "alpha"], rows)


@checked
def label_alignment(
    model: nn.Module,
    x: Any,
    y: Tensor | None = None,
    centered: bool | Centring = True,
    sketch: int = 64,
    seed: int = 0,
    params: ParamSelection = None,
    by_layer: bool = False,
    output: Callable[[Any], Tensor] | None = None,
    *,
    precision: Precision = "float32",
    batch_size: Count | None = None,
    group: Any = None,
) -> LabelAlignment:
    """Centred alignment (CKA) of labels with the full tangent kernel of a model, in time linear in the data.

    Memory is one batch, the parameters and a group of pulled-back probes (1 GiB at most, or two of them); the data are
    read once without the model and then once per group of probes.

    Args:
        model: any nn.Module whose examples do not mix.
        x: a tensor [n, ...], a dict, or a re-iterable of batches x or (x, y).
        y: class indices [n] or targets [n, c]; None to take the labels of the batches.
        centered: True or "per-output" (over examples, for every output), "global" (over all), or False, which makes
            `alpha` the papers' alpha(f*).
        sketch: number of probes for ||K||_F, at least 3. The relative standard error of the value is at most about
            sqrt(2 / sketch), reached when one eigenvalue dominates. With sketch >= n * c the norm is exact.
        seed: of the probes.
        params: which parameters to differentiate.
        by_layer: also give the alignment of every layer's kernel.
        output: how to get a tensor from what the model returns.
        precision: "float32" (a float64 module stays float64) or "float64"; sums are in float64 always.
        batch_size: split larger batches into pieces of this size.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call with the same network
            and the same x; each runs its share through the network, and all get the whole result.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> result = label_alignment(net, torch.randn(40, 3), torch.randint(0, 2, (40,)), sketch=8)
        >>> 0 < result.alpha, result.samples
        (True, 40)
    """
    if sketch < 3:
        raise InputError(f"sketch={sketch}: at least 3 probes are needed for a standard error")
    kind, team = centring(centered), processes(group)
    with team:
        f = functional(model, params, output, precision, team)
        stream = Stream(f, x, Cut(batch_size, team=team))
        team.agree(mark(y), "every rank must be given the same y (checksum)")
        labels = _Labels(stream, y, kind)
        exact = stream.n * stream.outputs <= sketch
        probes = _Probes(stream, labels.sizes, stream.n * stream.outputs if exact else sketch, seed, kind, exact)
        layer_of = {}
        if by_layer:
            layer_of = {name: b.layer for b in anatomy(f, stream.first[0]).blocks for name in b.names}
        columns = layer_columns(f, layer_of) if by_layer else {}
        tops, norms = dict[str, float](), {name: _Pairs(exact) for name in ("", *columns)}
        with arithmetic(precision):
            for chosen, members in enumerate(probes.groups):
                G = no_vectors(f, len(members) + (chosen == 0))
                for part in stream.parts():
                    first = [labels(part)] if chosen == 0 else []
                    add_pulled(G, f, part, chain(first, probes(chosen, part)))
                if not stream.lockstep:
                    team.sum(G)
                products = {name: (own := G[:, columns[name]] if name else G) @ own.mT for name in norms}
                if stream.lockstep:  # every process has the entries of its parameters
                    team.sum(*products.values())
                if chosen == 0:
                    tops = {name: float(S[0, 0]) for name, S in products.items()}
                for name, S in products.items():
                    norms[name].add(S[1:, 1:] if chosen == 0 else S)

    def result(name: str, layers: dict[str, LabelAlignment]) -> LabelAlignment:
        top, yy = tops[name], labels.norm_squared
        square, error = norms[name].estimate()
        norm = math.sqrt(max(square, 0.0))
        relative = 0.5 * error / square if square > 0 else math.nan
        value = min(top / (norm * yy), 1.0) if norm > 0 else math.nan  # the norm is an estimate and may be too small
        return LabelAlignment(
            value,
            value * relative,
            top,
            yy,
            top / stream.n**2,
            top / yy,
            norm,
            norm * relative,
            stream.n,
            probes.count,
            seed,
            kind,
            layers,
        )

    return result("", {name: result(name, {}) for name in columns})


class _Labels:
    """The cotangent y of every piece, centred over the whole data."""

    def __init__(self, stream: Stream, y: Tensor | None, kind: str) -> None:
        self.y = y
        self.stream = stream
        if y is not None and stream.shuffles:
            raise InputError(
                "x is a DataLoader that shuffles, so y does not belong to it; leave y out to use its labels"
            )
        self.sizes: list[int] = []
        total, squares = torch.zeros((), dtype=torch.float64, device="cpu"), 0.0
        for part in stream.pieces():  # without the model
            t = self._targets(part)
            self.sizes.append(len(t))
            total, squares = total + t.sum(0), squares + float(t.square().sum())
        n, c = stream.n, stream.outputs
        if y is not None and len(y) != n:
            raise InputError(f"y has {len(y)} labels for {n} examples")
        self.mean = torch.zeros((), dtype=torch.float64, device="cpu")
        if kind:
            self.mean = total / n if kind == "per-output" else total.mean() / n
        self.norm_squared = squares - n * float(self.mean.square().expand(c).sum())
        if not self.norm_squared > 1e-12 * squares:
            raise InputError("all labels are equal: after centring nothing is left to align with")

    def _targets(self, part: Part) -> Tensor:
        s, labels = part.at, part.labels
        b, c = s.stop - s.start, self.stream.outputs
        if self.y is not None:
            if self.y.dim() == 0 or len(self.y) < s.stop:
                got = len(self.y) if self.y.dim() else "no"
                raise InputError(f"y has {got} labels, but x has at least {s.stop} examples")
            mine = self.y[s]
            same_kind = labels is not None and not labels.is_floating_point() and labels.shape == mine.shape
            if same_kind and not torch.equal(labels.to(mine), mine):  # type: ignore[union-attr]
                raise InputError(
                    f"y differs from the labels that x itself gives for examples {s.start} to {s.stop - 1}"
                )
            labels = mine
        if labels is None:
            raise InputError("there are no labels: pass y, or an x that gives batches (x, y)")
        return kernel_targets(labels.detach().cpu(), b, c, False)

    def __call__(self, part: Part) -> Tensor:
        return self._targets(part) - self.mean


class _Probes:
    """Random signs [b, c] for every probe and piece, centred; drawn again whenever needed, never stored."""

    def __init__(self, stream: Stream, sizes: list[int], count: int, seed: int, kind: str, exact: bool) -> None:
        self.sizes = sizes  # of the parts
        self.stream, self.count, self.seed, self.exact, self.kind = stream, count, seed, exact, kind
        size = count if exact else group_size(stream.f, count)
        parts = max(1, count // size)  # no group smaller than `size`: pairs live inside groups
        self.groups = [list(range(i * count // parts, (i + 1) * count // parts)) for i in range(parts)]
        self._means: dict[int, Tensor] = {}

    def _draw(self, group: int, s: slice) -> Tensor:
        shape = (len(self.groups[group]), s.stop - s.start, self.stream.outputs)
        if self.exact:  # unit vectors: rows of J
            flat = torch.zeros(shape[0], self.stream.n * shape[2], dtype=torch.float64, device="cpu").fill_diagonal_(
                1.0
            )
            return flat.view(shape[0], self.stream.n, shape[2])[:, s]
        gen = generator(self.seed, "label_alignment", group, s.start)
        return torch.randint(0, 2, shape, generator=gen, dtype=torch.int8, device="cpu") * 2.0 - 1.0

    def _mean(self, group: int) -> Tensor:
        if group not in self._means:
            total, start = torch.zeros((), device="cpu"), 0
            for b in self.sizes:
                total = total + self._draw(group, slice(start, start + b)).sum(1)  # [m, c]
                start += b
            mean = total / self.stream.n
            self._means = {group: (mean if self.kind == "per-output" else mean.mean(1, keepdim=True))[:, None]}
        return self._means[group]

    def __call__(self, group: int, part: Part) -> Iterator[Tensor]:
        whole = part.whole or part.at  # drawn as one process draws them
        u = self._draw(group, whole)[:, part.at.start - whole.start : part.at.stop - whole.start]
        yield from u - self._mean(group) if self.kind else u


class _Pairs:
    """||K||_F^2 as the mean of (u_i^T K u_j)^2 over pairs i != j, with a jackknife error over the probes."""

    def __init__(self, exact: bool) -> None:
        self.exact, self.rows, self.partners = exact, [], []  # type: ignore[var-annotated]

    def add(self, S: Tensor) -> None:
        S = S.square()
        rows = S.sum(1) if self.exact else S.sum(1) - S.diagonal()
        self.rows += rows.tolist()
        self.partners += [len(S) - 1] * len(S)

    def estimate(self) -> tuple[float, float]:
        rows = torch.tensor(self.rows, dtype=torch.float64, device="cpu")
        if self.exact:
            return float(rows.sum()), 0.0
        partners = torch.tensor(self.partners, dtype=torch.float64, device="cpu")
        without = (rows.sum() - 2 * rows) / (partners.sum() - 2 * partners)
        m = len(rows)
        error = ((m - 1) / m * (without - without.mean()).square().sum()).sqrt()
        return float(rows.sum() / partners.sum()), float(error)
