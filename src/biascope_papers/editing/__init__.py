"""Task arithmetic: editing networks in weight space."""
