"""The panels of the bias card, in the order they appear. A new panel: one file here, one line in `PANELS`."""

from biascope.reports.panels import anatomy, directional, input_geometry, labels, regime, tangent_kernel
from biascope.reports.panels.base import Panel, PanelFunction, Subject, make_subject

PANELS: list[PanelFunction] = [
    anatomy.panel,
    input_geometry.panel,
    directional.panel,
    tangent_kernel.panel,
    labels.panel,
    regime.panel,
]

__all__ = ["PANELS", "Panel", "PanelFunction", "Subject", "make_subject"]
