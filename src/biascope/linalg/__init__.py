"""Linear algebra that knows nothing of networks: operators, solvers, estimators, Kronecker products."""

from biascope.linalg.cg import SolveResult, cg, damped
from biascope.linalg.density import Density, lanczos_tridiagonal, logdet, spectral_density
from biascope.linalg.eigenbasis import KroneckerEigen, deep_net_damping
from biascope.linalg.elementary import (
    Dense,
    Diagonal,
    FromFunction,
    Identity,
    LowRank,
    aslinearoperator,
    is_symmetric,
)
from biascope.linalg.kronecker import KroneckerOperator, kron_matvec
from biascope.linalg.lanczos import Eigenpairs, eigsh
from biascope.linalg.nystrom import Nystrom, jacobi
from biascope.linalg.operator import Adjoint, LinearOperator, Product, Scaled, Sum
from biascope.linalg.random import draw, generator_from
from biascope.linalg.randomised import (
    SingularTriplets,
    randomized_eigsh,
    randomized_svd,
    subspace_iteration,
    svds,
)
from biascope.linalg.spectra import (
    MarchenkoPastur,
    effective_rank,
    marchenko_pastur,
    orthonormal_basis,
    principal_angles,
    subspace_overlap,
)
from biascope.linalg.stable import Eigh, column_dots, fix_signs, long_dot, psd_eigh, symmetrise, thin_svd
from biascope.linalg.trace import (
    Estimate,
    diagonal,
    frobenius_norm_squared,
    hutchinson,
    hutchpp,
    xtrace,
)

__all__ = [
    "Adjoint",
    "Dense",
    "Density",
    "Diagonal",
    "Eigenpairs",
    "Eigh",
    "Estimate",
    "FromFunction",
    "Identity",
    "KroneckerEigen",
    "KroneckerOperator",
    "LinearOperator",
    "LowRank",
    "MarchenkoPastur",
    "Nystrom",
    "Product",
    "Scaled",
    "SingularTriplets",
    "SolveResult",
    "Sum",
    "aslinearoperator",
    "cg",
    "column_dots",
    "damped",
    "deep_net_damping",
    "diagonal",
    "draw",
    "effective_rank",
    "eigsh",
    "fix_signs",
    "frobenius_norm_squared",
    "generator_from",
    "hutchinson",
    "hutchpp",
    "is_symmetric",
    "jacobi",
    "kron_matvec",
    "lanczos_tridiagonal",
    "logdet",
    "long_dot",
    "marchenko_pastur",
    "orthonormal_basis",
    "principal_angles",
    "psd_eigh",
    "randomized_eigsh",
    "randomized_svd",
    "spectral_density",
    "subspace_iteration",
    "subspace_overlap",
    "svds",
    "symmetrise",
    "thin_svd",
    "xtrace",
]
