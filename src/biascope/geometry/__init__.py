"""Input space: what a network does to directions of its input."""

from biascope.geometry import closed_forms as closed_forms  # pages of theory, used by their own names
from biascope.geometry import mlp_theory as mlp_theory
from biascope.geometry import patch_normalisation as patch_normalisation
from biascope.geometry.analytic import analytic_geometry
from biascope.geometry.anisotropy import nads
from biascope.geometry.average import AverageGeometry, average_geometry, geometry_of
from biascope.geometry.curvature_link import CurvatureTerms, curvature_correlation, input_curvature
from biascope.geometry.dipole import (
    DipoleDerivatives,
    dipole_derivatives,
    dipole_metric,
    general_learning_bound,
    learning_bound,
    markov_bound,
)
from biascope.geometry.evolution import geometry_evolution
from biascope.geometry.later_evolution import evolution_of
from biascope.geometry.measures import (
    Comparison,
    Containment,
    Directions,
    alignment_score,
    compare,
    containment,
    correlation,
    data_second_moment,
    flip_spectrum,
    generalised_directions,
    gsg,
    matched_count,
    project_out,
    removed_variance,
    subspace_size,
    velocity,
)
from biascope.geometry.moving_curvature import EvolutionTerms, curvature_evolution, evolution_correlation
from biascope.geometry.nad_result import NADs
from biascope.geometry.pooling import pooling_bayes_accuracy
from biascope.geometry.probe_noise import velocity_floor

__all__ = [
    "AverageGeometry",
    "Comparison",
    "Containment",
    "CurvatureTerms",
    "DipoleDerivatives",
    "Directions",
    "EvolutionTerms",
    "NADs",
    "alignment_score",
    "analytic_geometry",
    "average_geometry",
    "compare",
    "containment",
    "correlation",
    "curvature_correlation",
    "curvature_evolution",
    "data_second_moment",
    "dipole_derivatives",
    "dipole_metric",
    "evolution_correlation",
    "evolution_of",
    "flip_spectrum",
    "general_learning_bound",
    "generalised_directions",
    "geometry_evolution",
    "geometry_of",
    "gsg",
    "input_curvature",
    "learning_bound",
    "markov_bound",
    "matched_count",
    "nads",
    "pooling_bayes_accuracy",
    "project_out",
    "removed_variance",
    "subspace_size",
    "velocity",
    "velocity_floor",
]
