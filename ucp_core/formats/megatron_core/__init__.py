"""Megatron-core's ``torch_dist`` checkpoints: ``reader`` and ``writer``.

``key_names`` interprets the keys and makes them, ``joining`` finds the places of Hugging Face's
tensors. ``flat_buffers`` finds parameters in the buffers of the distributed optimizer, with the
comparisons of ``buffer_weights``. The container is the one of torch DCP.
"""
