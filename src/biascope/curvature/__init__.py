"""Parameter space: J^T W J in every representation. Fisher information, Gauss-Newton, L2 metric, Hessian.

`fisher`, `ggn`, `l2_metric`, `gradient_covariance` and `hessian` give a `Metric`; all metrics share one interface.
"""

from biascope.curvature.blockwise import BlockMetric
from biascope.curvature.build import fisher, ggn, gradient_covariance, l2_metric
from biascope.curvature.files import load_curvature
from biascope.curvature.hessian import hessian
from biascope.curvature.implicit import ImplicitMetric
from biascope.curvature.metric import Metric
from biascope.curvature.plan import Plan
from biascope.curvature.space import ParameterSpace

__all__ = [
    "BlockMetric",
    "ImplicitMetric",
    "Metric",
    "ParameterSpace",
    "Plan",
    "fisher",
    "ggn",
    "gradient_covariance",
    "hessian",
    "l2_metric",
    "load_curvature",
]
