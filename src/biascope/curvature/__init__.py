"""Parameter space: J^T W J in every representation. Fisher information, Gauss-Newton, L2 metric, Hessian.

`fisher`, `ggn`, `l2_metric`, `gradient_covariance` and `hessian` give a `Metric`; all metrics share one interface.
`influence` follows training examples to queries.
What metrics are for: consolidation, pruning, natural gradients, posteriors, influence, effective dimension, complexity.
"""

from biascope._moved import names_of_before
from biascope.curvature import complexity
from biascope.curvature import gradient_factors as _gradient_factors  # noqa: F401 - registers its sums
from biascope.curvature import reduced as _reduced  # noqa: F401 - registers its sums
from biascope.curvature.attribution import influence as influence
from biascope.curvature.blockwise import load_curvature as load_curvature
from biascope.curvature.build import fisher as fisher
from biascope.curvature.build import ggn as ggn
from biascope.curvature.build import gradient_covariance as gradient_covariance
from biascope.curvature.build import l2_metric
from biascope.curvature.losses import hessian as hessian
from biascope.curvature.metric import Metric
from biascope.curvature.plan import Plan as Plan
from biascope.curvature.uses import (
    consolidation_penalty,
    effective_dimension,
    influence_scores,
    laplace_samples,
    natural_gradient,
    pruning_scores,
)

__getattr__ = names_of_before(__name__)

__all__ = [
    "Metric",
    "complexity",
    "consolidation_penalty",
    "effective_dimension",
    "influence_scores",
    "l2_metric",
    "laplace_samples",
    "natural_gradient",
    "pruning_scores",
]
