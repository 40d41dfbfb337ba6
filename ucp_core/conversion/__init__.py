"""Convert any checkpoint to a universal one.

``run`` does it. A conversion is divided into files and items (``job``). A worker does an item
(``work_items``), in this thread, in other threads or in processes (``workers``); a cluster passes
``do_batch`` to its tasks. ``outputs`` (local) or ``streams`` (remote) decide where bytes are
written, and a ``resume_journal`` records what is done.
"""

from ucp_core.conversion.job import differing_replicas
from ucp_core.conversion.run import ConvertResult, convert, memory_left
from ucp_core.conversion.work_items import Job, Result
from ucp_core.conversion.workers import Batch, do_batch
