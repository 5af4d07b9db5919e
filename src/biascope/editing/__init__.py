"""Task vectors: what fine-tuning did to the weights, its arithmetic, and when tasks do not disturb one another."""

from biascope.editing.disentanglement import Disentanglement, disentanglement, disentanglement_error
from biascope.editing.merging import (
    Addition,
    Negation,
    accuracy,
    analogy,
    average,
    combine,
    task_addition,
    task_negation,
)
from biascope.editing.properties import (
    Leakage,
    Linearity,
    Localisation,
    cosines,
    effective_ranks,
    leakage,
    linearity,
    localisation,
    sparsity,
)
from biascope.editing.tangent import FineTuned, fine_tune, posthoc, predictors
from biascope.editing.vectors import TaskVector
from biascope.editing.zeroshot import ZeroShotHead, contrastive_loss, zero_shot_head

__all__ = [
    "Addition",
    "Disentanglement",
    "FineTuned",
    "Leakage",
    "Linearity",
    "Localisation",
    "Negation",
    "TaskVector",
    "ZeroShotHead",
    "accuracy",
    "analogy",
    "average",
    "combine",
    "contrastive_loss",
    "cosines",
    "disentanglement",
    "disentanglement_error",
    "effective_ranks",
    "fine_tune",
    "leakage",
    "linearity",
    "localisation",
    "posthoc",
    "predictors",
    "sparsity",
    "task_addition",
    "task_negation",
    "zero_shot_head",
]
