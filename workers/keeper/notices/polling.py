"""Poll the sources of a node, each in a separate thread, because they may block."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from workers.keeper.notices import answers
from workers.keeper.notices.providers import FAILURES, NoticeSource, no_answer
from workers.protocol import Notice

log = logging.getLogger(__name__)

#: Longest period of polling a source that does not answer; the period grows up to this.
_ASK_S_MAX: Final = 60.0


class NoticeWatch:
    """The notices of a node's sources. Its threads end with the process, or after ``close``.

    If a source stops answering, its last notice stays.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._said: dict[str, Notice | None] = {}
        self._failing: dict[str, str] = {}
        self._closed = threading.Event()
        for source in sources:
            threading.Thread(
                target=self._ask_often, args=(source,), name="notices", daemon=True
            ).start()

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()

    def notice(self) -> Notice | None:
        """Return the notice that ends first, with the time left."""
        found = answers.nearest([said for said in tuple(self._said.values()) if said is not None])
        now_s = time.time()  # noqa: TID251  as people and providers count it
        return found and replace(found, left_s=max(0.0, found.deadline_s - now_s))

    def problems(self) -> tuple[str, ...]:
        """Return one line for each source that does not answer."""
        return tuple(
            f"{why}; without it a taken node is noticed only when it is gone"
            for why in sorted(self._failing.copy().values())
        )

    def _ask_often(self, source: NoticeSource) -> None:
        wait_s = source.period_s
        while True:
            try:
                self._said[source.name] = source.look()
            except FAILURES as error:
                if self._failing.get(source.name) is None:
                    log.warning(
                        "notices of %s cannot be read, trying again: %s", source.name, error
                    )
                self._failing[source.name] = no_answer(source, error)
                wait_s = min(2 * wait_s, _ASK_S_MAX)
            else:
                self._failing.pop(source.name, None)
                wait_s = source.period_s
            if self._closed.wait(wait_s):
                return
