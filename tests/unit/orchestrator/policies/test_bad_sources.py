from dataclasses import replace

from orchestrator.policies.bad_sources import described, good, in_storage, on_node, still_bad
from tests.support.made import held_of
from workers.protocol import Inventory, PartRef, stored_source


def _part(arena: str, *, buffer: int, sequence: int, step: int = 5) -> PartRef:
    held = held_of(step, world_size=1, data_bytes=1, buffer=buffer, sequence=sequence)
    return PartRef(node="a", arena=arena, held=held)


def _inventory(node: str, *parts: PartRef) -> Inventory:
    return Inventory(node=node, parts=tuple(replace(part, node=node) for part in parts))


def test_only_the_very_buffer_is_left_out() -> None:
    """Its copy is another source, and so is what was written into the buffer since."""
    bad = _part("w.1", buffer=0, sequence=4)
    others = (_part("w.1", buffer=1, sequence=4), _part("w.1", buffer=0, sequence=6))
    copy = _part("a/w.1", buffer=0, sequence=4)
    inventories = [_inventory("a", bad, *others), _inventory("b", copy)]

    left = good(inventories, [bad.source])

    assert [one.parts for one in left] == [others, (replace(copy, node="b"),)]


def test_a_bad_parity_is_left_out_too() -> None:
    """It is no rank's part, and what is computed from it would be as bad."""
    bad, other = (_part("parity/0.1", buffer=number, sequence=2) for number in (0, 1))
    inventory = replace(_inventory("a", other), parities=(bad, other))

    (left,) = good([inventory], [bad.source])

    assert (left.parts, left.parities) == ((other,), (other,))


def test_a_version_in_storage_says_nothing_of_the_same_step_in_memory() -> None:
    """The other tier is the next source."""
    part = _part("w.1", buffer=0, sequence=4)
    bad = [stored_source(5, 1)]

    assert good([_inventory("a", part)], bad) == [_inventory("a", part)]
    assert in_storage(bad, [(1, 0)]) == {5}
    assert in_storage([part.source], [(1, 0)]) == frozenset()


def test_a_later_version_of_the_same_step_is_not_bad() -> None:
    """A later attempt that resumed from an older step has written the step again."""
    assert in_storage([stored_source(5, 1)], [(1, 0), (2, 4)]) == frozenset()


def test_what_counts_no_more_need_not_be_left_out() -> None:
    """The list is journaled with every read; it must not grow with the run."""
    bad = [stored_source(5, 1), stored_source(9, 2)]

    assert still_bad(bad, ((1, 0), (2, 5), (3, 9))) == tuple(bad)
    assert still_bad(bad, ((1, 0), (2, 5), (3, 4))) == ()
    assert still_bad(bad, ((1, 0), (2, 5), (3, 8))) == (stored_source(5, 1),)


def test_a_keeper_learns_of_its_own_buffers_and_users_of_all() -> None:
    """A keeper with another's source would look for an arena that it has not."""
    part = _part("w.1", buffer=2, sequence=8)
    bad = [replace(part, node="aa").source, stored_source(5, 1)]

    assert on_node(bad, "aa") == (("w.1", 2, 8),)
    assert on_node(bad, "bb") == ()
    ends = " could not be loaded and is no longer used"
    assert described(bad) == [
        f"step 5 of attempt 1 in the memory of node aa (w.1){ends}",
        f"step 5 of attempt 1 in storage{ends}",
    ]
