"""What to measure while a network trains: one object for a plain loop, callbacks for Lightning and Hugging Face."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from biascope.probes.bounds import (
    finite_class_bound,
    gaussian_kl,
    hoeffding_bound,
    occam_bound,
    pac_bayes_bound,
)
from biascope.probes.capacity_metrics import fisher_rao_norm, norm_products
from biascope.probes.equal import EqualProgress, Pair, equal_progress
from biascope.probes.function_metrics import fourier, group_losses, representation_alignment, sign_similarity
from biascope.probes.kernel_metrics import (
    effective_rank,
    group_alignment,
    kernel_velocity,
    label_alignment,
    layer_alignment,
    ntk_alignment,
    spectrum,
    trace_ratio,
)
from biascope.probes.losses import example_losses
from biascope.probes.metrics import Metric, metric, register
from biascope.probes.path_metrics import (
    complexity,
    input_velocity,
    linearisation_error,
    parameter_distance,
    path_complexity,
    spectral_norm,
)
from biascope.probes.path_sums import path_norm
from biascope.probes.probe import Probe
from biascope.probes.record import Record, read_records
from biascope.probes.schedules import EveryEpochs, EverySteps, LogSteps, LossGrid, Schedule
from biascope.probes.view import Setup, View

__all__ = [
    "EqualProgress",
    "EveryEpochs",
    "EverySteps",
    "LogSteps",
    "LossGrid",
    "Metric",
    "Pair",
    "Probe",
    "Record",
    "Schedule",
    "Setup",
    "View",
    "complexity",
    "effective_rank",
    "equal_progress",
    "example_losses",
    "finite_class_bound",
    "fisher_rao_norm",
    "fourier",
    "gaussian_kl",
    "group_alignment",
    "group_losses",
    "hoeffding_bound",
    "input_velocity",
    "kernel_velocity",
    "label_alignment",
    "layer_alignment",
    "linearisation_error",
    "metric",
    "norm_products",
    "ntk_alignment",
    "occam_bound",
    "pac_bayes_bound",
    "parameter_distance",
    "path_complexity",
    "path_norm",
    "read_records",
    "register",
    "representation_alignment",
    "sign_similarity",
    "spectral_norm",
    "spectrum",
    "trace_ratio",
]


def __getattr__(name: str) -> Any:
    if name in {"lightning", "huggingface"}:  # imported when asked for: they need their frameworks
        return import_module(f"biascope.probes.{name}")
    raise AttributeError(f"module 'biascope.probes' has no attribute {name!r}")
