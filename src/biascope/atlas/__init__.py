"""An atlas of inductive biases: what many architectures are inclined to learn, on one map, and where a new one lies."""

from biascope.atlas.kept import Atlas
from biascope.atlas.measure import Fingerprint as Fingerprint
from biascope.atlas.measure import fingerprint

__all__ = ["Atlas", "fingerprint"]
