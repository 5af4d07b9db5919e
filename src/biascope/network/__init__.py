"""A module seen as a pure function of its parameters, and its derivative."""

from biascope.network.functional import Functional as Functional
from biascope.network.jacobian import Coverage as Coverage
from biascope.network.jacobian import Jacobian as Jacobian

__all__: list[str] = []
