"""Megatron-core's ``torch_dist`` checkpoints: ``reader``.

``key_names`` interprets the keys. ``flat_buffers`` finds parameters in the buffers of the
distributed optimizer, with the comparisons of ``buffer_weights``. The container is that of torch
DCP.
"""
