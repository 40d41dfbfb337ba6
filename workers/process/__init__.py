"""Run a worker process: its Ray actor, its start, its end."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.process.actor import OPTIONS, Worker
    from workers.process.environment import TUNABLE, VARIABLE, copies_past_caches, tuned
    from workers.process.gpus import gpus_here, gpus_of_node, share_of_gpu


__getattr__ = lazy_door(__name__)
