"""Parity over the parts of a version: the code, what is stored, and rebuilding."""
