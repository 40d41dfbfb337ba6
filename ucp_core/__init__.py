"""Training state as a map: boxes, layouts, plans and checkpoints, usable without Ray and without a GPU."""
