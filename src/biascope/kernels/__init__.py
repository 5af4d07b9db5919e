"""Function space: the neural tangent kernel J J^T, its spectrum, alignment and what is predicted from it."""

from biascope.kernels.kernel import Kernel
from biascope.kernels.ntk import ntk
from biascope.kernels.plan import BlockPlan, Plan
from biascope.kernels.spectrum import Spectrum
from biascope.kernels.tiles import open_kernel

__all__ = ["BlockPlan", "Kernel", "Plan", "Spectrum", "ntk", "open_kernel"]
