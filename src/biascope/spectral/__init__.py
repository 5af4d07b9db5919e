"""Fourier analysis of ReLU networks: linear regions, exact transforms, spectra, and which frequencies are learned."""

from biascope._moved import names_of_before
from biascope.spectral import cosine, decay, manifolds, perturb
from biascope.spectral.eigenbasis import rbf_eigenbasis
from biascope.spectral.norms import spectral_norm
from biascope.spectral.paths import autoneb
from biascope.spectral.polytope import polytope_transform
from biascope.spectral.regions import Segments, linear_regions_1d, linear_regions_2d
from biascope.spectral.relu_network import affine_map
from biascope.spectral.spectrum import amplitude_spectrum, radial_spectrum
from biascope.spectral.transform import fourier_transform

__getattr__ = names_of_before(__name__)

__all__ = [
    "Segments",
    "affine_map",
    "amplitude_spectrum",
    "autoneb",
    "cosine",
    "decay",
    "fourier_transform",
    "linear_regions_1d",
    "linear_regions_2d",
    "manifolds",
    "perturb",
    "polytope_transform",
    "radial_spectrum",
    "rbf_eigenbasis",
    "spectral_norm",
]
