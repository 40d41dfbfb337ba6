"""The training state of a rank as named local tensors, and as a map of boxes."""
