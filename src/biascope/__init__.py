"""biascope shows the inductive bias of any PyTorch network: before, during and after training.

One derivative, three spaces: `Jacobian` (df/dtheta) in the middle, `ntk` in function space, Fisher metrics in parameter
space, anisotropy directions in input space. Names are imported when they are first used, so that `import biascope` is
quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from biascope import (
        curvature,
        data,
        editing,
        ensembles,
        fields,
        functional,
        geometry,
        information,
        kernels,
        layers,
        linalg,
        nets,
        optim,
        probes,
        reports,
        spectral,
        studies,
    )
    from biascope.curvature import fisher, ggn, hessian, load_curvature
    from biascope.editing import TaskVector, disentanglement_error
    from biascope.geometry import average_geometry, geometry_evolution, nads
    from biascope.information import mutual_information
    from biascope.jacobian import Coverage, Jacobian
    from biascope.kernels import (
        Kernel,
        Spectrum,
        eigenfunction_targets,
        gradient_descent,
        gradient_flow,
        kernel_regression,
        label_alignment,
        metric_eigenpairs,
        ntk,
        rkhs_norm,
        sketched_ntk,
    )
    from biascope.linearize import lazy, linearize
    from biascope.probes import Probe

# public name -> module that defines it
_PUBLIC = {
    "Jacobian": "biascope.jacobian",
    "Coverage": "biascope.jacobian",
    "ntk": "biascope.kernels",
    "Kernel": "biascope.kernels",
    "Spectrum": "biascope.kernels",
    "label_alignment": "biascope.kernels",
    "kernel_regression": "biascope.kernels",
    "gradient_flow": "biascope.kernels",
    "gradient_descent": "biascope.kernels",
    "sketched_ntk": "biascope.kernels",
    "metric_eigenpairs": "biascope.kernels",
    "eigenfunction_targets": "biascope.kernels",
    "rkhs_norm": "biascope.kernels",
    "fisher": "biascope.curvature",
    "ggn": "biascope.curvature",
    "hessian": "biascope.curvature",
    "load_curvature": "biascope.curvature",
    "TaskVector": "biascope.editing",
    "disentanglement_error": "biascope.editing",
    "nads": "biascope.geometry",
    "average_geometry": "biascope.geometry",
    "geometry_evolution": "biascope.geometry",
    "mutual_information": "biascope.information",
    "lazy": "biascope.linearize",
    "Probe": "biascope.probes",
}
_ROOMS = (
    "curvature",
    "data",
    "editing",
    "ensembles",
    "fields",
    "functional",
    "geometry",
    "information",
    "kernels",
    "layers",
    "linalg",
    "linearize",  # a room that can be called
    "nets",
    "optim",
    "probes",
    "reports",
    "spectral",
    "studies",
)

__all__ = [
    "Coverage",
    "Jacobian",
    "Kernel",
    "Probe",
    "Spectrum",
    "TaskVector",
    "average_geometry",
    "curvature",
    "data",
    "disentanglement_error",
    "editing",
    "eigenfunction_targets",
    "ensembles",
    "fields",
    "fisher",
    "functional",
    "geometry",
    "geometry_evolution",
    "ggn",
    "gradient_descent",
    "gradient_flow",
    "hessian",
    "information",
    "kernel_regression",
    "kernels",
    "label_alignment",
    "layers",
    "lazy",
    "linalg",
    "linearize",
    "load_curvature",
    "metric_eigenpairs",
    "mutual_information",
    "nads",
    "nets",
    "ntk",
    "optim",
    "probes",
    "reports",
    "rkhs_norm",
    "sketched_ntk",
    "spectral",
    "studies",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name in _ROOMS:
        return import_module(f"biascope.{name}")
    raise AttributeError(f"module 'biascope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
