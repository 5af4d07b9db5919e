"""Function space: the neural tangent kernel J J^T, its spectrum, alignment and what is predicted from it."""

from biascope.kernels.duality import MetricEigenpairs, metric_eigenpairs
from biascope.kernels.eigenfunctions import (
    Rotation,
    binarization_overlap,
    centred_prediction,
    dominant_frequency,
    eigenfunction_targets,
    fourier_power,
    rotation_gain,
    target_alignments,
)
from biascope.kernels.kernel import Kernel
from biascope.kernels.labels import LabelAlignment, label_alignment
from biascope.kernels.localise import LocalEnergy, local_energy
from biascope.kernels.modes import ModeStep, gradient_step_modes, time_constants
from biascope.kernels.ntk import ntk
from biascope.kernels.nystrom import nystrom_extension, nystrom_kernel
from biascope.kernels.plan import BlockPlan, Plan
from biascope.kernels.regression import (
    KernelFit,
    LearningCurve,
    gradient_descent,
    gradient_flow,
    kernel_regression,
    steps_to_loss,
)
from biascope.kernels.rkhs import RKHSNorm, generalization_bound, rkhs_norm
from biascope.kernels.sketch import SketchedKernel, sketched_ntk
from biascope.kernels.spectrum import Spectrum
from biascope.kernels.tiles import open_kernel

__all__ = [
    "BlockPlan",
    "Kernel",
    "KernelFit",
    "LabelAlignment",
    "LearningCurve",
    "LocalEnergy",
    "MetricEigenpairs",
    "ModeStep",
    "Plan",
    "RKHSNorm",
    "Rotation",
    "SketchedKernel",
    "Spectrum",
    "binarization_overlap",
    "centred_prediction",
    "dominant_frequency",
    "eigenfunction_targets",
    "fourier_power",
    "generalization_bound",
    "gradient_descent",
    "gradient_flow",
    "gradient_step_modes",
    "kernel_regression",
    "label_alignment",
    "local_energy",
    "metric_eigenpairs",
    "ntk",
    "nystrom_extension",
    "nystrom_kernel",
    "open_kernel",
    "rkhs_norm",
    "rotation_gain",
    "sketched_ntk",
    "steps_to_loss",
    "target_alignments",
    "time_constants",
]
