"""Which bytes to read for which boxes, and reading them: every byte is verified."""
