"""bs.fisher, bs.ggn and their relatives: choose a family and a representation, stream the data, get a metric."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.families import (
    ClassDim,
    Estimator,
    Family,
    Likelihood,
    OutputShape,
    Weighted,
    Weighting,
    likelihood_family,
)
from biascope.curvature.implicit import ImplicitMetric
from biascope.curvature.kronecker import Sharing
from biascope.curvature.ladder import with_errors, within
from biascope.curvature.losses import Loss, loss_family
from biascope.curvature.metric import Metric
from biascope.curvature.owned import OwnedMetric
from biascope.curvature.passes import Pass
from biascope.curvature.pieces import DiagonalPiece, ParameterSpace, Piece
from biascope.curvature.plan import Name, Plan, describe, make_units
from biascope.curvature.sums import build_pieces
from biascope.curvature.tokens import output_shape
from biascope.network.functional import ParamSelection, functional
from biascope.network.layers.blocks import StaleError
from biascope.network.stream import Cut, Stream, anatomy, forget
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import take
from biascope.support.limits import Count
from biascope.support.memory import parse_bytes
from biascope.support.precision import Precision, arithmetic
from biascope.support.processes import ALONE, Processes, processes
from biascope.support.signatures import checked

Representation = Name | Mapping[str, str]
MANY_PASSES = 10_000  # backward passes per example above which the caller is warned
MANY = 2**28  # bytes of Kronecker factors for which free memory is not measured


@dataclass(frozen=True)
class Options:
    """What `fisher` and `ggn` share: which parameters and outputs, in which form, within which memory."""

    representation: Representation
    params: ParamSelection
    output: Callable[[Any], Tensor] | None
    precision: Precision
    class_dim: ClassDim | None
    sharing: Sharing
    sua: bool
    batch_size: int | None
    max_memory: str | int | None
    centered: bool = False
    group: Any = None


@checked
def fisher(
    model: nn.Module,
    data: Any,
    representation: Representation = "ekfac",
    likelihood: Likelihood | Weighting = "categorical",
    estimator: Estimator = "exact",
    samples: int = 1,
    generator: torch.Generator | None = None,
    *,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: Precision = "float32",
    class_dim: ClassDim | None = None,
    centered: bool = False,
    sharing: Sharing = "expand",
    sua: bool = False,
    batch_size: Count | None = None,
    max_memory: str | int | None = None,
    group: Any = None,
) -> Metric:
    """Fisher information F = (1/n) sum_i E_y [grad log p(y | x_i) grad log p(y | x_i)^T].

    Args:
        model: any nn.Module whose examples do not mix; its outputs are logits, or means for "gaussian".
        data: x, (x, y), or an iterable of such batches that can be read again (order fixed for sampled labels).
        representation: dense | diagonal | block | quasidiagonal | kfac | ekfac | lowrank | implicit | mixed | eye, or a
            map {layer, parameter pattern or rule: representation} for a mixture. kfac and ekfac use Kronecker factors
            where they exist and exact blocks or diagonals elsewhere; `F.plan` says which parameter got what. eye is the
            nearest multiple of the identity: the mean of the diagonal, one number for all parameters.
        likelihood: categorical | bernoulli | gaussian (gaussian is also the L2 metric J^T J), or a function
            (outputs [n, c], labels) -> weights [k, n, c] with F = (1/n) sum_i sum_k (J_i^T w_ik)(J_i^T w_ik)^T, which
            has no `estimator` and `samples`.
        estimator: exact (the expectation in closed form) | monte-carlo (`samples` labels per example drawn from the
            model) | empirical (the given labels: the second moment of loss gradients, often called empirical Fisher).
        samples: labels drawn per example for monte-carlo.
        generator: for the labels drawn; the draws stay fixed for all passes, and depend on the order of the examples
            but not on how they are cut into batches. Seed 0 if None.
        params: which parameters (see `bs.functional.functional`).
        output: how to get a tensor from what the model returns.
        precision: "float32" or "float64".
        class_dim: axis of the classes in the model's output: 1 as in torch's cross_entropy, or -1. If None, -1 where a
            model returns `.logits` [n, T, classes] or the labels fit no other axis, else 1. All other axes are
            positions (pixels, tokens), whose log-likelihoods add up; those with the label -100 (categorical) have none
            and add nothing, whatever the estimator. `labels` among the keyword arguments are read as the model's own
            loss reads them: that of a causal model compares position t with the label at t + 1. Without labels,
            positions where `attention_mask` is 0 add nothing.
        centered: subtract the mean gradient of every cotangent: a covariance instead of a second moment.
        sharing: how KFAC treats several positions: "expand" or "reduce". With "expand", the input factor leaves out
            positions without a label (-100) where the layer has no gradient either.
        sua: spatially uncorrelated activations for convolutions: the input factor is one channel covariance A_c (second
            moment) for all kernel offsets. It is the mean over the offsets of the exact factor's diagonal blocks, which
            makes A_c (x) I the nearest such matrix to it; pixels count as often as patches cover them. The papers pool
            over all pixels alike: the same with stride 1 and circular borders, else it differs at the borders, where
            fewer patches reach, and between strides. The bias has an exact block of its own.
        batch_size: examples per forward pass; chosen by memory if None.
        max_memory: budget, such as "4GB"; 60 % of the free memory if None.
        group: a `torch.distributed` process group or device mesh, whose ranks all make this call, and later those of
            the metric, with the same network, data and vectors; each runs its share of the data through the network.
            Every layer's matrices are added up once, on the rank that owns them, and factors of EKFAC are decomposed by
            all ranks, each its share.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> F = fisher(net, torch.randn(6, 3))
        >>> F.shape, F.plan["0.weight"]
        ((26, 26), 'ekfac')
    """

    options = Options(
        representation, params, output, precision, class_dim, sharing, sua, batch_size, max_memory, centered, group
    )
    what = "Fisher" if not centered else "centred Fisher"
    if not callable(likelihood):
        names: tuple[Likelihood, Estimator, int] = likelihood, estimator, samples
        return build(model, data, options, lambda shape, _: likelihood_family(*names, shape), what, generator)
    if estimator != "exact" or samples != 1:
        raise InputError(
            f"estimator={estimator!r}, samples={samples}: a function as likelihood gives its weights itself, "
            "no labels are drawn or compared; leave both out"
        )
    return build(model, data, options, partial(_weighted, likelihood), what, generator)


@checked
def ggn(
    model: nn.Module,
    data: Any,
    representation: Representation = "ekfac",
    loss: Loss = "ce",
    *,
    params: ParamSelection = None,
    output: Callable[[Any], Tensor] | None = None,
    precision: Precision = "float32",
    class_dim: ClassDim | None = None,
    sharing: Sharing = "expand",
    sua: bool = False,
    batch_size: Count | None = None,
    max_memory: str | int | None = None,
    group: Any = None,
) -> Metric:
    """Generalised Gauss-Newton matrix (1/n) sum_i J_i^T H_i J_i with H_i the Hessian of the loss in the outputs.

    `loss` is "ce", "bce" or "mse" as torch computes it with reduction="mean" (so that GGN equals Hessian where the
    model is linear), or a function (outputs [n, c], labels) -> [n] that is convex in the outputs. Other arguments are
    those of `bs.fisher`. With one position, the GGN of "ce" is the categorical Fisher information.

    Example:
        >>> G = ggn(nn.Linear(3, 2), torch.randn(6, 3), representation="dense", loss="mse")
        >>> G.shape
        (8, 8)
    """
    options = Options(
        representation, params, output, precision, class_dim, sharing, sua, batch_size, max_memory, group=group
    )
    return build(model, data, options, lambda shape, _: loss_family(loss, shape), "GGN")


@checked
def l2_metric(model: nn.Module, data: Any, representation: Representation = "ekfac", **options: Any) -> Metric:
    """L2 pull-back metric (1/n) sum_i J_i^T J_i: how far the function moves when the parameters do.

    It shares its non-zero spectrum with the tangent kernel over n. Options are those of `bs.fisher`.

    Example:
        >>> l2_metric(nn.Linear(3, 2), torch.randn(6, 3), "diagonal").trace() > 0
        tensor(True)
    """
    return fisher(model, data, representation, "gaussian", "exact", **options)


@checked
def gradient_covariance(
    model: nn.Module,
    data: Any,
    representation: Representation = "ekfac",
    likelihood: Likelihood = "categorical",
    **options: Any,
) -> Metric:
    """Covariance of the loss gradients over labelled examples (their second moment minus the mean's square).

    Example:
        >>> C = gradient_covariance(nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2), "dense")
        >>> C.shape
        (8, 8)
    """
    return fisher(model, data, representation, likelihood, "empirical", centered=True, **options)


FamilyMaker = Callable[[OutputShape, Stream], Family]


@arithmetic("float32")  # cuDNN would convolve in tf32
def build(
    model: nn.Module,
    data: Any,
    options: Options,
    family: FamilyMaker,
    what: str,
    generator: torch.Generator | None = None,
) -> Metric:
    """Everything behind `fisher` and `ggn`."""
    team = ALONE if options.group is None else processes(options.group)
    here: AbstractContextManager[None] = team if team.size > 1 else nullcontext()
    with here:
        f = functional(model, options.params, options.output, options.precision, team)
        stream = Stream(f, data, Cut(options.batch_size, what="data", team=team))
        seed = 0 if generator is None else int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        if team.size > 1:
            team.agree(seed, "the ranks have generators in different states: their next numbers differ")
        try:
            with here:
                return _build(stream, options, family, what, seed)
        except StaleError:  # the module was changed since it was looked at, or its path depends on the data: look again
            forget(f)
            return _build(stream, options, family, what, seed)


def _build(source: Stream, options: Options, family: FamilyMaker, what: str, seed: int) -> Metric:
    found = anatomy(source.f, source.first[0])
    stream = source.through(found.watched(source.f)) if options.representation == "implicit" else source
    plain = len(found.shape) < 2
    shape = OutputShape.of(found.shape, 1) if plain else output_shape(stream, options.class_dim, found.shape)
    fam = family(shape, stream)
    space = ParameterSpace.of(stream.f)
    limit = None if options.max_memory is None else parse_bytes(options.max_memory)
    over = Pass(stream, found, fam, seed, limit)
    info: dict[str, Any] = {"what": what, "family": fam.name, "centred": options.centered}
    if fam.random:
        info["seed"] = seed
    name = options.representation if isinstance(options.representation, str) else "mixed"
    key = (name, options.sharing, options.sua) if isinstance(options.representation, str) else None
    units, plan = found.plans.get(key, (None, None))
    if units is None:
        wanted = "diagonal" if name in {"implicit", "eye"} else options.representation
        units = make_units(found, space, wanted, options.sharing, options.sua, lambda: over.limit)
        plan = describe(units, space, name)
        if key is not None and name not in {"dense", "block"}:  # these depend on the memory
            found.plans[key] = (units, plan)
    if name == "implicit":
        if source.lockstep:
            raise UnsupportedError(
                "products with the Jacobian of a network that is spread over processes are not possible: use "
                "representation='ekfac', 'kfac' or 'diagonal', or bs.hessian"
            )
        plan = type(plan)(name, tuple((n, s, name, "products with the Jacobian") for n, s, _, _ in plan.rows))
        implicit = ImplicitMetric(space, over, units, plan, info, options.centered)
        info["n"] = over.stream.n
        return implicit
    if fam.softmax and not fam.random and fam.width > MANY_PASSES:
        warnings.warn(
            f"the exact expectation over labels takes {fam.width} backward passes per example: "
            "bs.fisher(..., estimator='monte-carlo') takes one per sample",
            stacklevel=6,
        )
    numbers = 0
    for u in units:
        if u.kind in {"kfac", "ekfac"} and (z := u.blocks[0].sizes) is not None:
            numbers += z.groups * (z.d_in**2 + z.d_out**2)
    over_many = numbers * space.dtype.itemsize > MANY
    if over.team.size == 1 and numbers and (over_many or limit is not None):
        units = within(units, space, over, fam.shape.classes if fam.softmax else 0)
    pieces, mine = build_pieces(over, units, space, options.centered)
    info["n"] = over.stream.n
    if over.errors:
        plan = with_errors(units, over, space, name)
    if name == "eye":
        pieces, plan = _one_number(pieces, plan, space, over.team)
    if over.team.size > 1:
        return OwnedMetric(space, pieces, plan, info, over.team, mine, over.finite)
    return BlockMetric(space, pieces, plan, info, over.finite)


def _one_number(pieces: list[Piece], plan: Plan, space: ParameterSpace, team: Processes) -> tuple[list[Piece], Plan]:
    """Diagonals by their mean over all parameters."""
    diagonals = [piece.diagonal() for piece in pieces]
    zero = torch.zeros((), dtype=torch.float64, device=space.device)
    mean = team.sum(torch.stack([zero, *(d.double().sum() for d in diagonals)]).sum()) / space.size
    made: list[Piece] = [
        DiagonalPiece(piece.names, mean.to(d.dtype).expand(len(d))) for piece, d in zip(pieces, diagonals, strict=True)
    ]
    return made, Plan("eye", tuple((n, shape, "eye", "mean of the whole diagonal") for n, shape, _, _ in plan.rows))


def _weighted(weights: Weighting, shape: OutputShape, data: Stream) -> Family:
    (inputs, y), f = data.first, data.f
    with torch.no_grad():
        z = f(f.params, f.prepare(take(inputs, slice(0, 1))))
    S = weights(z, None if y is None else y[:1])
    if not isinstance(S, Tensor) or S.dim() != 3 or S.shape[1:] != z.shape:
        got = list(S.shape) if isinstance(S, Tensor) else type(S).__name__
        raise InputError(f"the weight function must give [k, n, {z.shape[1]}] for outputs [n, {z.shape[1]}], got {got}")
    return Weighted(shape, weights, len(S))
