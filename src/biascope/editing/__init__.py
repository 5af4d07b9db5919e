"""Task vectors: what fine-tuning did to the weights, its arithmetic, and when tasks do not disturb one another."""

from biascope._moved import names_of_before
from biascope.editing import zeroshot as zeroshot  # a page of its own
from biascope.editing.fine_tuning import fine_tune, posthoc
from biascope.editing.interference import Disentanglement, disentanglement
from biascope.editing.interference import disentanglement_error as disentanglement_error
from biascope.editing.merging import analogy, average, combine, task_addition, task_negation
from biascope.editing.properties import leakage, linearity, localisation
from biascope.editing.vectors import TaskVector as TaskVector

__getattr__ = names_of_before(__name__)

__all__ = [
    "Disentanglement",
    "analogy",
    "average",
    "combine",
    "disentanglement",
    "fine_tune",
    "leakage",
    "linearity",
    "localisation",
    "posthoc",
    "task_addition",
    "task_negation",
]
