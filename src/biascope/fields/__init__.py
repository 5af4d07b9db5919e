"""Implicit neural representations as structured dictionaries: their harmonics, failures, atoms and meta-learning."""

from biascope.fields.bessel import bandwidth, bessel_harmonics
from biascope.fields.encoding import Encoding, encoding
from biascope.fields.grids import coordinates
from biascope.fields.harmonics import Harmonics, harmonics
from biascope.fields.networks import MultiplicativeFilter, Polynomial, frozen_siren, single_frequency
from biascope.fields.support import (
    HarmonicSupport,
    NyquistCheck,
    harmonic_support,
    missing_bins,
    nyquist_check,
    spectrum_leakage,
)

__all__ = [
    "Encoding",
    "HarmonicSupport",
    "Harmonics",
    "MultiplicativeFilter",
    "NyquistCheck",
    "Polynomial",
    "bandwidth",
    "bessel_harmonics",
    "coordinates",
    "encoding",
    "frozen_siren",
    "harmonic_support",
    "harmonics",
    "missing_bins",
    "nyquist_check",
    "single_frequency",
    "spectrum_leakage",
]
