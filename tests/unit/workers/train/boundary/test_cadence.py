from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.train.boundary.cadence import NO_STEP, SKIPPED_MAX, Cadence, Due
from workers.train.executor import Signals


def cadence(*, snapshot_every: int = 1, storage_every: int = 3, last_step: int = 100) -> Cadence:
    return Cadence(snapshot_every=snapshot_every, storage_every=storage_every, last_step=last_step)


def test_sums_over_ranks_say_what_any_of_them_said() -> None:
    """They travel as numbers in the all-reduce of the loss."""
    said = [Signals(leaves=True), Signals(behind=True, storage_busy=True), Signals(behind=True)]
    sums = [sum(numbers) for numbers in zip(*(one.numbers() for one in said), strict=True)]

    assert Signals.from_sums(sums) == Signals(leaves=True, behind=True, storage_busy=True)


def test_intervals_that_one_rank_says_are_taken_over_by_all() -> None:
    """They come as numbers, not as yes or no; the other ranks say none."""
    said = [Signals(behind=True), Signals(snapshot_steps=4, storage_steps=200), Signals()]
    sums = [sum(numbers) for numbers in zip(*(one.numbers() for one in said), strict=True)]
    agreed = Signals.from_sums(sums)
    plan = cadence()

    assert agreed == Signals(behind=True, snapshot_steps=4, storage_steps=200)
    assert plan.due(4, agreed) == Due(skipped=True)
    assert plan.intervals == (4, 200)
    assert [step for step in range(5, 13) if plan.due(step, Signals()).snapshot] == [8, 12]


def test_what_is_due_for_storage_stays_due_until_it_can_be_done() -> None:
    """A store that is slower than its cadence gets every state it can take, and no step waits."""
    plan = cadence()
    busy = {3: Signals(storage_busy=True), 4: Signals(behind=True), 5: Signals()}

    pinned = [step for step in range(1, 10) if plan.due(step, busy.get(step, Signals())).pin]

    assert pinned == [5, 6, 9]


def test_a_rank_that_is_behind_makes_all_skip() -> None:
    """One that skipped alone would leave the others with a version that cannot be loaded."""
    assert cadence().due(1, Signals(behind=True)) == Due(skipped=True)
    assert cadence().due(1, Signals()) == Due(snapshot=True)


def test_steps_between_two_snapshots_are_left_out() -> None:
    """Unless storage wants one of them."""
    plan = cadence(snapshot_every=4, storage_every=6)

    taken = [step for step in range(1, 13) if plan.due(step, Signals()).snapshot]

    assert taken == [4, 6, 8, 12]


@pytest.mark.parametrize("durably", [False, True])
def test_a_leaving_worker_takes_its_state_along_though_a_rank_is_behind(
    durably: bool,  # noqa: FBT001
) -> None:
    """Planned changes lose no step; whether memory is enough depends on who goes."""
    agreed = Signals(leaves=True, leaves_durably=durably, behind=True)

    due = cadence().due(1, agreed)

    assert due == Due(snapshot=True, barrier=True, storage=durably)


def test_the_last_step_is_written_by_the_ranks_themselves() -> None:
    """The run ends with it; keepers may end with the run."""
    assert cadence(last_step=3).due(3, Signals()) == Due(snapshot=True, storage=True)


def test_a_best_step_is_written_by_the_ranks_themselves() -> None:
    """They wait for it. That it was due for the keeper's storage, too, is done with that."""
    states = cadence()
    busy = Signals(storage_busy=True)
    assert states.due(3, busy) == Due(snapshot=True)
    assert states.due(4, busy, is_best=True) == Due(snapshot=True, storage=True, kept_step=3)
    assert states.due(5, Signals()) == Due(snapshot=True, kept_step=4)


def test_without_memory_the_ranks_store_as_often_as_they_are_told() -> None:
    """A version is worth nothing unless every rank's part is in memory."""
    plan = cadence()
    agreed = Signals(no_memory=True, behind=True)

    dues = {step: plan.due(step, agreed) for step in range(1, 7)}

    assert {step for step, due in dues.items() if due.storage} == {3, 6}
    assert not any(due.snapshot or due.skipped for due in dues.values())
    assert plan.due(7, Signals(no_memory=True, leaves=True)) == Due(storage=True)


def test_ranks_wait_once_after_the_first_step_that_is_due_for_a_snapshot() -> None:
    """Waiting costs time; and who waits alone waits in vain, so nothing else may decide it."""
    plan = cadence(snapshot_every=4)

    waited = [step for step in range(1, 13) if plan.waits(step, Signals(no_memory=True))]

    assert waited == [4]


@pytest.mark.parametrize("agreed", [Signals(leaves=True), Signals(leaves=True, no_memory=True)])
def test_a_leaving_worker_does_not_wait_for_memory(agreed: Signals) -> None:
    """A machine is about to go; without memory its state goes to storage."""
    plan = cadence()

    assert not plan.waits(1, agreed)
    assert plan.waits(2, Signals())


def test_the_last_step_does_not_wait_for_memory() -> None:
    """It is written to storage in any case."""
    assert not cadence(last_step=1).waits(1, Signals())


@settings(max_examples=30, deadline=None)
@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 400)), min_size=1, max_size=8),
    snapshot_every=st.integers(1, 5),
)
def test_whatever_peers_say_only_so_many_snapshots_in_a_row_are_skipped(
    runs: list[tuple[bool, int]], snapshot_every: int
) -> None:
    """A peer that hangs on would silently leave the run with a state from long ago."""
    plan = cadence(snapshot_every=snapshot_every, storage_every=7, last_step=10**9)
    behind = [is_behind for is_behind, number in runs for _ in range(number)]
    skipped = 0
    for step, is_behind in enumerate(behind, 1):
        due = plan.due(step, Signals(behind=is_behind))
        assert not (due.skipped and due.snapshot)
        assert due.snapshot or not due.pin
        assert due.barrier == (due.snapshot and is_behind), "three buffers: all have the one before"
        skipped = 0 if due.snapshot else skipped + due.skipped
        assert skipped <= SKIPPED_MAX


def test_a_peer_that_is_slower_still_is_given_twice_the_time() -> None:
    """One that needs 20 steps for a copy would otherwise be overtaken for ever."""
    plan = cadence(storage_every=10**9, last_step=10**9)
    slow = [step for step in range(1, 1400) if plan.due(step, Signals(behind=True)).snapshot]
    assert slow[:6] == [9, 26, 59, 124, 253, 510]
    assert slow[-1] - slow[-2] == SKIPPED_MAX + 1

    assert plan.due(1400, Signals()).snapshot
    for step in range(1401, 1410):
        assert plan.due(step, Signals()).snapshot
    again = [step for step in range(1410, 1430) if plan.due(step, Signals(behind=True)).snapshot]
    assert again == [1418], "peers that keep up are believed again"


def test_what_all_have_is_kept_while_peers_are_overtaken() -> None:
    """With the node of a rank gone, it is the only version in memory that is whole."""
    plan = cadence(storage_every=10**9)
    said = Signals(behind=True)
    assert plan.due(1, Signals()).kept_step == NO_STEP, "nothing was taken yet"
    assert plan.due(2, Signals()).kept_step == 1
    kept = [due.kept_step for step in range(3, 62) if (due := plan.due(step, said)).snapshot]
    assert kept == [1, 1, 1]

    assert plan.due(62, replace(said, behind=False)).kept_step == 61
    plan.due(63, Signals(no_memory=True))
    assert plan.due(64, Signals()).kept_step == NO_STEP, "a new memory has none of it"
