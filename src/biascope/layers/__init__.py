"""Per-layer rules: how a layer's share of J, J J^T and J^T J follows from its input and its output's gradient.

`anatomy` finds and proves the rules, `collect` runs the data through, the factors carry what contractions need.
"""

from biascope.layers.blocks import Anatomy, Block, StaleError, leaves
from biascope.layers.factors import Factor, MatrixFactor, RowsFactor, collect
from biascope.layers.fallback import per_example_gradients
from biascope.layers.passes import recorded
from biascope.layers.pilot import anatomy, forget
from biascope.layers.record import Tape, record
from biascope.layers.rows import rows_of_tape
from biascope.layers.rules import Sizes

__all__ = [
    "Anatomy",
    "Block",
    "Factor",
    "MatrixFactor",
    "RowsFactor",
    "Sizes",
    "StaleError",
    "Tape",
    "anatomy",
    "collect",
    "forget",
    "leaves",
    "per_example_gradients",
    "record",
    "recorded",
    "rows_of_tape",
]
