"""Which elements of which tensor: boxes, and training state as a map of them. Pure."""
