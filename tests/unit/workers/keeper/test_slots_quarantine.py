"""What could not be loaded is offered to nobody any more, and only that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.snapshots import body_bytes, snapshot
from workers.keeper.slots import NodeSlots
from workers.protocol import Held

NAME = "w0001.1"


@pytest.fixture
def dead() -> set[str]:
    return set()


@pytest.fixture
def slots(dead: set[str]) -> Iterator[NodeSlots]:
    made = NodeSlots(budget_bytes=64 << 20, dead=lambda: dead)
    yield made
    for name in made.arenas():
        made.drop(name)


def _held(slots: NodeSlots) -> list[Held]:
    return [held for versions in slots.versions().values() for held in versions]


def test_a_quarantined_version_is_held_no_longer(slots: NodeSlots) -> None:
    """The others in the same arena are; and whoever waits for news learns of it."""
    arena = slots.reserve(NAME, body_bytes=body_bytes(1))
    good, bad = snapshot(arena, 1), snapshot(arena, 2)
    news = slots.wait_news(-1, 0.0)
    slots.quarantine([(NAME, bad.slot, bad.sequence)])

    assert _held(slots) == [good]
    assert slots.wait_news(news, 0.0) > news


def test_what_was_written_there_since_is_not_meant(slots: NodeSlots) -> None:
    """The order may come late, and comes again with every order."""
    arena = slots.reserve(NAME, body_bytes=body_bytes(1))
    bad = snapshot(arena, 1)
    orders = [(NAME, bad.slot, bad.sequence), ("w0009.1", 0, 2)]
    slots.quarantine(orders)
    for step in (2, 3, 4):
        written = snapshot(arena, step)
        if written.slot == bad.slot:
            break
    held = _held(slots)
    assert written in held
    slots.quarantine(orders)

    assert _held(slots) == held


def test_a_later_quarantine_of_a_slot_is_not_lifted_by_an_older_one(slots: NodeSlots) -> None:
    """A slot remembers one version; orders name all that were ever bad."""
    arena = slots.reserve(NAME, body_bytes=body_bytes(1))
    first = snapshot(arena, 1)
    slots.quarantine([(NAME, first.slot, first.sequence)])
    second = snapshot(arena, 2)
    assert second.slot == first.slot
    slots.quarantine([(NAME, second.slot, second.sequence)])
    slots.quarantine([(NAME, first.slot, first.sequence)])

    assert _held(slots) == []


def test_it_is_found_under_the_name_that_it_had(slots: NodeSlots, dead: set[str]) -> None:
    """A worker that takes a dead one's place goes on in its memory, under its own name."""
    bad = snapshot(slots.reserve(NAME, body_bytes=body_bytes(1)), 1)
    dead.add("w0001")
    slots.reserve("w0002.1", body_bytes=body_bytes(1))
    assert _held(slots) == [bad]
    slots.quarantine([(NAME, bad.slot, bad.sequence)])

    assert _held(slots) == []
