"""Text to samples, and the order of the samples. ``order`` is arithmetic and imports no torch."""
