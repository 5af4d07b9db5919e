"""Executable papers: one file per figure, at three sizes, each writing the same kind of run folder."""

from biascope.studies.judging import judgements
from biascope.studies.registry import configure, execute, find, load_result, studies, study
from biascope.studies.result import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.studies.runs import Run

__all__ = [
    "Chart",
    "Estimate",
    "HeatMap",
    "Run",
    "Series",
    "StudyResult",
    "configure",
    "execute",
    "find",
    "judgements",
    "load_result",
    "studies",
    "study",
]
