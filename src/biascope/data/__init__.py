"""Tasks made from formulas, and real sets fetched by `biascope data get`."""

from biascope.data.bases import complete_basis, random_orthogonal
from biascope.data.boundaries import isotropic, relabel
from biascope.data.circles import circles, simplicity_contest
from biascope.data.dataset import Dataset, generator, project_out
from biascope.data.difficulty import balanced_cells, corrupt_labels, easy_difficult, spurious
from biascope.data.directional import directional, directional_inputs, in_channel
from biascope.data.fourier import FourierBasis, dft_basis, fourier_vectors, frequency_map
from biascope.data.gaussians import flip_spectrum, geometry_gaussian
from biascope.data.images import carriers, class_mean_energies, nad_flip, poison, underspecified, zero_channels
from biascope.data.loading import load, load_weights
from biascope.data.mutual import correlated_gaussians, gaussian_mutual_information, noisy_function
from biascope.data.packing import pack, unpack
from biascope.data.planar import disk, disk_labels, in_yin_yang_disks, square_grid, yin_yang, yin_yang_labels
from biascope.data.quadratic_model import (
    QuadraticTask,
    quadratic_example1,
    quadratic_example2,
    quadratic_example3,
    quadratic_task,
)
from biascope.data.signals import gamma_embedding, sinusoid_classes, sinusoids, unit_grid
from biascope.data.store import SetInfo, data_root, get, info, names
from biascope.data.vision import CIFAR10_MEAN, CIFAR10_STD, channel_stats, cifar2, normalise

__all__ = [
    "CIFAR10_MEAN",
    "CIFAR10_STD",
    "Dataset",
    "FourierBasis",
    "QuadraticTask",
    "SetInfo",
    "balanced_cells",
    "carriers",
    "channel_stats",
    "cifar2",
    "circles",
    "class_mean_energies",
    "complete_basis",
    "correlated_gaussians",
    "corrupt_labels",
    "data_root",
    "dft_basis",
    "directional",
    "directional_inputs",
    "disk",
    "disk_labels",
    "easy_difficult",
    "flip_spectrum",
    "fourier_vectors",
    "frequency_map",
    "gamma_embedding",
    "gaussian_mutual_information",
    "generator",
    "geometry_gaussian",
    "get",
    "in_channel",
    "in_yin_yang_disks",
    "info",
    "isotropic",
    "load",
    "load_weights",
    "nad_flip",
    "names",
    "noisy_function",
    "normalise",
    "pack",
    "poison",
    "project_out",
    "quadratic_example1",
    "quadratic_example2",
    "quadratic_example3",
    "quadratic_task",
    "random_orthogonal",
    "relabel",
    "simplicity_contest",
    "sinusoid_classes",
    "sinusoids",
    "spurious",
    "square_grid",
    "underspecified",
    "unit_grid",
    "unpack",
    "yin_yang",
    "yin_yang_labels",
    "zero_channels",
]
