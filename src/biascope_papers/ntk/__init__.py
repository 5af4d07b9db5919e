"""Learning complexity in function space: the tangent kernel's eigenfunctions as tasks, and how training turns it."""
