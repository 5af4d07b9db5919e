"""biascope shows the inductive bias of any PyTorch network: before, during and after training.

One derivative, three spaces: `Jacobian` (df/dtheta) in the middle, `ntk` in function space, Fisher metrics in parameter
space, anisotropy directions in input space. Names are imported when they are first used, so that `import biascope` is
quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from biascope._moved import MOVED, install

__version__ = "0.1.0"

if TYPE_CHECKING:
    from biascope import (
        atlas,
        curvature,
        data,
        editing,
        ensembles,
        fields,
        geometry,
        information,
        kernels,
        linalg,
        nets,
        network,
        optim,
        probes,
        reports,
        spectral,
        studies,
        support,
        tangent,
    )
    from biascope.curvature import fisher, ggn, hessian, influence, load_curvature
    from biascope.editing import TaskVector, disentanglement_error
    from biascope.geometry import average_geometry, geometry_evolution, nads
    from biascope.information import mutual_information
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
    from biascope.network.jacobian import Coverage, Jacobian
    from biascope.planning.forecast import plan
    from biascope.probes import Probe
    from biascope.support.errors import BiascopeError, CorruptError, InputError, UnsupportedError
    from biascope.tangent import lazy, linearize

__all__ = [
    "BiascopeError",
    "CorruptError",
    "Coverage",
    "InputError",
    "Jacobian",
    "Kernel",
    "Probe",
    "Spectrum",
    "TaskVector",
    "UnsupportedError",
    "atlas",
    "average_geometry",
    "curvature",
    "data",
    "disentanglement_error",
    "editing",
    "eigenfunction_targets",
    "ensembles",
    "fields",
    "fisher",
    "geometry",
    "geometry_evolution",
    "ggn",
    "gradient_descent",
    "gradient_flow",
    "hessian",
    "influence",
    "information",
    "kernel_regression",
    "kernels",
    "label_alignment",
    "lazy",
    "linalg",
    "linearize",
    "load_curvature",
    "metric_eigenpairs",
    "mutual_information",
    "nads",
    "nets",
    "network",
    "ntk",
    "optim",
    "plan",
    "probes",
    "reports",
    "rkhs_norm",
    "sketched_ntk",
    "spectral",
    "studies",
    "support",
    "tangent",
]

# module -> the public names that it defines
_DEFINED = {
    "biascope.support.errors": "BiascopeError CorruptError InputError UnsupportedError",
    "biascope.network.jacobian": "Jacobian Coverage",
    "biascope.kernels": "ntk Kernel Spectrum label_alignment kernel_regression gradient_flow gradient_descent "
    "sketched_ntk metric_eigenpairs eigenfunction_targets rkhs_norm",
    "biascope.curvature": "fisher ggn hessian influence load_curvature",
    "biascope.editing": "TaskVector disentanglement_error",
    "biascope.geometry": "nads average_geometry geometry_evolution",
    "biascope.information": "mutual_information",
    "biascope.tangent": "lazy linearize",
    "biascope.probes": "Probe",
    "biascope.planning.forecast": "plan",
}
_PUBLIC = {name: module for module, names in _DEFINED.items() for name in names.split()}
_ROOMS = [name for name in __all__ if name not in _PUBLIC]

install()  # old import paths


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
        return found
    if name in _ROOMS:
        return import_module(f"biascope.{name}")
    if f"biascope.{name}" in MOVED:
        return import_module(f"biascope.{name}")  # warns
    rooms = [] if name.startswith("_") else [r for r in _ROOMS if name in import_module(f"biascope.{r}").__all__]
    hint = f"; it is bs.{rooms[0]}.{name}" if rooms else ""
    raise AttributeError(f"module 'biascope' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
