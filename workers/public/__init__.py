"""Packages that users import under their own name: ``everstep``."""
