"""Implicit neural representations as structured dictionaries: their harmonics, failures, atoms and meta-learning."""

from biascope._moved import names_of_before
from biascope.fields.atoms import Dictionary, dictionary, plot_energy
from biascope.fields.failures import alias_test, recovery_bound
from biascope.fields.fitting import coordinates, fit
from biascope.fields.meta import dictionary_change, meta_learn
from biascope.fields.networks import Polynomial, frozen_siren, single_frequency
from biascope.fields.series import bessel_harmonics, harmonics
from biascope.fields.support import harmonic_support, missing_bins, nyquist_check

__getattr__ = names_of_before(__name__)

__all__ = [
    "Dictionary",
    "Polynomial",
    "alias_test",
    "bessel_harmonics",
    "coordinates",
    "dictionary",
    "dictionary_change",
    "fit",
    "frozen_siren",
    "harmonic_support",
    "harmonics",
    "meta_learn",
    "missing_bins",
    "nyquist_check",
    "plot_energy",
    "recovery_bound",
    "single_frequency",
]
