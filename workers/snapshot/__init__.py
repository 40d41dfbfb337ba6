"""Versions of the training state in memory: taken by trainers, held by keepers."""
