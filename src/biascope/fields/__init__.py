"""Implicit neural representations as structured dictionaries: their harmonics, failures, atoms and meta-learning."""

from biascope.fields.aliasing import AliasTest, alias_test
from biascope.fields.bessel import bandwidth, bessel_harmonics
from biascope.fields.dictionary import Dictionary, Energy, dictionary, mutual_coherence
from biascope.fields.encoding import Encoding, encoding
from biascope.fields.figures import plot_energy
from biascope.fields.fit import Fit, fit, psnr
from biascope.fields.grids import coordinates
from biascope.fields.harmonics import Harmonics, harmonics
from biascope.fields.meta import DictionaryChange, MetaLearned, dictionary_change, meta_learn
from biascope.fields.networks import MultiplicativeFilter, Polynomial, frozen_siren, single_frequency
from biascope.fields.recovery import Recovery, recovery_bound
from biascope.fields.support import (
    HarmonicSupport,
    NyquistCheck,
    harmonic_support,
    missing_bins,
    nyquist_check,
    spectrum_leakage,
)

__all__ = [
    "AliasTest",
    "Dictionary",
    "DictionaryChange",
    "Encoding",
    "Energy",
    "Fit",
    "HarmonicSupport",
    "Harmonics",
    "MetaLearned",
    "MultiplicativeFilter",
    "NyquistCheck",
    "Polynomial",
    "Recovery",
    "alias_test",
    "bandwidth",
    "bessel_harmonics",
    "coordinates",
    "dictionary",
    "dictionary_change",
    "encoding",
    "fit",
    "frozen_siren",
    "harmonic_support",
    "harmonics",
    "meta_learn",
    "missing_bins",
    "mutual_coherence",
    "nyquist_check",
    "plot_energy",
    "psnr",
    "recovery_bound",
    "single_frequency",
    "spectrum_leakage",
]
