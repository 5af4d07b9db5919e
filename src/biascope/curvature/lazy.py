"""Sums, multiples and products of metrics that no representation can hold: multiplied out when they meet a vector."""

from __future__ import annotations

from torch import Tensor

from biascope.curvature.implicit import ProductMetric
from biascope.curvature.metric import Metric
from biascope.curvature.plan import Plan
from biascope.linalg.operator import LinearOperator


class LazyMetric(ProductMetric):
    """An operator on the parameter space of a metric: products are its own, everything else follows from them.

    Example:
        >>> import biascope as bs, torch
        >>> net = torch.nn.Linear(3, 2)
        >>> old, new = (bs.fisher(net, torch.randn(5, 3), "kfac") for _ in range(2))
        >>> (old + new).solve(torch.ones(8), damping=0.1).shape
        torch.Size([8])
    """

    def __init__(self, metric: Metric, operator: LinearOperator) -> None:
        why = operator._expression()
        plan = Plan("lazy", tuple((name, shape, "lazy", why) for name, shape in metric.space.shapes.items()))
        super().__init__(metric.space, plan, {"what": why}, operator.symmetric)
        self.operator = operator

    def _matmat(self, X: Tensor) -> Tensor:
        return self.operator._matmat(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.operator._rmatmat(Y)

    @property
    def has_adjoint(self) -> bool:
        """Whether the operator has one."""
        return self.operator.has_adjoint

    def diagonal(self, chunk: int = 256) -> Tensor:
        """[p], from the parts where these know theirs."""
        return self.operator.diagonal(chunk)

    def _expression(self) -> str:
        return self.operator._expression()
