"""Notices of a machine's end: poll a node's sources and interpret their answers."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.keeper.notices.machine import CLOUDS, recognised
    from workers.keeper.notices.polling import NoticeWatch
    from workers.keeper.notices.providers import FAILURES, no_answer, sources_of


__getattr__ = lazy_door(__name__)
