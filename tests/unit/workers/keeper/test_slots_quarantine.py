"""What could not be loaded is offered to nobody any more, and only that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.snapshots import body_bytes, snapshot
from workers.keeper.slots import Shelf
from workers.protocol import Held

NAME = "w0001.1"


@pytest.fixture
def dead() -> set[str]:
    return set()


@pytest.fixture
def shelf(dead: set[str]) -> Iterator[Shelf]:
    made = Shelf(budget_bytes=64 << 20, dead=lambda: dead)
    yield made
    for name in made.arenas():
        made.drop(name)


def _held(shelf: Shelf) -> list[Held]:
    return [held for versions in shelf.versions().values() for held in versions]


def test_a_quarantined_version_is_held_no_longer(shelf: Shelf) -> None:
    """The others in the same arena are; and whoever waits for news learns of it."""
    arena = shelf.reserve(NAME, body_bytes=body_bytes(1))
    good, bad = snapshot(arena, 1), snapshot(arena, 2)
    news = shelf.wait_news(-1, 0.0)
    shelf.quarantine([(NAME, bad.slot, bad.sequence)])

    assert _held(shelf) == [good]
    assert shelf.wait_news(news, 0.0) > news


def test_what_was_written_there_since_is_not_meant(shelf: Shelf) -> None:
    """The order may come late, and comes again with every order."""
    arena = shelf.reserve(NAME, body_bytes=body_bytes(1))
    bad = snapshot(arena, 1)
    orders = [(NAME, bad.slot, bad.sequence), ("w0009.1", 0, 2)]
    shelf.quarantine(orders)
    for step in (2, 3, 4):
        written = snapshot(arena, step)
        if written.slot == bad.slot:
            break
    held = _held(shelf)
    assert written in held
    shelf.quarantine(orders)

    assert _held(shelf) == held


def test_a_later_quarantine_of_a_slot_is_not_lifted_by_an_older_one(shelf: Shelf) -> None:
    """A slot remembers one version; orders name all that were ever bad."""
    arena = shelf.reserve(NAME, body_bytes=body_bytes(1))
    first = snapshot(arena, 1)
    shelf.quarantine([(NAME, first.slot, first.sequence)])
    second = snapshot(arena, 2)
    assert second.slot == first.slot
    shelf.quarantine([(NAME, second.slot, second.sequence)])
    shelf.quarantine([(NAME, first.slot, first.sequence)])

    assert _held(shelf) == []


def test_it_is_found_under_the_name_that_it_had(shelf: Shelf, dead: set[str]) -> None:
    """A worker that takes a dead one's place goes on in its memory, under its own name."""
    bad = snapshot(shelf.reserve(NAME, body_bytes=body_bytes(1)), 1)
    dead.add("w0001")
    shelf.reserve("w0002.1", body_bytes=body_bytes(1))
    assert _held(shelf) == [bad]
    shelf.quarantine([(NAME, bad.slot, bad.sequence)])

    assert _held(shelf) == []
