"""Training state as a map: boxes, layouts, plans and checkpoints, without Ray or a GPU."""
