"""The controller's side of the snapshots in keepers' memory.

It asks all keepers at once which versions they hold. When a run ends, keepers store the newest
version if storage lacks it.
"""

import asyncio
import contextlib
import functools
import logging
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from orchestrator.policies import (
    Protection,
    RedundancyPlan,
    Version,
    bad_sources,
    state_bytes,
    versions,
)
from orchestrator.shell.capacity import Nodes, NodeView
from orchestrator.shell.capacity import answer as told
from ucp_core.errors import UcpError
from ucp_core.lineage import Lineage
from ucp_core.native import Found, checkpoint_name, find_committed, unloadable
from ucp_core.storage import Store
from workers.protocol import Inventory, NodeReport, PartRef, Source

log = logging.getLogger(__name__)

#: Live keepers answered in 1 to 20 ms. One that is silent for this long is skipped.
ASK_S = 0.5
#: How long to wait again for a slow keeper that alone holds a part. Continuing without the part
#: would cost more.
LATE_S = 2.0
#: If memory holds a version, storage gets no more than this time to answer.
STORAGE_S = 5.0
#: Two threads: the second one may get an answer from storage while the first still waits for a lost
#: one.
_LOOKS_AT_ONCE = 2
#: Longest time to store the newest version at the end of a run.
FLUSH_S = 60.0

#: The newest version in storage, a line on each skipped one, and the steps that are lost.
_Looked = tuple[Found | None, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The newest version of both tiers, the newest step in storage, and the skipped versions.

    ``stored_step`` is -1 if storage was not read, and ``damaged`` are newer steps with damaged
    bytes. Without a version, ``lost`` lists the steps that are committed in storage, newest first.
    ``unheard`` has the nodes that are not known to be lost but whose keepers did not answer.
    """

    version: Version | None
    stored_step: int = -1
    damaged: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    unheard: frozenset[str] = frozenset()


class Snapshots:
    """The snapshots that the keepers of the run hold."""

    def __init__(self, *, nodes: Nodes, store: Store, checkpoints: str, total_steps: int) -> None:
        self._nodes = nodes
        self._store = store
        self._checkpoints = checkpoints
        self._total_steps = total_steps
        self._version: Version | None = None
        self._reports: dict[str, NodeReport] = {}
        # Keepers that did not answer and have not reported since: one wait for them is enough.
        self._silent: set[str] = set()
        #: Those among them that were asked again, or failed.
        self._hopeless: set[str] = set()
        #: The last inventory of each keeper, from a report or an answer.
        self._known: dict[str, Inventory] = {}
        self._looks = ThreadPoolExecutor(_LOOKS_AT_ONCE, "storage-look")
        #: The newest read of storage. It may have begun.
        self._waiting: Future[Any] = Future()

    @property
    def holds_any(self) -> bool:
        """Return whether any keeper is known to hold a snapshot."""
        return any(one.parts for one in self._known.values())

    def on_report(self, report: NodeReport) -> None:
        """Keep the last report of every keeper."""
        self._reports[report.node] = report
        self.on_keeper(report.node)
        if report.inventory is not None:
            self._known[report.node] = report.inventory

    def on_keeper(self, node: str) -> None:
        """Note that a keeper is up, so that it is asked again."""
        self._silent.discard(node)
        self._hopeless.discard(node)

    async def read(
        self,
        lineage: Lineage,
        *,
        enough_step: int,
        stored_step: int = 0,
        has_stored: bool = False,
        bad: Sequence[Source] = (),
        unreached: Sequence[str] = (),
    ) -> Answer | None:
        """Return the version to resume from; None if it cannot be known now.

        Args:
            lineage: Says which versions count.
            enough_step: A version in memory of this step or later ends the search, because nothing
                in storage can be newer. -1 if unknown.
            stored_step: A step that is known to be committed in storage. If storage does not
                answer, an older version does not count.
            has_stored: Whether anything was ever committed to storage.
            bad: Sources that must not be loaded.
            unreached: Nodes whose memory cannot be loaded.
        """

        def newest(inventories: Sequence[Inventory], other: tuple[int, int]) -> Version | None:
            good = bad_sources.good(inventories, bad, unreached)
            return versions.newest(good, other, lineage, total_steps=self._total_steps)

        excluded = frozenset(map(checkpoint_name, bad_sources.in_storage(bad, lineage)))
        stored = self._begin_look(lineage, excluded, has_stored=has_stored)
        answer = await self._find(newest, stored, enough_step, stored_step)
        self._version = answer.version if answer is not None else None
        return answer

    def _begin_look(
        self, lineage: Lineage, excluded: frozenset[str] = frozenset(), *, has_stored: bool = False
    ) -> asyncio.Future[_Looked]:
        """Read storage in a thread; a newer read cancels one that still waits for a thread.

        So repeated reads of stalled storage occupy few threads, and none that other parts need.
        """
        self._waiting.cancel()
        where = self._store, self._checkpoints, lineage, excluded
        self._waiting = self._looks.submit(_look, *where, has_stored=has_stored)
        stored = asyncio.wrap_future(self._waiting)
        stored.add_done_callback(_seen)
        return stored

    async def _find(
        self,
        newest: Callable[[Sequence[Inventory], tuple[int, int]], Version | None],
        stored: asyncio.Future[_Looked],
        enough_step: int,
        stored_step: int,
    ) -> Answer | None:
        def step(inventories: Sequence[Inventory]) -> int:
            held = newest(inventories, (0, 0))
            return held.step if held is not None else 0

        inventories = await self._patient_inventories(step)
        heard = {one.node for one in inventories}
        unheard = frozenset(view.node for view in self._nodes.kept() if view.node not in heard)
        answer = functools.partial(Answer, unheard=unheard)
        held = newest(inventories, (0, 0))
        if held is None or not 0 <= enough_step <= held.step:
            # With nothing in memory, storage is the only source.
            await asyncio.wait([stored], timeout=STORAGE_S if held is not None else None)
        is_behind = held is not None and held.step < stored_step
        if stored.cancelled():
            return None
        if not stored.done():
            return None if is_behind else answer(held)
        try:
            found, passed_over, lost = stored.result()
        except UcpError as error:
            log.warning("the steps in storage are unknown: %s", error)
            return answer(held) if held is not None and not is_behind else None
        if found is None:
            told = () if held is not None else lost
            return answer(held, stored_step=0, damaged=lost, skipped=passed_over, lost=told)
        version = newest(inventories, (found.step, found.attempt))
        return answer(version, stored_step=found.step, damaged=found.damaged, skipped=passed_over)

    def known_parts(
        self, step: int, attempt: int, *, unreached: Collection[str] = ()
    ) -> tuple[PartRef, ...]:
        """Return the parts of a version in memory, by the last answer.

        Return () if that was another version, or if it needs a node in ``unreached``.
        """
        version = self._version
        if version is None or (version.step, version.attempt) != (step, attempt):
            return ()
        if any(part.node in unreached for part in (*version.parts, *version.parities)):
            return ()
        return self._memory_parts(version)

    async def find_parts(
        self,
        step: int,
        attempt: int,
        *,
        bad: Sequence[Source] = (),
        unreached: Collection[str] = (),
    ) -> tuple[PartRef, ...]:
        """Ask keepers for the parts of a version in memory; () if it is not complete there."""

        def found(inventories: Sequence[Inventory]) -> list[Version]:
            # The version is known to count, so no lineage is needed.
            every = versions.complete(bad_sources.good(inventories, bad, unreached), ())
            return [each for each in every if (each.step, each.attempt) == (step, attempt)]

        inventories = await self._patient_inventories(lambda these: len(found(these)), expected=1)
        return next(map(self._memory_parts, found(inventories)), ())

    def _memory_parts(self, version: Version) -> tuple[PartRef, ...]:
        peers = {view.node: view.peer for view in self._nodes.kept() if view.secret}
        return tuple(
            replace(part, peer=peers[part.node])
            for part in (*version.parts, *version.parities)
            if part.node in peers
        )

    async def inventories(self) -> list[Inventory]:
        """Return the inventories of keepers that answer in time."""
        await self._nodes.met.wait()
        views = [v for v in self._nodes.kept() if v.secret and v.node not in self._silent]
        return await self._ask(views, ASK_S)

    async def _patient_inventories(
        self, worth: Callable[[Sequence[Inventory]], int], *, expected: int = 0
    ) -> list[Inventory]:
        """Return the inventories of keepers; ask late ones again if they could add something.

        ``worth`` returns the value of inventories together, ``expected`` is the value if all
        answered.
        """
        found = await self.inventories()
        hopeful = self._silent - self._hopeless
        late = [view for view in self._nodes.kept() if view.secret and view.node in hopeful]
        hoped = [self._known[view.node] for view in late if view.node in self._known]
        if late and max(worth([*found, *hoped]), expected) > worth(found):
            self._hopeless |= {view.node for view in late}
            found += await self._ask(late, LATE_S)
        return found

    async def _ask(self, views: Sequence[NodeView], timeout_s: float) -> list[Inventory]:
        answers = await asyncio.gather(*(self._ask_one(view, timeout_s) for view in views))
        found = [answer for answer in answers if answer is not None]
        heard = {one.node for one in found}
        self._silent = (self._silent | {view.node for view in views}) - heard
        self._hopeless -= heard
        self._known |= {one.node: one for one in found}
        return found

    async def _ask_one(self, view: NodeView, timeout_s: float) -> Inventory | None:
        """Return the inventory of a keeper; None if it is silent, or its node is lost by then."""
        asked = asyncio.ensure_future(view.keeper.held.remote())
        lost = asyncio.ensure_future(view.lost.wait())
        try:
            await asyncio.wait([asked, lost], timeout=timeout_s, return_when=FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        except RayError:
            self._hopeless.add(view.node)
            return None
        finally:
            asked.cancel()
            lost.cancel()

    def measured(self) -> tuple[tuple[tuple[str, int], ...], int]:
        """Return the memory for snapshots at each keeper, by node, and the size of a version."""
        there = {view.node for view in self._nodes.kept()}
        self._known = {node: one for node, one in self._known.items() if node in there}
        budgets = ((node, one.budget_bytes) for node, one in self._known.items())
        return tuple(sorted(each for each in budgets if each[1])), state_bytes(self._known.values())

    async def flush(self, lineage: Lineage) -> None:
        """Store the newest version if it is only in memory; give up after ``FLUSH_S``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._flush(lineage), FLUSH_S)

    async def _flush(self, lineage: Lineage) -> None:
        # The last step counts as well: it may be the only one of the run. Keepers store the parts
        # that they hold; they reconstruct none.
        def newest(inventories: Sequence[Inventory], other: tuple[int, int]) -> Version | None:
            held = [replace(one, parities=()) for one in inventories]
            return versions.newest(held, other, lineage, total_steps=sys.maxsize)

        answer = await self._find(newest, self._begin_look(lineage), -1, 0)
        version = answer.version if answer is not None else None
        if answer is None or version is None or answer.stored_step >= version.step:
            return
        holders = {part.node for part in version.parts}
        calls = [
            told(view.keeper.flush.remote(version.attempt, version.step), FLUSH_S)
            for view in self._nodes.kept()
            if view.node in holders
        ]
        stored_by = await asyncio.gather(*calls)
        log.info("flushed", extra={"step": version.step, "stored": all(stored_by)})

    def protection(self, lineage: Lineage) -> Protection:
        """Return how well the run is protected, by the last reports."""
        return versions.protection(self._reported(), lineage)

    def protects(
        self, lineage: Lineage, *, attempt: int, nodes: Collection[str], tolerance: int
    ) -> bool:
        """Return ``policies.versions.protects`` of the last reports."""
        return versions.protects(
            self._reported(),
            lineage,
            attempt=attempt,
            nodes=nodes,
            tolerance=tolerance,
            total_steps=self._total_steps,
        )

    def memory(self) -> list[dict[str, Any]]:
        """Return the memory that versions and parities take at each keeper, by the last reports."""
        return [
            {"node": one.node, "held_bytes": one.held_bytes, "budget_bytes": one.budget_bytes}
            for one in self._reported()
        ]

    def stored_step(self) -> int:
        """Return the newest step that keepers saw in storage."""
        return max((report.stored_step for report in self._living_reports()), default=0)

    def problems(self, plan: RedundancyPlan) -> list[str]:
        """Return a line for each reason why the protection is below the configured one."""
        label = self._nodes.rack_label
        racks = [
            f"the loss of rack {rack} may cost the snapshots in memory, because its nodes protect "
            "each other: add nodes of other racks"
            for rack in plan.shared_racks
        ]
        unnamed = [view.node[:8] for view in self._nodes.kept() if label and not view.rack]
        if unnamed:
            racks.append(
                f"Ray knows no label {label!r} of node {', '.join(unnamed)}: each counts as a rack "
                "of its own; start it with that label, or correct cluster.rack_label"
            )
        return racks + [
            f"node {report.node[:8]}: {problem}"
            for report in self._living_reports()
            for problem in report.problems
        ]

    def _reported(self) -> list[Inventory]:
        reports = self._living_reports()
        return [report.inventory for report in reports if report.inventory is not None]

    def _living_reports(self) -> list[NodeReport]:
        met = {view.node for view in self._nodes.kept() if view.secret}
        # The report of a keeper that died does not describe the memory of the next one.
        self._reports = {node: one for node, one in self._reports.items() if node in met}
        return list(self._reports.values())


def _seen(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of an answer that no task awaits, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def _look(
    store: Store,
    checkpoints: str,
    lineage: Lineage,
    excluded: frozenset[str],
    *,
    has_stored: bool,
) -> _Looked:
    """Return the newest version in storage that counts, the skipped ones, and the lost steps.

    There is a line for each skipped version. Lost steps are returned only if no version can be
    loaded.
    """
    found = find_committed(store, checkpoints, lineage=lineage, exclude=excluded)
    lost: tuple[tuple[int, str], ...] = ()
    if found is not None:
        rows = found.skipped
    else:
        lost = unloadable(store, checkpoints, lineage=lineage, with_data=has_stored)
        damaged = {checkpoint_name(step): reason for step, reason in lost}
        told = "does not count; if it is damaged, `ucp verify` says where"
        names = sorted(store.list(checkpoints), reverse=True)
        rows = tuple((name, damaged.get(name) or told) for name in names)
    # Workers that could not load the excluded versions have reported why.
    lines = tuple(f"{name}: {why}" for name, why in rows if name not in excluded)
    return found, lines, tuple(step for step, _ in lost)
