"""The keeper: one process per node, which watches the trainers and reports for the node."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.keeper.actor import OPTIONS, Keeper
    from workers.keeper.notices import CLOUDS, FAILURES, NoticeWatch, no_answer, sources_of
    from workers.keeper.reach import SILENT_S, hung_up, silent
    from workers.keeper.sources import MemorySources
    from workers.keeper.trainer_watch import progress_path, ring_path


__getattr__ = lazy_door(__name__)
