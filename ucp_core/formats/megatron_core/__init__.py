"""Megatron-core's ``torch_dist`` checkpoints: ``reader``.

``key_names`` says what its keys mean, ``flat_buffers`` tells the buffers of the distributed
optimizer apart, by what ``buffer_weights`` sees in them. The container is that of torch DCP.
"""
