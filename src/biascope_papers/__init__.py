"""Executable papers: every figure, table and theorem of five documents, and claims of others, as studies to run."""
