"""MINE: what the chapter on neural estimation of mutual information shows where the truth is known."""
