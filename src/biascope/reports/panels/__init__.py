"""The panels of the bias card. A new panel is one file here with a function decorated by `card_panel`."""

import importlib
import pkgutil

from biascope._moved import names_of_before
from biascope.reports.panels.base import PanelFunction, registered

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

PANELS: list[PanelFunction] = registered()  # in the order they appear

__getattr__ = names_of_before(__name__)
