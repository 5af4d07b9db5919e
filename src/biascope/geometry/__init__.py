"""Input space: what a network does to directions of its input."""
