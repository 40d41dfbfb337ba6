"""Megatron-LM's checkpoints from before ``torch_dist``: ``reader``.

``agreement`` checks that the files belong to one save and to their ranks. ``model`` makes tensors
of each model-parallel rank's files. ``flat_buffers`` finds parameters in the buffers of the
distributed optimizer. ``experts`` numbers the experts of expert-parallel ranks.
"""
