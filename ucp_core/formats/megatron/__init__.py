"""Megatron-LM's checkpoints from before ``torch_dist``: ``reader``.

``agreement`` checks that the files belong to one save and to their ranks. ``model`` makes tensors
of each model-parallel rank's files, and finds those in flat buffers. ``experts`` numbers the
experts of expert-parallel ranks.
"""
