"""Versions that could not be loaded, and only those, are never offered again."""

from collections.abc import Iterator

import pytest

from tests.support.snapshots import body_bytes, snapshot
from workers.keeper.arena_table import ArenaTable
from workers.protocol import Held

NAME = "w0001.1"


@pytest.fixture
def dead() -> set[str]:
    return set()


@pytest.fixture
def table(dead: set[str]) -> Iterator[ArenaTable]:
    made = ArenaTable(budget_bytes=64 << 20, dead=lambda: dead)
    yield made
    for name in made.arenas():
        made.drop(name)


def _held(table: ArenaTable) -> list[Held]:
    return [held for versions in table.versions().values() for held in versions]


def test_a_quarantined_version_is_held_no_longer(table: ArenaTable) -> None:
    """The others in the same arena are; and whoever waits for news learns of it."""
    arena = table.reserve(NAME, body_bytes=body_bytes(1))
    good, bad = snapshot(arena, 1), snapshot(arena, 2)
    news = table.wait_news(-1, 0.0)
    table.quarantine([(NAME, bad.buffer, bad.sequence)])

    assert _held(table) == [good]
    assert table.wait_news(news, 0.0) > news


def test_what_was_written_there_since_is_not_meant(table: ArenaTable) -> None:
    """The order may come late, and comes again with every order."""
    arena = table.reserve(NAME, body_bytes=body_bytes(1))
    bad = snapshot(arena, 1)
    orders = [(NAME, bad.buffer, bad.sequence), ("w0009.1", 0, 2)]
    table.quarantine(orders)
    for step in (2, 3, 4):
        written = snapshot(arena, step)
        if written.buffer == bad.buffer:
            break
    held = _held(table)
    assert written in held
    table.quarantine(orders)

    assert _held(table) == held


def test_a_later_quarantine_of_a_buffer_is_not_lifted_by_an_older_one(table: ArenaTable) -> None:
    """A buffer remembers one version; orders name all that were ever bad."""
    arena = table.reserve(NAME, body_bytes=body_bytes(1))
    first = snapshot(arena, 1)
    table.quarantine([(NAME, first.buffer, first.sequence)])
    second = snapshot(arena, 2)
    assert second.buffer == first.buffer
    table.quarantine([(NAME, second.buffer, second.sequence)])
    table.quarantine([(NAME, first.buffer, first.sequence)])

    assert _held(table) == []


def test_it_is_found_under_the_name_that_it_had(table: ArenaTable, dead: set[str]) -> None:
    """A worker that takes a dead one's place goes on in its memory, under its own name."""
    bad = snapshot(table.reserve(NAME, body_bytes=body_bytes(1)), 1)
    dead.add("w0001")
    table.reserve("w0002.1", body_bytes=body_bytes(1))
    assert _held(table) == [bad]
    table.quarantine([(NAME, bad.buffer, bad.sequence)])

    assert _held(table) == []
