"""Megatron-core's ``torch_dist`` checkpoints: ``reader`` and ``writer``.

``key_names`` interprets the keys and makes them, ``joining`` finds the places of Hugging Face's
tensors. ``flat_buffers`` finds parameters in the distributed optimizer's buffers. The container
is the one of torch DCP.
"""
