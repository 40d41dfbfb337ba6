"""One optimizer step: micro-batches, reduction, gradient norm, learning rate."""
