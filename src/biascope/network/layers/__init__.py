"""Per-layer rules: how a layer's share of J, J J^T and J^T J follows from its input and its output's gradient."""
