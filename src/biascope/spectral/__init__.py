"""Fourier analysis of ReLU networks: linear regions, exact transforms, spectra, and which frequencies are learned."""

from biascope.spectral.cosine import cosine_power, dominant_cosine
from biascope.spectral.decay import Decay, LipschitzBounds, decay_exponent, lipschitz_bounds
from biascope.spectral.eigenbasis import RBFBasis, rbf_eigenbasis
from biascope.spectral.manifolds import Embedding, composition_kernel, flower, max_latent_frequency
from biascope.spectral.norms import spectral_norm
from biascope.spectral.paths import Paths, autoneb
from biascope.spectral.perturb import (
    HighFrequencyVolume,
    Robustness,
    high_frequency_volume,
    perturbation_robustness,
    sphere_directions,
)
from biascope.spectral.polytope import polytope_transform
from biascope.spectral.regions import Polygons, Segments, linear_regions_1d, linear_regions_2d
from biascope.spectral.relu_network import ReLUNetwork, activation_pattern, affine_map, relu_network
from biascope.spectral.spectrum import amplitude_spectrum, radial_spectrum
from biascope.spectral.transform import fourier_transform, transform_from_jumps

__all__ = [
    "Decay",
    "Embedding",
    "HighFrequencyVolume",
    "LipschitzBounds",
    "Paths",
    "Polygons",
    "RBFBasis",
    "ReLUNetwork",
    "Robustness",
    "Segments",
    "activation_pattern",
    "affine_map",
    "amplitude_spectrum",
    "autoneb",
    "composition_kernel",
    "cosine_power",
    "decay_exponent",
    "dominant_cosine",
    "flower",
    "fourier_transform",
    "high_frequency_volume",
    "linear_regions_1d",
    "linear_regions_2d",
    "lipschitz_bounds",
    "max_latent_frequency",
    "perturbation_robustness",
    "polytope_transform",
    "radial_spectrum",
    "rbf_eigenbasis",
    "relu_network",
    "spectral_norm",
    "sphere_directions",
    "transform_from_jumps",
]
