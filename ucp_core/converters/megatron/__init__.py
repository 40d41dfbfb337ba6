"""Megatron-LM's checkpoints of before ``torch_dist``: ``reader``.

``model`` makes tensors of the files of each model-parallel rank, ``flat_buffers`` finds parameters
in the buffers of the distributed optimizer, ``experts`` numbers those of expert parallel ranks.
"""
