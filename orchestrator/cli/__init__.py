"""The commands of ``everstep``."""
