"""What metrics are for: consolidation, pruning, natural gradients, posteriors, influence, effective dimension."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.families import ClassDim, Likelihood, likelihood_family
from biascope.curvature.metric import DampedInverse, Metric
from biascope.curvature.passes import Pass
from biascope.curvature.pieces import Mode, ParameterSpace
from biascope.curvature.plain_sums import LowRankSum
from biascope.curvature.plan import Unit
from biascope.curvature.tokens import output_shape
from biascope.linalg import hutchinson
from biascope.network.functional import Params, functional
from biascope.network.stream import Cut, Stream, anatomy
from biascope.support.arguments import check_count, check_number
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import readable_again
from biascope.support.signatures import checked


@checked
def consolidation_penalty(F: Metric, params: Params, anchor: Params, strength: float = 1.0) -> Tensor:
    """Elastic weight consolidation: (strength / 2) (w - w*)^T F (w - w*), differentiable in `params`.

    Args:
        F: the metric of the old task at the anchor, in any representation.
        params: current parameters, such as `dict(model.named_parameters())` (those F does not know are ignored).
        anchor: the parameters after the old task.
        strength: weight of the penalty.

    Example:
        >>> import biascope as bs
        >>> net = nn.Linear(3, 2)
        >>> anchor = {k: p.detach().clone() for k, p in net.named_parameters()}
        >>> F = bs.fisher(net, torch.randn(8, 3))
        >>> consolidation_penalty(F, dict(net.named_parameters()), anchor).item()
        0.0
    """
    params, anchor = _known(F, params), _known(F, anchor)
    moved = {k: params[k] - anchor[k].to(params[k]) for k in F.space.shapes}
    with torch.no_grad():
        pull = F @ {k: d.detach() for k, d in moved.items()}
    # value d^T F d / 2, gradient F d: two products would cost twice
    inner = torch.stack([(d * pull[k].to(d) - 0.5 * d.detach() * pull[k].to(d)).sum() for k, d in moved.items()]).sum()
    return strength * inner


def _known(F: Metric, params: Params) -> Params:
    """Those of the parameters that the metric is of; all of them must be there, with their shapes."""
    for name, shape in F.space.shapes.items():
        given = params.get(name)
        if not isinstance(given, Tensor) or tuple(given.shape) != shape:  # which might broadcast
            got = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"the metric needs the parameter {name!r}, a tensor of shape {list(shape)}, got {got}")
    return {name: params[name] for name in F.space.shapes}


@checked
def pruning_scores(
    F: Metric, params: Params, method: Literal["damage", "surgeon"] = "damage", damping: float = 0.0
) -> Params:
    """How much the loss should rise when a weight is set to zero: {name: scores}.

    method "damage": w_i^2 F_ii / 2, other weights held. method "surgeon": w_i^2 / (2 [(F + damping)^-1]_ii), the
    others adapting; it needs the diagonal of the inverse.

    Example:
        >>> import biascope as bs
        >>> net = nn.Linear(3, 2)
        >>> F = bs.fisher(net, torch.randn(8, 3), representation="diagonal")
        >>> {k: s.shape for k, s in pruning_scores(F, dict(net.named_parameters())).items()}
        {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    """
    w = F.space.flatten(_known(F, params))
    diagonal = F.diagonal() if method == "damage" else 1 / F.inverse(damping).diagonal()
    return F.space.unflatten(0.5 * w.square() * diagonal)


@checked
def natural_gradient(F: Metric, gradient: Params, damping: float, mode: Mode = "exact") -> Params:
    """Descent direction -(F + damping I)^-1 gradient, as a dict of steps.

    Example:
        >>> import biascope as bs
        >>> net = nn.Linear(3, 2)
        >>> loss = net(torch.randn(8, 3)).square().mean()
        >>> grads = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters()))))
        >>> step = natural_gradient(bs.fisher(net, torch.randn(8, 3), likelihood="gaussian"), grads, damping=1e-2)
        >>> step["weight"].shape
        torch.Size([2, 3])
    """
    out: Params = F.solve(gradient, damping, mode)
    return {k: -v for k, v in out.items()}


@checked
def laplace_samples(
    F: Metric,
    params: Params,
    n_data: int,
    prior_precision: float,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Params:
    """Draws of the Laplace posterior N(w*, (n_data F + prior_precision I)^-1): {name: [samples, *shape]}.

    Example:
        >>> import biascope as bs
        >>> net = nn.Linear(3, 2)
        >>> F = bs.fisher(net, torch.randn(8, 3), representation="kfac")
        >>> laplace_samples(F, dict(net.named_parameters()), 8, 1.0, samples=5)["weight"].shape
        torch.Size([5, 2, 3])
    """
    damping = check_number(prior_precision, "prior_precision", above=0) / check_count(n_data, "n_data")
    mean = F.space.flatten(_known(F, params))
    draws = F.sample(samples, damping=damping, generator=generator) / n_data**0.5
    return F.space.unflatten(mean + draws)


@checked
def influence_scores(
    F: Metric,
    model: nn.Module,
    train: Any,
    test: Any,
    damping: float,
    likelihood: Likelihood = "categorical",
    **options: Any,
) -> Tensor:
    """Influence of training examples on test losses, [n_test, n_train]: g_test^T (F + damping I)^-1 g_train.

    Positive: training more on the example lowers the test loss. Gradients are those of -log p(y | x) at the labels.
    Options (`params`, `output`, `precision`, `class_dim`) are those of `bs.fisher`, as F was made with. Rows and
    columns are in the order of the data: a DataLoader must not shuffle.

    Example:
        >>> import biascope as bs
        >>> net, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
        >>> influence_scores(bs.fisher(net, x), net, (x, y), (x[:2], y[:2]), damping=0.1).shape
        torch.Size([2, 8])
    """
    train, test = readable_again(train, "train"), readable_again(test, "test")
    left = loss_gradients(model, test, likelihood, **options)
    right = loss_gradients(model, train, likelihood, **options)
    few = left if len(left) <= len(right) else right
    solved: Tensor = F.solve(few.T.to(F.dtype), damping)
    return solved.T @ right.T.to(F.dtype) if few is left else left.to(F.dtype) @ solved


@checked
def loss_gradients(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood = "categorical",
    params: Any = None,
    output: Any = None,
    precision: str = "float32",
    class_dim: ClassDim | None = None,
) -> Tensor:
    """Per-example gradients of -log p(y | x), [n, p] in the flat parameter order.

    Rows are in the order of the data: a DataLoader must not shuffle.
    """
    f = functional(model, params, output, precision)
    stream = Stream(f, data, Cut(ordered=True, same=True, what="data"))
    space, found = ParameterSpace.of(f), anatomy(f, stream.first[0])
    family = likelihood_family(likelihood, "empirical", 1, output_shape(stream, class_dim, found.shape))
    rows = LowRankSum(Unit(tuple(space.shapes), found.blocks, "lowrank", ""), space)
    for chunk in Pass(stream, found, family).chunks(found.blocks):
        rows.add(chunk)
    return -torch.cat(rows.kept)


@checked
def effective_dimension(F: Metric, damping: float, samples: int = 64, seed: int = 0) -> float:
    """tr F (F + damping I)^-1 = sum_j s_j / (s_j + damping): how many directions the data determine.

    Exact where the representation has eigenvalues, else by random products (`samples`, `seed`).

    Example:
        >>> import biascope as bs
        >>> F = bs.fisher(nn.Linear(3, 2), torch.randn(8, 3), representation="dense")
        >>> 0 < effective_dimension(F, 1e-3) < 8
        True
    """
    check_number(damping, "damping", above=0)
    if isinstance(F, BlockMetric):
        try:
            s = F.eigenvalues().double().clamp_min(0.0)
            return float((s / (s + damping)).sum())
        except UnsupportedError:
            pass
    return F.shape[0] - damping * float(hutchinson(DampedInverse(F, damping, "exact"), samples, seed=seed))
