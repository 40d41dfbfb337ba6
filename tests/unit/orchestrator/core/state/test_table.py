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
