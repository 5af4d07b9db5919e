"""Parameter space: J^T W J in every representation. Fisher information, Gauss-Newton, L2 metric, Hessian.

`fisher`, `ggn`, `l2_metric`, `gradient_covariance` and `hessian` give a `Metric`; all metrics share one interface.
What metrics are for: consolidation, pruning, natural gradients, posteriors, influence, effective dimension, complexity.
"""

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.build import fisher, ggn, gradient_covariance, l2_metric
from biascope.curvature.complexity import (
    NormBounds,
    PathComplexity,
    ball_bound,
    ball_complexity,
    feature_norm,
    learning_flow_bound,
    margin_bound,
    margin_risk,
    multiclass_complexity,
    optimal_norm_bound,
)
from biascope.curvature.files import load_curvature
from biascope.curvature.hessian import hessian
from biascope.curvature.implicit import ImplicitMetric
from biascope.curvature.metric import Metric
from biascope.curvature.plan import Plan
from biascope.curvature.space import ParameterSpace
from biascope.curvature.uses import (
    consolidation_penalty,
    effective_dimension,
    influence_scores,
    laplace_samples,
    loss_gradients,
    natural_gradient,
    pruning_scores,
)

__all__ = [
    "BlockMetric",
    "ImplicitMetric",
    "Metric",
    "NormBounds",
    "ParameterSpace",
    "PathComplexity",
    "Plan",
    "ball_bound",
    "ball_complexity",
    "consolidation_penalty",
    "effective_dimension",
    "feature_norm",
    "fisher",
    "ggn",
    "gradient_covariance",
    "hessian",
    "influence_scores",
    "l2_metric",
    "laplace_samples",
    "learning_flow_bound",
    "load_curvature",
    "loss_gradients",
    "margin_bound",
    "margin_risk",
    "multiclass_complexity",
    "natural_gradient",
    "optimal_norm_bound",
    "pruning_scores",
]
