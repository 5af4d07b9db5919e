"""Implicit neural representations: what they can represent, recover and learn quickly."""
