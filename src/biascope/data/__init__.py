"""Tasks made from formulas, and real sets fetched by `biascope data get`."""

from biascope.data.bases import random_orthogonal
from biascope.data.boundaries import isotropic, relabel
from biascope.data.dataset import Dataset
from biascope.data.difficulty import balanced_cells, corrupt_labels, easy_difficult, spurious
from biascope.data.directions import circles, directional, geometry_gaussian
from biascope.data.directions import simplicity_contest as simplicity_contest
from biascope.data.images import channel_stats, cifar2, normalise
from biascope.data.loading import load
from biascope.data.loading import load_weights as load_weights
from biascope.data.mutual import correlated_gaussians as correlated_gaussians
from biascope.data.mutual import noisy_function as noisy_function
from biascope.data.planar import disk, disk_labels, square_grid, yin_yang, yin_yang_labels
from biascope.data.quadratic_model import QuadraticTask, quadratic_example1, quadratic_example2, quadratic_example3
from biascope.data.signals import sinusoid_classes, sinusoids
from biascope.data.store import data_root, get, info, names

__all__ = [
    "Dataset",
    "QuadraticTask",
    "balanced_cells",
    "channel_stats",
    "cifar2",
    "circles",
    "corrupt_labels",
    "data_root",
    "directional",
    "disk",
    "disk_labels",
    "easy_difficult",
    "geometry_gaussian",
    "get",
    "info",
    "isotropic",
    "load",
    "names",
    "normalise",
    "quadratic_example1",
    "quadratic_example2",
    "quadratic_example3",
    "random_orthogonal",
    "relabel",
    "sinusoid_classes",
    "sinusoids",
    "spurious",
    "square_grid",
    "yin_yang",
    "yin_yang_labels",
]
