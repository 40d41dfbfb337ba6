"""Megatron-LM's checkpoints of before ``torch_dist``: ``reader``.

``agreement`` looks whether the files are of one save and of the ranks whose folders they are in.
``model`` makes tensors of the files of each model-parallel rank, ``flat_buffers`` finds parameters
in the buffers of the distributed optimizer, ``experts`` numbers those of expert parallel ranks.
"""
