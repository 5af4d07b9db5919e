"""Spectral bias: what the chapter on Fourier analysis of ReLU networks shows, figure by figure."""
