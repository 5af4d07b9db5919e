"""What to measure while a network trains: one object for a plain loop, callbacks for Lightning and Hugging Face.

Metrics are functions of a `View`: they are in `kernel_metrics`, `function_metrics` and `weight_metrics`.
"""

from importlib import import_module
from typing import Any

from biascope._moved import names_of_before
from biascope.probes import bounds as bounds  # a page of theory, used by its own name
from biascope.probes import weight_metrics as weight_metrics
from biascope.probes.equal import equal_progress
from biascope.probes.function_metrics import representation_alignment, sign_similarity
from biascope.probes.kernel_metrics import ntk_alignment
from biascope.probes.metrics import metric, register
from biascope.probes.path_sums import path_norm as path_norm
from biascope.probes.probe import Probe as Probe
from biascope.probes.records import Record, read_records
from biascope.probes.schedules import EveryEpochs, EverySteps, LogSteps, LossGrid
from biascope.probes.view import View

__all__ = [
    "EveryEpochs",
    "EverySteps",
    "LogSteps",
    "LossGrid",
    "Record",
    "View",
    "equal_progress",
    "metric",
    "ntk_alignment",
    "read_records",
    "register",
    "representation_alignment",
    "sign_similarity",
]


def __getattr__(name: str) -> Any:
    if name in {"lightning", "huggingface"}:  # imported when asked for: they need their frameworks
        return import_module(f"biascope.probes.{name}")
    return names_of_before(__name__)(name)
