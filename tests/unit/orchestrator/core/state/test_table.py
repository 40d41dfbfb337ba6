from random import Random

import pytest

from orchestrator.core.state.table import Table


def test_a_changed_table_leaves_the_old_one_alone() -> None:
    """Old states are kept by whoever compares them; sharing chunks must not show."""
    old: Table[str] = Table()
    for key in range(200):
        old = old.set(key, f"{key}")
    new = old.set(70, "changed").without(3)

    assert old[70] == "70"
    assert 3 in old
    assert len(old) == 200
    assert new[70] == "changed"
    assert 3 not in new
    assert len(new) == 199


def test_a_table_behaves_like_a_dict() -> None:
    """Lookups of what is not there, beyond the last chunk and within one."""
    table: Table[int] = Table()
    table = table.set(500, 1).set(2, 2)

    assert table.get(499) is None
    assert table.get(100_000) is None
    assert 100_000 not in table
    assert list(table) == [2, 500]
    assert list(table.items()) == [(2, 2), (500, 1)]
    assert sorted(table.values()) == [1, 2]
    with pytest.raises(KeyError):
        table.without(3)


def test_tables_are_equal_by_content() -> None:
    """The journal's fold is compared with the live state."""
    one: Table[int] = Table()
    assert one.set(1, 1).set(2, 2) == one.set(2, 2).set(1, 1)
    assert one.set(1, 1) != one.set(1, 2)
    assert one.set(1, 1).set(900, 2).without(900) == one.set(1, 1)
    assert one.set(1, 1) != one.set(1, 1).set(900, 2)


def test_a_table_of_items_is_the_one_that_they_came_from() -> None:
    """A restarted controller goes by the order in which the one before it had added them."""
    table: Table[int] = Table()
    table = table.set(5, 1).set(500, 2).set(2, 3).set(5, 4).set(70, 5).without(70)
    again = Table.of(table.items())

    assert again == table
    assert list(again.items()) == list(table.items()) == [(5, 4), (2, 3), (500, 2)]
    assert len(again) == 3
    assert list(again.set(1, 1)) == list(table.set(1, 1))


def test_many_keys_in_any_order_are_set_as_one_after_the_other() -> None:
    """Members come node by node, so keys leave a chunk and come back to it."""
    keys = [3, 700, 4, 65, 66, 5, 701, 64]
    one_by_one: Table[int] = Table()
    for key in keys:
        one_by_one = one_by_one.set(key, -key)
    known = Table[int]().set(4, 0).set(64, 0)

    for table in (
        Table.of((key, -key) for key in keys),
        Table[int]().update({k: -k for k in keys}),
    ):
        assert list(table.items()) == list(one_by_one.items())
        assert table.to_dict() == {key: -key for key in keys}
    assert known.update({key: -key for key in keys}) == one_by_one
    assert known.to_dict() == {4: 0, 64: 0}


def test_what_was_looked_for_is_found_again_after_any_change() -> None:
    """A chunk remembers the answer, so what changed there could be missed, or told twice."""
    table: Table[int] = Table()
    rng = Random(0)
    for _ in range(2000):
        key, before = rng.randrange(300), table
        known = before.where(_is_odd)
        if key in table and rng.random() < 0.3:
            table = table.without(key)
        elif rng.random() < 0.1:
            table = table.update({each: rng.randrange(9) for each in range(key, key + 90)})
        else:
            table = table.set(key, rng.randrange(9))

        assert table.where(_is_odd) == [each for each in table.items() if each[1] % 2]
        assert before.where(_is_odd) == known


def test_many_values_at_once_are_as_one_after_the_other() -> None:
    """The old version is a value, too: it must not see them."""
    table = Table.of((key, 0) for key in range(100))
    changed = {key: key for key in range(50, 300, 7)}
    one_by_one = table
    for key, value in changed.items():
        one_by_one = one_by_one.set(key, value)

    assert list(table.update(changed).items()) == list(one_by_one.items())
    assert set(table.values()) == {0}
    assert table.update({}) is table


def _is_odd(value: int) -> bool:
    return bool(value % 2)


def test_what_has_not_changed_is_not_looked_at_again() -> None:
    """A controller of 10,000 nodes looks for those with a bound at nearly every tick."""
    asked: list[int] = []

    def is_negative(value: int) -> bool:
        asked.append(value)
        return value < 0

    table = Table.of((key, key) for key in range(10_000))
    assert table.where(is_negative) == []
    asked.clear()
    changed = table.set(5000, -1)

    assert changed.where(is_negative) == [(5000, -1)]
    assert changed.where(is_negative) == [(5000, -1)]
    assert len(asked) <= 64


def test_values_are_counted_by_kind_after_any_change() -> None:
    """A chunk remembers its counts, so what changed there could be missed."""
    table = Table.of((key, key % 3) for key in range(200))
    assert table.counted(_is_odd) == {False: 133, True: 67}
    changed = table.set(1, 0).without(0, 150)

    assert changed.counted(_is_odd) == {False: 132, True: 66}
    assert table.counted(_is_odd) == {False: 133, True: 67}
