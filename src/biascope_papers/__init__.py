"""Executable papers: every figure, table and theorem of five documents as a study that anyone can run."""
