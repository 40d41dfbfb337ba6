"""Slots, nodes and worker processes on Ray."""
