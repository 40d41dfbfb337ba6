"""Megatron-LM's checkpoints from before ``torch_dist``: ``reader``.

``model`` makes tensors of each model-parallel rank's files, and finds those in flat buffers.
``experts`` numbers the experts of expert-parallel ranks.
"""

from ucp_core.formats.megatron.recognition import TRACKER, is_there, located
