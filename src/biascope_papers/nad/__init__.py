"""Studies of the paper on neural anisotropy directions."""
