"""Our own distributed checkpoints: save a rank, commit, find, open, load."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door
from ucp_core.native.catalogue import (
    BEST,
    NOT_FINITE,
    RECHECKED,
    Collector,
    Found,
    best_steps,
    checkpoint_name,
    collect_garbage,
    find_committed,
    last_attempt,
    newest_finite,
    unloadable,
)
from ucp_core.native.claims import CLAIM_NAME, claimed, in_use, is_of_export, refuse_taken
from ucp_core.native.opening import (
    AVERAGE,
    MANIFEST_NAME,
    MEMORY_BYTES_MIN,
    RELATIONS,
    UNFINISHED_NAME,
    WITHOUT_ELEMENTS,
    Checkpoint,
    LoadResult,
    LocalTensor,
    check_memory,
    load,
    open_checkpoint,
    reading,
)
from ucp_core.native.saving import RankSaver, SaveResult, rank_name, save_rank, try_commit

if TYPE_CHECKING:
    from ucp_core.native.replicas import load_together
    from ucp_core.native.slabs import (
        Slab,
        SlabReader,
        TensorBox,
        aligned,
        stream,
        stream_box,
    )


__getattr__ = lazy_door(__name__)
