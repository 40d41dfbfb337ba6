"""The training step and the loop around it. ``settings`` and ``quotas`` import no torch."""
