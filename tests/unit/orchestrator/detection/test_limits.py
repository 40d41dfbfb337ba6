"""The bounds and the step time that they come from."""

from dataclasses import astuple, replace

import pytest

from orchestrator.detection import Detector, limits_from
from tests.support.histories import calm, watch


@pytest.mark.parametrize("step_s_p99", [0.0, 0.001, 0.2, 3.0, 600.0])
@pytest.mark.parametrize("patience", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("usual", [0.1, 1.0])
def test_bounds_are_ordered_for_every_step_time(
    step_s_p99: float, patience: float, usual: float
) -> None:
    """A bound that passes another would fire first and say the wrong thing."""
    limits = limits_from(step_s_p99, step_s_p50=usual * step_s_p99, patience=patience)
    *bounds, held_s = astuple(limits)

    assert list(bounds) == sorted(set(bounds))
    assert held_s >= limits.hang_s


def test_bounds_out_of_order_are_refused() -> None:
    """The order is asserted where the bounds are made, not hoped for where they are used."""
    with pytest.raises(AssertionError, match=r"hang_s=9\.0 must be shorter than node_silent_s"):
        replace(limits_from(0.2), hang_s=9.0)


def test_hang_bound_is_three_slow_steps_and_at_least_one_second() -> None:
    """Promised to users, so pinned."""
    assert limits_from(0.05).hang_s == 1.0
    assert limits_from(2.0).hang_s == 6.0
    assert limits_from(0.0).hang_s == 3.0  # for an unseen step, 0.3 s is a guess


def test_what_a_step_tells_nothing_of_has_time_on_its_own() -> None:
    """A model of 5 ms a step is compiled for a minute and reads its data for two."""
    fast, slow = limits_from(0.005), limits_from(60.0)

    assert (fast.saving_s, fast.pause_s, fast.forming_s) == (30.0, 120.0, 300.0)
    assert slow.saving_s > 10 * fast.saving_s
    assert limits_from(0.005, patience=6.0).forming_s == 600.0


def test_a_slow_tail_of_steps_does_not_prolong_the_wait_for_a_stopped_process() -> None:
    """A busy minute makes the slowest step three times the usual one, and stops no process."""
    assert limits_from(1.0, step_s_p50=0.3).stopped_s == limits_from(0.3).stopped_s
    assert limits_from(1.0, step_s_p50=0.3).suspect_s == limits_from(1.0).suspect_s


def test_the_wait_for_a_stopped_process_is_as_long_as_a_replacement_costs() -> None:
    """A step is then redone; for a long one, 0.55 s would be too early."""
    assert limits_from(0.2, step_s_p50=0.1).stopped_s == 0.55
    assert limits_from(9.0, step_s_p50=8.0).stopped_s == 8.0
    assert limits_from(9.0, step_s_p50=8.0, patience=6.0).stopped_s == 16.0


def steps(durations_s: list[float]) -> Detector:
    state = Detector()
    for step, step_s in enumerate([9.0, *durations_s], start=1):
        row = replace(calm("w0", 0), step=step, step_s=step_s)
        state, _ = watch([row], for_s=0.0, state=state, from_s=100.0 + step)
    return state


def test_p99_leaves_out_the_first_step_of_an_attempt() -> None:
    """Here it took 9 s; with it every hang after a recovery would take half a minute to find."""
    assert steps([0.2] * 20).step_s_p99 == 0.2


def test_a_step_counts_once_however_many_workers_do_it() -> None:
    """With 300 workers 256 durations would be those of one step, and p99 whatever it took."""
    state, num_workers = Detector(), 300
    for step, step_s in enumerate([9.0, 0.2, 0.9, *[0.2] * 8], start=1):
        rows = [
            replace(calm(f"w{rank}", rank), step=step, step_s=step_s + 0.1 * (rank == 7))
            for rank in range(num_workers)
        ]
        state, _ = watch(rows, for_s=0.0, state=state, from_s=100.0 + step)

    assert len(state.steps_s) == 10
    assert (state.step_s_p99, state.step_s_p50) == pytest.approx((1.0, 0.3))


def test_few_steps_are_not_trusted() -> None:
    """Two steps of 0.2 s do not show how long a slow one takes."""
    assert steps([0.2, 0.2]).step_s_p99 == 0.4


def test_pauses_are_no_usual_steps() -> None:
    """The run waits for each, but not for ten minutes if the network fails later."""
    assert steps([0.2] * 100 + [60.0] * 50).step_s_p99 == 2.0
    assert steps([0.2] * 100 + [1.9] * 50).step_s_p99 == 1.9


def test_p99_forgets_old_steps() -> None:
    """A slow hour yesterday must not make today's hangs hard to find."""
    assert steps([5.0] * 10 + [0.2] * 256).step_s_p99 == 0.2


def test_step_time_is_unknown_before_the_first_step() -> None:
    """The default bounds hold then."""
    assert Detector().step_s_p99 == 0.0
