"""The controller's questions to keepers; these are stood in for at Ray's handles."""

import asyncio
import itertools
import threading
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from orchestrator.core.actions import OrderKeepers
from orchestrator.policies import (
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
)
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.memory import Orders
from orchestrator.shell.memory import snapshots as module
from orchestrator.shell.memory.snapshots import Snapshots
from tests.support.keeper_handles import (
    LINEAGE,
    ROOT,
    Handle,
    Handles,
    version_of,
    with_keepers,
)
from tests.support.made import held_of, save_part
from ucp_core.errors import StorageError
from ucp_core.native import MANIFEST_NAME, checkpoint_name
from ucp_core.storage import MemoryStore, Store
from workers.protocol import (
    Covered,
    Inventory,
    Member,
    NodeReport,
    PartRef,
    Source,
    stored_source,
)
from workers.settings import SnapshotSettings


class Stalling(MemoryStore):
    """A store that answers nothing before ``released``."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def list(self, path: str) -> tuple[str, ...]:
        self.released.wait(30)
        return super().list(path)


class Refusing(MemoryStore):
    def list(self, path: str) -> tuple[str, ...]:
        raise StorageError("the password has expired", path=path)


def _commit(store: Store, step: int) -> None:
    directory = f"{ROOT}/{checkpoint_name(step)}"
    save_part(store, directory, [], step=step)


def _order(
    *nodes: str,
    attempt: int = 1,
    bad: tuple[Source, ...] = (),
    mechanism: Literal["auto", "copy", "parity"] = "auto",
) -> OrderKeepers:
    facts = RedundancyFacts(nodes=nodes, budgets_bytes={}, rank_bytes=11)
    plan = plan_redundancy(facts, SnapshotSettings(tolerance=1, mechanism=mechanism))
    return OrderKeepers(attempt=attempt, lineage=LINEAGE, nodes=nodes, plan=plan, bad=bad)


async def _read(made: Snapshots, _: Handles) -> Any:
    return version_of(await made.read(LINEAGE, enough_step=-1))


def test_the_newer_of_memory_and_storage_is_found() -> None:
    """Either may be ahead: memory usually is, storage where memory was lost."""
    store = MemoryStore()
    assert with_keepers(store, _read) == (7, "memory")
    _commit(store, 8)
    assert with_keepers(store, _read) == (8, "storage")


def test_a_store_that_stalls_does_not_keep_memory_from_being_used() -> None:
    """Memory holds all that any member completed: whatever storage says, it is not newer."""
    store = Stalling()

    async def act(made: Snapshots, _: Handles) -> Any:
        answer = await asyncio.wait_for(made.read(LINEAGE, enough_step=7), module.STORAGE_S / 2)
        store.released.set()
        return version_of(answer)

    assert with_keepers(store, act) == (7, "memory")


def test_memory_is_no_way_round_a_newer_version_in_a_store_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resume never falls behind what was committed: it waits until storage is back."""
    monkeypatch.setattr(module, "STORAGE_S", 0.01)
    stalling = Stalling()
    for store in (stalling, Refusing()):

        async def read(made: Snapshots, _: Handles, *, stored_step: int) -> Any:
            return await made.read(LINEAGE, enough_step=9, stored_step=stored_step)

        assert version_of(with_keepers(store, partial(read, stored_step=6))) == (7, "memory")
        assert with_keepers(store, partial(read, stored_step=8)) is None
    stalling.released.set()


def test_a_store_that_stalls_holds_two_threads_however_often_it_is_asked() -> None:
    """The machine asks again every ten seconds; polling nodes and groups needs threads too."""
    store = Stalling()

    async def ask(snapshots: Snapshots, handles: Handles) -> None:
        handles.clear()
        snapshots._nodes.views.clear()
        asked = [asyncio.create_task(snapshots.read(LINEAGE, enough_step=-1)) for _ in range(20)]
        # Two are looking, and the newest waits for them.
        for answer in itertools.islice(asyncio.as_completed(asked), len(asked) - 3):
            assert await answer is None
        assert len(snapshots._looks._threads) <= 2
        assert not asked[-1].done()
        store.released.set()
        newest = await asked[-1]
        assert newest is not None
        assert newest.version is None

    with_keepers(store, ask)


def test_a_store_that_refuses_is_passed_over_only_for_memory() -> None:
    """Without it nothing is known, which is not the same as nothing being there."""

    async def without(made: Snapshots, handles: Handles) -> Any:
        handles.nodes.views["aa"].secret = b""
        return await made.read(LINEAGE, enough_step=-1)

    assert with_keepers(Refusing(), _read) == (7, "memory")
    assert with_keepers(Refusing(), without) is None


def test_what_is_damaged_in_storage_is_named_also_if_nothing_is_left() -> None:
    """A silent restart would look as if nothing had ever been trained."""
    store = MemoryStore()
    for step in (5, 6):
        _commit(store, step)

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles.nodes.views["aa"].secret = b""
        told = []
        for step in (6, 5):
            path = f"{ROOT}/{checkpoint_name(step)}/{MANIFEST_NAME}"
            store.write_atomic(path, store.read(path)[:50], fsync=False)
            answer = await made.read(LINEAGE, enough_step=-1)
            assert answer is not None
            told.append((version_of(answer), [line.split(":")[0] for line in answer.skipped]))
            assert answer.lost == (() if step == 6 else (6, 5))
        again = await made.read(LINEAGE, enough_step=-1, bad=[stored_source(6, 1)])
        assert again is not None
        return told, [line.split(":")[0] for line in again.skipped]

    told, but_for_what_is_known = with_keepers(store, act)
    newest, older = checkpoint_name(6), checkpoint_name(5)
    assert told == [((5, "storage"), [newest]), (None, [newest, older])]
    assert but_for_what_is_known == [older]


def test_what_is_bad_is_passed_over_in_either_tier() -> None:
    """The same step of the other tier comes before an older one of the same."""
    in_memory = PartRef(node="aa", arena="w0.0", held=held_of(7, 0)).source
    in_storage = stored_source(7, 1)
    store = MemoryStore()
    _commit(store, 7)

    async def act(made: Snapshots, _: Handles) -> Any:
        answers = [
            version_of(await made.read(LINEAGE, enough_step=-1, bad=bad))
            for bad in ([], [in_memory], [in_storage], [in_memory, in_storage])
        ]
        return answers, await made.find_parts(7, 1, bad=[in_memory])

    answers, parts = with_keepers(store, act)
    assert answers == [(7, "memory"), (7, "storage"), (7, "memory"), (6, "memory")]
    assert parts == ()


def test_a_keeper_learns_which_versions_to_drop() -> None:
    """Neither a rank nor another keeper may be offered it again."""
    bad = (PartRef(node="aa", arena="w0.0", held=held_of(7, 0)).source, stored_source(7, 1))

    async def act(_: Snapshots, handles: Handles) -> Any:
        orders = Orders(handles.nodes, 0)
        orders.give(_order("aa", "bb", attempt=2, bad=bad))
        return [handles[node].orders[-1].bad for node in ("aa", "bb")]

    assert with_keepers(MemoryStore(), act) == [(("w0.0", 0, 2),), ()]


def test_parts_are_told_only_of_the_version_that_is_resumed() -> None:
    """An answer that was overtaken must not send workers to another version's memory."""

    async def act(made: Snapshots, _: Handles) -> Any:
        await made.read(LINEAGE, enough_step=-1)
        found = await made.find_parts(6, 1)
        return made.known_parts(7, 1), made.known_parts(6, 1), found

    known, other, asked = with_keepers(MemoryStore(), act)
    assert [(part.node, part.held.step, part.peer and part.peer.secret) for part in known] == [
        ("aa", 7, b"aa"),
        ("bb", 7, b"bb"),
    ]
    assert other == ()
    assert [part.held.step for part in asked] == [6, 6]


def test_an_order_names_the_neighbour_and_no_keeper_that_is_not_met() -> None:
    """One that is only starting has no address yet; it is announced when it has."""

    async def act(_: Snapshots, handles: Handles) -> Any:
        orders = Orders(handles.nodes, 0)
        orders.give(_order("aa", "bb", "aa"))
        handles.nodes.views["bb"].secret = b""
        orders.give(_order("aa", "bb", attempt=2))
        return {
            node: [[peer.node for peer in order.copies_of] for order in handle.orders]
            for node, handle in handles.items()
        }

    assert with_keepers(MemoryStore(), act) == {"aa": [["bb"], []], "bb": [["aa"], ["aa"]]}


def test_an_order_names_a_few_other_machines_of_the_attempt() -> None:
    """A keeper that reaches none of them is cut off; one without trainers need not know."""

    async def act(_: Snapshots, handles: Handles) -> Any:
        orders = Orders(handles.nodes, 0)
        views = handles.nodes.views
        for number, node in enumerate(("aa", "bb", "cc", "dd", "ee", "ff")):
            handles[node] = Handle(node, (), 0)
            views[node] = NodeView(node, (node, number), keeper=handles[node], secret=b"s")
        orders.give(_order("aa", "bb", "bb", "cc", "dd", "ee"))
        return {node: [host for host, _ in handles[node].orders[-1].others] for node in handles}

    assert with_keepers(MemoryStore(), act) == {
        "aa": ["bb", "cc", "dd"],
        "bb": ["cc", "dd", "ee"],
        "cc": ["dd", "ee", "aa"],
        "dd": ["ee", "aa", "bb"],
        "ee": ["aa", "bb", "cc"],
        "ff": [],
    }


def test_an_order_names_the_group_once_all_of_it_are_met() -> None:
    """A group that waits for a missing one would protect no rank."""

    async def act(_: Snapshots, handles: Handles) -> Any:
        orders = Orders(handles.nodes, 0)
        views = handles.nodes.views
        handles["cc"] = Handle("cc", (), 2)
        views["cc"] = NodeView("cc", ("", 0), keeper=handles["cc"])
        orders.give(_order("aa", "bb", "cc", "cc", mechanism="parity"))
        views["cc"].secret = b"cc"
        orders.repeat()
        return handles["bb"].orders

    early, whole = with_keepers(MemoryStore(), act)
    assert (early.parity, early.copies_of, whole.copies_of) == (None, (), ())
    assert (whole.parity.attempt, whole.parity.tolerance, whole.parity.place) == (1, 1, 1)
    assert [place.ranks for place in whole.parity.places] == [(0,), (1,), (2, 3)]
    assert [place.peer and place.peer.node for place in whole.parity.places] == ["aa", None, "cc"]


def test_racks_that_nodes_share_are_told_as_trouble() -> None:
    """Two machines behind one switch are one loss, which would be noticed too late."""

    async def act(made: Snapshots, _: Handles) -> Any:
        return [made.problems(RedundancyPlan(shared_racks=racks)) for racks in ((), ("r",))]

    apart, (shared,) = with_keepers(MemoryStore(), act)
    assert apart == []
    assert "rack r" in shared


def test_a_node_without_the_label_of_its_rack_is_reported_as_trouble() -> None:
    """A label that is misspelt names no rack of any node, and protects nothing."""

    async def act(made: Snapshots, handles: Handles) -> Any:
        handles.nodes.rack_label = "rack"
        handles.nodes.views["aa"].rack = "r"
        return made.problems(RedundancyPlan())

    (told,) = with_keepers(MemoryStore(), act)
    assert "'rack' of node bb:" in told


def test_memory_and_the_size_of_a_version_are_measured() -> None:
    """The controller decides by them how snapshots are protected."""

    async def act(made: Snapshots, handles: Handles) -> Any:
        before = made.holds_any, made.measured()
        for node, handle in handles.items():
            inventory = replace(await handle.held.remote(), budget_bytes=40)
            made.on_report(NodeReport(node=node, seq=1, workers=(), inventory=inventory))
        handles.nodes.views["bb"].lost.set()
        return before, made.holds_any, made.measured(), made.memory()

    before, holds_any, measured, memory = with_keepers(MemoryStore(), act)
    assert before == (False, ((), 0))
    assert memory == [{"node": "aa", "held_bytes": 22, "budget_bytes": 40}]
    assert (holds_any, measured) == (True, ((("aa", 40),), 22))


def test_only_what_storage_lacks_is_stored_at_the_end() -> None:
    """A stopped run has stored its last step already; a failed one has it in memory alone."""

    async def act(made: Snapshots, handles: Handles) -> Any:
        await made.flush(LINEAGE)
        return [handle.flushed for handle in handles.values()]

    store = MemoryStore()
    assert with_keepers(store, act) == [[(1, 7)], [(1, 7)]]
    _commit(store, 7)
    assert with_keepers(store, act) == [[], []]


def test_a_version_that_must_be_computed_gives_way_at_the_end() -> None:
    """Keepers store what they hold: half of the newest version would be no version."""
    members = tuple(Member(rank=rank, data_bytes=10, record_bytes=1) for rank in (0, 1))
    covered = Covered(tolerance=1, place=0, members=members)
    parity = PartRef(node="aa", arena="parity/0.1", held=held_of(7, -1), covered=covered)

    async def act(made: Snapshots, handles: Handles) -> Any:
        near, far = (handle._inventory for handle in handles.values())
        handles["aa"]._inventory = replace(near, parities=(parity,))
        handles["bb"]._inventory = replace(far, parts=far.parts[:1])
        resumed = await made.read(LINEAGE, enough_step=-1)
        await made.flush(LINEAGE)
        return version_of(resumed), [handle.flushed for handle in handles.values()]

    assert with_keepers(MemoryStore(), act) == ((7, "memory"), [[(1, 6)], [(1, 6)]])


def test_reports_of_a_dead_keeper_protect_no_version() -> None:
    """The alert has to come while its memory is away, and to end when the next one has told."""

    async def act(made: Snapshots, handles: Handles) -> Any:
        survived = []
        for node in ("aa", "bb"):
            parts = tuple(PartRef(node=node, arena="w", held=held_of(7, rank)) for rank in (0, 1))
            inventory = Inventory(node=node, parts=parts)
            made.on_report(NodeReport(node=node, seq=1, workers=(), inventory=inventory))
        for secret in (b"bb", b"", b"new"):
            handles.nodes.views["bb"].secret = secret
            survived.append(made.protection(LINEAGE).node_losses_survived)
        return survived

    assert with_keepers(MemoryStore(), act) == [1, 0, 0]
