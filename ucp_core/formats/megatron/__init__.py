"""Megatron-LM's checkpoints from before ``torch_dist``: ``reader``.

``experts`` numbers the experts of expert-parallel ranks, and knows the groups of Megatron's
optimizers.
"""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from ucp_core.formats.megatron.experts import assigned, is_plain
    from ucp_core.formats.megatron.recognition import TRACKER, is_there, located


__getattr__ = lazy_door(__name__)
