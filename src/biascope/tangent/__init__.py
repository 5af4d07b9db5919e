"""The tangent model as a real nn.Module, the alpha-scaled (lazy) one, and how far a network is from linear."""

from biascope._moved import names_of_before
from biascope.tangent import quadratic as quadratic  # a page of theory, used by its own name
from biascope.tangent.linearized import Linearized as Linearized
from biascope.tangent.linearized import linearize as linearize
from biascope.tangent.linearized import posthoc
from biascope.tangent.residual import linearized_prediction as linearized_prediction
from biascope.tangent.residual import perturbation_response, taylor_residual
from biascope.tangent.scaled import Lazy, lazy_lr
from biascope.tangent.scaled import lazy as lazy

__getattr__ = names_of_before(__name__)

__all__ = ["Lazy", "lazy_lr", "perturbation_response", "posthoc", "taylor_residual"]
