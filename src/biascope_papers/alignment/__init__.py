"""Tangent features while a network trains: their spectrum, and their alignment with the task."""
