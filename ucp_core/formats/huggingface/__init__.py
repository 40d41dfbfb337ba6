"""Hugging Face folders of safetensors: ``reader`` and ``writer``."""
