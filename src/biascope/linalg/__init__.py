"""Linear algebra that knows nothing of networks: operators, Lanczos, conjugate gradients, estimators."""

from biascope.linalg.conjugate_gradients import cg
from biascope.linalg.elementary import FromFunction as FromFunction
from biascope.linalg.elementary import aslinearoperator as aslinearoperator
from biascope.linalg.lanczos import eigsh
from biascope.linalg.operator import LinearOperator
from biascope.linalg.spectra import effective_rank, marchenko_pastur, principal_angles, subspace_overlap
from biascope.linalg.stable import psd_eigh
from biascope.linalg.trace import hutchinson

__all__ = [
    "LinearOperator",
    "cg",
    "effective_rank",
    "eigsh",
    "hutchinson",
    "marchenko_pastur",
    "principal_angles",
    "psd_eigh",
    "subspace_overlap",
]
