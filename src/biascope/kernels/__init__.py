"""Function space: the neural tangent kernel J J^T, its spectrum, alignment and what is predicted from it."""

from biascope._moved import names_of_before
from biascope.kernels.duality import metric_eigenpairs as metric_eigenpairs
from biascope.kernels.eigenfunctions import binarization_overlap, fourier_power, local_energy, nystrom_extension
from biascope.kernels.eigenfunctions import eigenfunction_targets as eigenfunction_targets
from biascope.kernels.empirical import ntk as ntk
from biascope.kernels.kernel import Kernel as Kernel
from biascope.kernels.labels import LabelAlignment as LabelAlignment
from biascope.kernels.labels import label_alignment as label_alignment
from biascope.kernels.plan import Plan as Plan
from biascope.kernels.regression import gradient_descent as gradient_descent
from biascope.kernels.regression import gradient_flow as gradient_flow
from biascope.kernels.regression import kernel_regression as kernel_regression
from biascope.kernels.rkhs import rkhs_norm as rkhs_norm
from biascope.kernels.rotation import rotation_gain, target_alignments
from biascope.kernels.sketch import sketched_ntk as sketched_ntk
from biascope.kernels.spectrum import Spectrum as Spectrum
from biascope.kernels.tiles import open_kernel

__getattr__ = names_of_before(__name__)

__all__ = [
    "binarization_overlap",
    "fourier_power",
    "local_energy",
    "nystrom_extension",
    "open_kernel",
    "rotation_gain",
    "target_alignments",
]
