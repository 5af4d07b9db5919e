"""Input space: what a network does to directions of its input."""

from biascope.geometry.anisotropy import nads
from biascope.geometry.average import AverageGeometry, average_geometry, geometry_of
from biascope.geometry.evolution import geometry_evolution
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
from biascope.geometry.nad_result import NADs
from biascope.geometry.pooling import pooling_bayes_accuracy

__all__ = [
    "AverageGeometry",
    "Comparison",
    "Containment",
    "Directions",
    "NADs",
    "alignment_score",
    "average_geometry",
    "compare",
    "containment",
    "correlation",
    "data_second_moment",
    "flip_spectrum",
    "generalised_directions",
    "geometry_evolution",
    "geometry_of",
    "gsg",
    "matched_count",
    "nads",
    "pooling_bayes_accuracy",
    "project_out",
    "removed_variance",
    "subspace_size",
    "velocity",
]
