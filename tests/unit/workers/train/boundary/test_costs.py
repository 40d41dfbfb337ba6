import pytest

from workers.protocol import Pace
from workers.train.boundary.costs import SaveMeter


def test_the_time_of_a_step_leaves_out_the_saves_that_it_began_with() -> None:
    """A step is timed from update to update, so what was saved behind one counts to the next."""
    meter = SaveMeter()
    for _ in range(3):
        meter.step(step_s=1.25, boundary_s=0.25)

    assert meter.costs((1, 10)).step_s == 1.0
    assert meter.costs((1, 10)).pace == Pace(snapshot_steps=1, checkpoint_steps=10)


def test_one_save_that_took_long_changes_nothing() -> None:
    """A machine that was busy with something else would space out snapshots for good."""
    meter = SaveMeter()
    for stall_s in (0.1, 0.1, 9.0, 0.1):
        meter.snapshot(0.0, stall_s, is_pinned=False)

    assert meter.costs((1, 10)).snapshot_stall_s == 0.1
    assert meter.costs((1, 10)).checkpoint_stall_s == 0.0


def test_a_save_is_busy_until_it_is_seen_to_be_through() -> None:
    """It ends elsewhere, and each tier in its own time."""
    meter = SaveMeter()
    meter.snapshot(10.0, 0.1, is_pinned=True)
    for at_s, snapshot, checkpoint in (
        (11.0, True, True),
        (12.0, False, True),
        (15.0, False, False),
    ):
        meter.look(at_s, is_snapshot_busy=snapshot, is_checkpoint_busy=checkpoint)
    costs = meter.costs((1, 10))

    assert (costs.snapshot_busy_s, costs.checkpoint_busy_s) == (2.0, 5.0)
    assert costs.checkpoint_stall_s == 0.0, "keepers store it"


@pytest.mark.parametrize("stall_s", [0.0, 3.0])
def test_what_ranks_store_themselves_stalls_them(stall_s: float) -> None:
    """Without memory there is no keeper to do it."""
    meter = SaveMeter()
    meter.checkpoint(1.0, stall_s)

    assert meter.costs((0, 10)).checkpoint_stall_s == stall_s
