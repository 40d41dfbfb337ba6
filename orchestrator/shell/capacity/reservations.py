"""Capacity as a set of placement groups, one per reservation.

Ray 2.60 cannot resize a placement group, so a run's capacity is a set of them: growing creates one,
shrinking removes one, and the autoscaler sees pending ones as demand. A reservation only reserves
resources. The controller decides which process uses it, so a warm standby takes over the
reservation of a dead worker at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.config import Alternative
from orchestrator.core import events as ev
from orchestrator.shell.capacity.packing import Packing
from orchestrator.shell.inbox import Inbox
from orchestrator.shell.names import RunNames
from orchestrator.shell.threads import RAY, in_thread

#: Period of checks while groups are pending. Ray reports placement only if asked.
POLL_S = 0.2
#: If Ray is slow, a request of a dead controller can take effect after the next controller has
#: looked. It looks for such reservations for this long.
STRAYS_S = 30.0
#: A reservation that has not reported its GPUs within this time is asked again. Ray starts a
#: process in it to find them. That takes seconds, but never happens if the node is gone and there
#: is no other.
GPU_S_MAX = 60.0
#: Poll period and bound for removing a placement group that Ray is still placing: a node that does
#: not answer must not delay the end of a run.
BUSY_POLL_S = 0.02
BUSY_S_MAX = 30.0
#: Period of checks whether Ray has room for requests that it does not place.
ROOM_LOOK_S = 5.0
#: Ray's states of a group that waits for room, with no resources set aside.
WAITING = frozenset({"NO_RESOURCES", "INFEASIBLE", "FAILED_TO_COMMIT_RESOURCES"})

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reservation:
    avoid: tuple[str, ...] = ()
    alternative: int = 0
    group: PlacementGroup | None = None  #: None while Ray creates it.
    node: str | None = None
    gpu_ids: tuple[int, ...] = ()
    num_looks: int = 0  #: How many looks in a row found room for it that Ray did not use.


class Capacity:
    """The run's reservations; posts one ``ReservationGranted`` per grant.

    ``group`` workers must be on one node.
    """

    def __init__(
        self, inbox: Inbox, *, names: RunNames, alternatives: Sequence[Alternative], group: int = 1
    ) -> None:
        self._inbox = inbox
        self._packing = Packing(group)
        self._names = names
        self._alternatives = alternatives
        self._reservations: dict[int, _Reservation] = {}
        self._asked = asyncio.Event()
        # Groups that are being created: the caller may be gone before they exist.
        self._creations: set[asyncio.Future[PlacementGroup]] = set()
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._strays_until_s = float("-inf")

    def pending(self) -> list[int]:
        """Return the reservations that are requested but not placed."""
        return sorted(
            number for number, reservation in self._reservations.items() if reservation.node is None
        )

    def pending_groups(self) -> dict[str, int]:
        """Return the reservations that Ray has not placed, by the ids of their groups."""
        return {
            reservation.group.id.hex(): number
            for number, reservation in self._reservations.items()
            if reservation.node is None and reservation.group is not None
        }

    def granted(self) -> list[tuple[int, str]]:
        """Return (reservation, node) of every placed reservation."""
        return sorted(
            (n, reservation.node)
            for n, reservation in self._reservations.items()
            if reservation.node is not None
        )

    def gpu_ids(self, reservation: int) -> tuple[int, ...]:
        """Return the GPUs that ``reservation`` holds on its node; empty without GPUs."""
        entry = self._reservations.get(reservation)
        return entry.gpu_ids if entry is not None else ()

    async def request(self, reservation: int, avoid: Sequence[str], alternative: int = 0) -> None:
        """Request ``reservation`` on any node but those in ``avoid``; repeats do nothing."""
        if reservation in self._reservations:
            return
        entry = self._reservations[reservation] = _Reservation(tuple(avoid), alternative)
        self._asked.set()
        await self._ask(reservation, entry)

    async def _ask(self, reservation: int, entry: _Reservation) -> None:
        creation = asyncio.ensure_future(
            in_thread(RAY, self._create, reservation, entry.avoid, entry.alternative)
        )
        self._creations.add(creation)
        group = await asyncio.shield(creation)
        self._creations.discard(creation)
        if reservation in self._reservations:
            entry.group = group
        else:  # It was released while it was being created.
            await self._give_back([reservation])

    async def release(self, reservation: int) -> None:
        """Release ``reservation``. Workers live on: Ray kills only processes *inside* the group."""
        entry = self._reservations.pop(reservation, None)
        if entry is not None and entry.group is not None:
            await self._give_back([reservation])

    async def release_all(self) -> None:
        """Release every reservation, also those that are still being requested."""
        self._reservations.clear()
        for creation in tuple(self._creations):
            await creation
        # Include those that a dead controller requested so late that this one has not seen them.
        await self._give_back(await in_thread(RAY, self._rows))

    async def poll_forever(self) -> None:
        """Report grants, and release stray reservations, until cancelled."""
        look_s = float("-inf")
        while True:
            self._asked.clear()
            if not self.pending() and time.monotonic() >= self._strays_until_s:
                await self._asked.wait()
            rows = await in_thread(RAY, self._rows)
            for number, node in sorted(_placed(rows)):
                entry = self._reservations.get(number)
                is_new = entry is not None and entry.node is None and entry.group is not None
                if is_new and number not in self._grants:
                    # A reservation that does not report its GPUs must not delay the others.
                    self._grants[number] = asyncio.ensure_future(self._grant(number, node))
            for number in [number for number, grant in self._grants.items() if grant.done()]:
                self._grants.pop(number).result()
            if time.monotonic() >= look_s:
                await self._ask_again(rows)
                look_s = time.monotonic() + ROOM_LOOK_S
            strays = rows.keys() - self._reservations.keys()
            if strays and time.monotonic() < self._strays_until_s:
                # A controller notes a reservation before it exists.
                await self._remove_idle(strays)
            await asyncio.sleep(POLL_S)

    async def _ask_again(self, rows: Mapping[int, dict[str, Any]]) -> None:
        """Request again what Ray does not place although it has room.

        Ray 2.60 tries waiting groups by a timer on the time of day. If the clock of its head is set
        back by an hour, it tries none of them for an hour, but it tries a new group at once.
        """
        free = await in_thread(RAY, available_resources_per_node)
        for number, row in rows.items():
            entry = self._reservations.get(number)
            if entry is None or entry.group is None or entry.node is not None:
                continue
            waits = row["state"] != "CREATED" and not _is_being_placed(row)
            entry.num_looks = entry.num_looks + 1 if waits and self._has_room(entry, free) else 0
            # Ask less and less often: the room may be on nodes with the wrong labels.
            if entry.num_looks > 1 and entry.num_looks.bit_count() == 1:
                log.warning("Ray has room for reservation %d: it is requested again", number)
                entry.group = None
                await self._give_back([number])
                await self._ask(number, entry)
                # Ray may now place another one: ``rows`` is out of date.
                return

    def _has_room(self, entry: _Reservation, free: Mapping[str, Mapping[str, float]]) -> bool:
        needs = self._alternatives[entry.alternative].resources
        return any(
            all(there.get(name, 0.0) >= amount for name, amount in needs.items())
            for node, there in free.items()
            if node not in entry.avoid
        )

    async def _grant(self, number: int, node: str) -> None:
        entry = self._reservations.get(number)
        if entry is None:
            return  # It was released in the same iteration of the loop.
        assert entry.group is not None
        gpu_ids = await self._held_gpus(entry.group)
        if gpu_ids is None or self._reservations.get(number) is not entry:
            return
        if gpu_ids and dict(_placed(await in_thread(RAY, self._rows))).get(number) != node:
            return  # It lost that node meanwhile.
        entry.gpu_ids, entry.node = gpu_ids, node
        at_s = self._inbox.at_s()
        self._inbox.post(ev.ReservationGranted(at_s=at_s, reservation=number, node=node))

    async def adopt(self, asked: Mapping[int, tuple[tuple[str, ...], int]]) -> None:
        """After a restart of the controller, find the run's groups again by their names.

        ``asked`` has the nodes to avoid and the alternative of each request.
        """
        self._strays_until_s = time.monotonic() + STRAYS_S
        rows = await in_thread(RAY, self._rows)
        await asyncio.gather(
            *(self._adopt(number, row, *asked.get(number, ())) for number, row in rows.items())
        )

    async def _adopt(
        self, number: int, row: dict[str, Any], avoid: tuple[str, ...] = (), alternative: int = 0
    ) -> None:
        group = await in_thread(RAY, get_placement_group, row["name"])
        node = _node_of(row)
        gpu_ids = await self._held_gpus(group) if node else ()
        # A reservation that does not report its GPUs counts as lost: the run requests it again.
        is_there = node is not None and gpu_ids is not None
        self._reservations[number] = _Reservation(
            avoid, alternative, group, node if is_there else None, gpu_ids or ()
        )

    async def _held_gpus(self, group: PlacementGroup) -> tuple[int, ...] | None:
        """Ask a process in the group for its GPUs, which stay the same while the group is placed.

        Return None without an answer: the group was released in the meantime, or its node is lost.
        """
        # The number is the same for every alternative.
        num_gpus = self._alternatives[0].resources.get("GPU", 0)
        if not num_gpus:
            return ()
        inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        probe = _visible_gpus.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=inside)
        asked = probe.remote()
        try:
            return tuple(await asyncio.wait_for(asked, GPU_S_MAX))
        except (RayError, TimeoutError) as error:
            log.warning("Ray does not report which GPUs a reservation has: %s", error)
            with contextlib.suppress(RayError, ValueError):
                ray.cancel(asked)
            return None

    def _create(self, reservation: int, avoid: tuple[str, ...], alternative: int) -> PlacementGroup:
        asked = self._alternatives[alternative]
        elsewhere = {"ray.io/node-id": f"!in({','.join(avoid)})"} if avoid else {}
        selector = {**asked.selector(), **elsewhere}
        held = {number: each.node for number, each in tuple(self._reservations.items())}
        node = self._packing.node_for(asked.resources, avoid, held)
        group: PlacementGroup = placement_group(
            [asked.resources],
            # Ray accepts the hint for no other strategy; with one bundle all strategies are equal.
            strategy="STRICT_PACK" if node else "PACK",
            _soft_target_node_id=node,
            name=self._names.reservation(reservation),
            lifetime="detached",
            bundle_label_selector=[selector] if selector else None,
        )
        return group

    async def _give_back(self, numbers: Iterable[int]) -> None:
        """Remove the groups of ``numbers``, each one when Ray is not placing it."""
        left = set(numbers)
        until_s = time.monotonic() + BUSY_S_MAX
        while left:
            left = await self._remove_idle(left, busy_too=time.monotonic() >= until_s)
            if left:
                await asyncio.sleep(BUSY_POLL_S)

    async def _remove_idle(self, numbers: Iterable[int], *, busy_too: bool = False) -> set[int]:
        """Remove the groups that Ray is not placing now; return the others.

        If a group is removed while Ray sets resources aside for it, Ray 2.60 loses that processor
        or GPU until the node restarts (ray-project/ray, issue 64693).
        """
        rows = await in_thread(RAY, self._rows)
        left = rows.keys() & numbers
        idle = [number for number in left if busy_too or not _is_being_placed(rows[number])]
        # First the groups that wait for room: otherwise Ray would start to place one of them in
        # the room that another leaves.
        idle.sort(key=lambda number: rows[number]["state"] == "CREATED")
        await in_thread(RAY, self._remove, idle)
        return left.difference(idle)

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(ValueError):  # It is gone by now.
                remove_placement_group(get_placement_group(self._names.reservation(number)))

    def _rows(self) -> dict[int, dict[str, Any]]:
        """Return Ray's state of the run's groups, by reservation."""
        prefix = self._names.reservation_prefix
        return {
            int(row["name"].removeprefix(prefix)): row
            for row in placement_group_table().values()
            if row["name"].startswith(prefix) and row["state"] != "REMOVED"
        }


@ray.remote(max_retries=3)
def _visible_gpus() -> list[int]:
    return [int(number) for number in ray.get_gpu_ids()]


def _placed(rows: Mapping[int, dict[str, Any]]) -> Iterator[tuple[int, str]]:
    for number, row in rows.items():
        node = _node_of(row)
        if node is not None:
            yield number, node


def _is_being_placed(row: dict[str, Any]) -> bool:
    return row["state"] != "CREATED" and row["stats"]["scheduling_state"] not in WAITING


def _node_of(row: dict[str, Any]) -> str | None:
    """Return the node that holds the only bundle of a placed group, None while it is pending."""
    if row["state"] != "CREATED":
        return None
    return next(iter(row["bundles_to_node_id"].values()), None) or None
