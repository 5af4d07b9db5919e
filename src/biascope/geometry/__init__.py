"""Input space: what a network does to directions of its input."""

from biascope._moved import names_of_before
from biascope.geometry import (
    closed_forms,
    data_directions,
    dipole,
    linear_cnn,
    loss_curvature,
    mlp_theory,
    patch_normalisation,
    pooling,
)
from biascope.geometry.analytic import analytic_geometry
from biascope.geometry.anisotropy import nads as nads
from biascope.geometry.average import AverageGeometry, geometry_of
from biascope.geometry.average import average_geometry as average_geometry
from biascope.geometry.evolution import evolution_of, moving_gradients
from biascope.geometry.evolution import geometry_evolution as geometry_evolution
from biascope.geometry.measures import (
    compare,
    containment,
    correlation,
    data_second_moment,
    gsg,
    subspace_size,
    velocity,
    velocity_floor,
)
from biascope.geometry.mixed import MixedDerivative
from biascope.geometry.nad_result import NADs

__getattr__ = names_of_before(__name__)

__all__ = [
    "AverageGeometry",
    "MixedDerivative",
    "NADs",
    "analytic_geometry",
    "closed_forms",
    "compare",
    "containment",
    "correlation",
    "data_directions",
    "data_second_moment",
    "dipole",
    "evolution_of",
    "geometry_of",
    "gsg",
    "linear_cnn",
    "loss_curvature",
    "mlp_theory",
    "moving_gradients",
    "patch_normalisation",
    "pooling",
    "subspace_size",
    "velocity",
    "velocity_floor",
]
