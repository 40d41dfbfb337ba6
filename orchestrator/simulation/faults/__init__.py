"""Faults of the virtual cluster, drawn from the seed."""
