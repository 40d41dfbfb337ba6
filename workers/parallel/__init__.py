"""The mesh of an attempt, the model spread over it, and its state as local tensors."""
