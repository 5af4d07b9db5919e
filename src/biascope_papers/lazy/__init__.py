"""Lazy and hasty training: the alpha-scaled regimes, groups of easy and difficult examples, and what theory says."""
