"""Influence of training examples on queries, streamed: gradients stay in factors, or become a few random features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.contract import gradient_rows, token_gradients
from biascope.curvature.families import EXACT, ClassDim, Likelihood, likelihood_family
from biascope.curvature.feature_store import FeatureStore
from biascope.curvature.features import Draws, Features
from biascope.curvature.metric import Metric
from biascope.curvature.passes import Labelled, Pass
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.tokens import output_shape
from biascope.network.functional import functional
from biascope.network.layers.blocks import Factor, MatrixFactor
from biascope.network.stream import Cut, Forward, Stream, anatomy
from biascope.support.arguments import check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.estimate import Estimate
from biascope.support.files import checksum
from biascope.support.inputs import mark
from biascope.support.limits import Count, NonNegative
from biascope.support.memory import parse_bytes
from biascope.support.precision import Precision, arithmetic
from biascope.support.signatures import checked
from biascope.support.tables import columns, facts

Factors = dict[tuple[str, ...], Factor]
SCORES = 2**27  # numbers in a matrix of all scores
PARTS = 2**22  # entries of gradients that are formed at a time


@dataclass(frozen=True)
class Influence:
    """How much training on an example lowers the loss of a query: g_q^T (F + damping I)^-1 g_i.

    top [q, k]: the examples with the largest scores, the largest first, with their scores `values` and the standard
    errors `errors` of the projection (zero without one). scores [q, n] are all of them. self_influence [n] is that of
    every example on itself.
    """

    top: Tensor
    values: Tensor
    errors: Tensor
    scores: Tensor
    damping: float
    dim: int | None
    self_influence: Tensor | None = None

    def __str__(self) -> str:
        rows = [
            (q, int(i), f"{float(v):.4g}", f"{float(e):.2g}")
            for q, (top, values, errors) in enumerate(zip(self.top[:10], self.values, self.errors))
            for i, v, e in zip(top[:5], values, errors)
        ]
        return columns(["query", "example", "score", "error"], rows)

    def _repr_html_(self) -> str:
        q, n = self.scores.shape
        how = "exact" if self.dim is None else f"{self.dim} random features"
        return facts("Influence", {"queries": q, "examples": n, "damping": self.damping, "products": how})

    def lds(self, subsets: Tensor, measured: Tensor) -> Estimate:
        """Linear datamodelling score: how well sums of scores order what networks trained on subsets do.

        The Spearman correlation over subsets of the sum of an example's scores and of the measured outputs, mean over
        the queries with its standard error.

        Args:
            subsets: [m, n], True where an example was in the training set of a network.
            measured: [m, q], for every such network and query a number that grows as the loss falls, such as -loss.
        """
        return lds(self.scores, subsets, measured)


def lds(scores: Tensor, subsets: Tensor, measured: Tensor) -> Estimate:
    """Linear datamodelling score of scores [q, n], as `Influence.lds`.

    Example:
        >>> scores = torch.tensor([[1.0, 0.0, 2.0]])
        >>> subsets = torch.tensor([[True, True, False], [False, True, True], [False, True, False]])
        >>> round(lds(scores, subsets, torch.tensor([[0.3], [0.9], [0.1]])).value, 6)
        1.0
    """
    scores, measured = check_tensor(scores, "scores").double(), check_tensor(measured, "measured").double()
    m, q, n = len(subsets), len(scores), scores.shape[1]
    if subsets.shape != (m, n) or measured.shape != (m, q):
        raise InputError(
            f"subsets {list(subsets.shape)} and measured {list(measured.shape)} do not fit scores [{q}, {n}]: "
            "[subsets, examples] and [subsets, queries] are needed"
        )
    if m < 3:
        raise InputError(f"{m} subsets: a correlation needs at least 3")
    predicted = subsets.double().to(scores.device) @ scores.T
    a, b = _ranks(predicted), _ranks(measured.to(scores.device))
    a, b = a - a.mean(0), b - b.mean(0)
    norms = a.norm(dim=0) * b.norm(dim=0)
    if bool((norms == 0).any()):
        raise InputError(f"query {int((norms == 0).nonzero()[0])}: all subsets predict, or measure, the same number")
    return Estimate.of(((a * b).sum(0) / norms).tolist())


def _ranks(X: Tensor) -> Tensor:
    """Ranks down the columns of X [m, q], equal numbers share theirs."""
    below = (X[:, None] > X[None]).sum(1)
    return below.double() + ((X[:, None] == X[None]).sum(1) - 1) / 2


@checked
def influence(
    model: nn.Module,
    train: Any,
    queries: Any,
    metric: Metric | None,
    *,
    damping: NonNegative | None = None,
    top: Count = 10,
    dim: Count | None = None,
    seed: int = 0,
    store: str | Path | None = None,
    self_influence: bool = False,
    likelihood: Likelihood | None = None,
    output: Callable[[Any], Tensor] | None = None,
    class_dim: ClassDim | None = None,
    precision: Literal["float32", "tf32"] = "float32",
    batch_size: Count | None = None,
    max_memory: str | int | None = None,
) -> Influence:
    """Influence of training examples on queries, g_q^T (F + damping I)^-1 g_i, without a matrix of gradients.

    Positive: training more on the example lowers the loss of the query. Gradients are those of -log p(y | x) at the
    labels, for the parameters of the metric.

    Args:
        model: the network, as the metric was made of it.
        train: labelled examples, (x, y) or batches, in the order of the data.
        queries: labelled examples.
        metric: of `bs.fisher` or its relatives, in any representation; None: the identity, inner products of gradients.
        damping: added to the metric; a tenth of the mean of its eigenvalues, F.trace() / F.shape[0], if None.
        top: examples per query in `top`, `values` and `errors`.
        dim: None: every score is exact, for one more product per query and example. A number: both sides become `dim`
            random features, whose inner products are unbiased; `errors` are their standard errors, of order
            ||L g_q|| ||L g_i|| / sqrt(dim) with L = (F + damping I)^-1/2. For many queries, or with a store.
        seed: of the features.
        store: a folder for the features of the training examples [n, dim], memory-mapped and with checksums. A call
            that was cut off continues there; later calls with other queries read it instead of the training data's
            gradients. Needs `dim`.
        self_influence: also g_i^T (F + damping I)^-1 g_i of every training example, exactly.
        likelihood: categorical | bernoulli | gaussian; if None, that of the metric, else categorical.
        output: how to get a tensor from what the model returns.
        class_dim: axis of the classes, as for `bs.fisher`.
        precision: of the gradients; a metric in float64 makes them float64. "tf32" is 2 to 3 times faster on a GPU and
            leaves three digits, which random features do not notice.
        batch_size: examples per forward pass; chosen by memory if None.
        max_memory: budget, such as "4GB"; 60 % of the free memory if None.

    Example:
        >>> import biascope as bs
        >>> net, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
        >>> found = bs.influence(net, (x, y), (x[:2], y[:2]), bs.fisher(net, x), damping=0.1, top=3)
        >>> found.top.shape, found.scores.shape
        (torch.Size([2, 3]), torch.Size([2, 8]))
    """
    if store is not None and dim is None:
        raise InputError("a store holds random features: say how many (dim=1024, for example)")
    own = None if metric is None else metric.info.get("family")
    if likelihood is None:
        likelihood = own if own in EXACT else "categorical"
    if damping is None:
        damping = 0.0 if metric is None else 0.1 * float(metric.trace()) / metric.shape[0]
    if metric is not None:
        check_number(damping, "damping", above=0)
    make = _Pairs(model, metric, damping, likelihood, output, class_dim, precision, batch_size, max_memory)
    with torch.no_grad():
        return make.influence(train, queries, top, dim, seed, None if store is None else Path(store), self_influence)


class _Pairs:
    """The gradients of two data sets under one metric."""

    def __init__(
        self,
        model: nn.Module,
        metric: Metric | None,
        damping: float,
        likelihood: Likelihood,
        output: Callable[[Any], Tensor] | None,
        class_dim: ClassDim | None,
        precision: Precision,
        batch_size: int | None,
        max_memory: str | int | None,
    ) -> None:
        names = None if metric is None else tuple(metric.space.shapes)
        self.precision = "float64" if metric is not None and metric.dtype == torch.float64 else precision
        self.f = functional(model, names, output, "float64" if self.precision == "float64" else "float32")
        self.space, self.metric, self.damping = ParameterSpace.of(self.f), metric, damping
        if metric is not None and metric.space.shapes != self.space.shapes:
            raise InputError("the metric is of a network with other parameters")
        self.likelihood, self.class_dim, self.batch_size = likelihood, class_dim, batch_size
        self.limit = None if max_memory is None else parse_bytes(max_memory)

    def over(self, data: Any, what: str) -> Pass:
        """A pass over labelled data, in its order."""
        stream = Stream(self.f, data, Cut(self.batch_size, ordered=True, same=True, what=what))
        found = anatomy(self.f, stream.first[0])
        shape = output_shape(stream, self.class_dim, found.shape)
        return Pass(stream, found, likelihood_family(self.likelihood, "empirical", 1, shape), 0, self.limit)

    @arithmetic("float32")
    def influence(
        self, train: Any, queries: Any, top: int, dim: int | None, seed: int, store: Path | None, own: bool
    ) -> Influence:
        """Everything behind `influence`."""
        left, right = self.over(queries, "queries"), self.over(train, "train")
        n, q = right.count(), left.count()
        if n * q > SCORES:
            raise InputError(f"{q} queries and {n} examples make {n * q} scores: at most {SCORES}, so fewer queries")
        solved = self.solved(left)  # [p, some queries] at a time
        itself = self.itself(right) if own else None
        if dim is None:
            scores = torch.cat([self.exact(P, right, n) for P in solved])
            features = made = None
        else:
            made = Features(self.metric, right.found.blocks, self.space, self.damping, Draws(seed, dim))
            psi = torch.cat([made.query(P) for P in solved]).cpu()
            features = self.features(right, made, n, store)
            step = max(1, PARTS // dim)
            scores = torch.cat([psi @ features.rows(slice(s, min(s + step, n))).T for s in range(0, n, step)], 1)
        best = scores.topk(min(top, n), 1)
        errors = torch.zeros_like(best.values)
        if features is not None and made is not None:
            for j, index in enumerate(best.indices):
                errors[j] = made.draws.errors(psi[j] * features.rows(index.numpy()))
        return Influence(best.indices, best.values, errors, scores, self.damping, dim, itself)

    def parts(self, over: Pass, step: int | None = None) -> Iterator[tuple[slice, Labelled]]:
        """The data in parts of `step` examples, as many as fit if None."""
        for batch in over.batches():
            b = batch.part.at.stop - batch.part.at.start
            most = step or over._sizes(over.found.blocks, b)[0]
            for s in range(0, b, most):
                some = slice(s, min(s + most, b))
                yield slice(batch.start + s, batch.start + some.stop), batch.take(some)

    def factors(self, over: Pass, part: Labelled) -> Factors:
        """Of the gradients of log p at the labels, whose products are those of the gradients of -log p."""
        with arithmetic(self.precision):
            forward = Forward(self.f, over.found, over.found.blocks, part.part.inputs, part.start)
            over.look(part.start, forward.rows)  # what a GPU finds is asked for later, with `finite`
            return forward.factors(over.family.cotangents(forward.rows, part.y, part.draws, range(1)))

    def rows(self, factors: Factors, some: slice) -> Tensor:
        """Gradients [b, p] of some examples, in flat order."""
        out: dict[str, Tensor] = {}
        for names, factor in factors.items():
            out |= gradient_rows(factor, names, some)
        return torch.cat([out[name][0] for name in self.space.shapes], 1)

    def gradients(self, over: Pass) -> Iterator[Tensor]:
        """Rows [b, p], a few examples at a time."""
        few = max(1, PARTS // self.space.size)
        for at, part in self.parts(over):
            factors = self.factors(over, part)
            over.finite()
            for s in range(0, at.stop - at.start, few):
                yield self.rows(factors, slice(s, min(s + few, at.stop - at.start)))

    def solve(self, G: Tensor) -> Tensor:
        """(F + damping I)^-1 G for G [p, b]."""
        out: Tensor = G if self.metric is None else self.metric.solve(G, self.damping)
        return out

    def solved(self, over: Pass) -> Iterator[Tensor]:
        """(F + damping I)^-1 g of the queries, [p, b], as many at a time as a quarter of the memory holds."""
        most = max(1, over.limit // (8 * self.space.size * self.space.dtype.itemsize))
        held: list[Tensor] = []
        for rows in self.gradients(over):
            held.append(rows)
            if sum(map(len, held)) >= most:
                yield self.solve(torch.cat(held).T)
                held = []
        if held:
            yield self.solve(torch.cat(held).T)

    def itself(self, over: Pass) -> Tensor:
        """g_i^T (F + damping I)^-1 g_i [n]."""
        return torch.cat([(self.solve(rows.T) * rows.T).sum(0) for rows in self.gradients(over)]).cpu()

    def exact(self, P: Tensor, over: Pass, n: int) -> Tensor:
        """Scores [b, n] of solved queries P [p, b]."""
        out = torch.zeros(P.shape[1], n, dtype=P.dtype, device=P.device)
        for at, part in self.parts(over):
            for names, factor in self.factors(over, part).items():
                _add_products(out[:, at], factor, names, {name: P[self.space.ranges[name]] for name in names})
        over.finite()
        return out.cpu()

    def features(self, over: Pass, made: Features, n: int, path: Path | None) -> FeatureStore:
        """Features of the training examples, those that are not in the store computed."""
        batch = next(iter(over.batches()))
        step = over._sizes(over.found.blocks, batch.part.at.stop - batch.part.at.start)[0]
        config = {
            "network": self.f.mark(),
            "metric": _metric_mark(self.metric),
            "damping": self.damping,
            "seed": made.draws.seed,
            "precision": self.precision,
            "likelihood": self.likelihood,
            "parameters": mark([torch.tensor([ord(c) for name in self.space.shapes for c in name], device="cpu")]),
            "step": step,
        }
        store = FeatureStore(path, n, made.draws.dim, self.space.dtype, config)
        for at, part in self.parts(over, store.step):
            data = 0 if path is None else mark([part.part.inputs], mark([part.part.labels]))
            if not store.has(at.start, at.stop, data):
                with arithmetic(self.precision):
                    rows = made.train(self.factors(over, part), at.stop - at.start)
                over.finite()
                store.put(at.start, rows, data)
        return store


def _add_products(out: Tensor, factor: Factor, names: tuple[str, ...], P: dict[str, Tensor]) -> None:
    """out [q, b] += inner products of the gradients of some examples with P [p, q] of every parameter."""
    if isinstance(factor, MatrixFactor) and factor.block.is_embedding:
        z = factor.block.sizes
        assert z is not None
        table = P[names[0]].view(z.d_in, z.d_out, -1)
        for i in range(factor.n):
            tokens, g = token_gradients(factor, slice(i, i + 1))
            out[:, i] += torch.einsum("md,mdq->q", g[0], table[tokens])
        return
    step = max(1, PARTS // factor.block.numel)
    for s in range(0, factor.n, step):
        some = slice(s, min(s + step, factor.n))
        for name, rows in gradient_rows(factor, names, some).items():
            out[:, some] += (rows[0] @ P[name]).T


def _metric_mark(metric: Metric | None) -> int:
    """A checksum of what the metric holds."""
    if metric is None or not isinstance(metric, BlockMetric):
        return 0
    arrays = [t.detach().cpu() for piece in metric.pieces for t in piece.arrays().values()]
    return mark([torch.tensor([checksum(t) for t in arrays], device="cpu")])
