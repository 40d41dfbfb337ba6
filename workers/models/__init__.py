"""The reference decoder language model. ``shape`` is arithmetic and imports no torch."""
