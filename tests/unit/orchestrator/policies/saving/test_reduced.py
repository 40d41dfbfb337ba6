from orchestrator.policies import ReducedTime, alert, noted
from orchestrator.policies.saving.reduced import ALERT_S


def _after(looks: list[tuple[float, bool]]) -> ReducedTime:
    time = ReducedTime()
    for at_s, is_reduced in looks:
        time = noted(time, at_s, is_reduced=is_reduced)
    return time


def test_time_at_reduced_redundancy_ends_at_the_look_that_finds_it_whole() -> None:
    """Looks are apart; what was seen at one lasts until the next."""
    time = _after([(5.0, True), (6.0, True), (8.0, False), (20.0, False), (21.0, True)])

    assert time.total_s == 3.0
    assert time.for_s == 0.0
    assert noted(time, 23.0, is_reduced=True).for_s == 2.0


def test_only_redundancy_that_stays_reduced_is_reported() -> None:
    """Every recovery reduces it for a moment; users would ignore an alert for each."""
    begun = [(0.0, True), (ALERT_S - 1, True)]

    assert alert(_after(begun), survived=0, tolerance=1) == ()
    (line,) = alert(_after([*begun, (ALERT_S, True)]), survived=0, tolerance=1)
    assert line.startswith("for 60 s the loss of no node would be recovered")
    (line,) = alert(_after([*begun, (ALERT_S, True)]), survived=1, tolerance=2)
    assert line.startswith("for 60 s the loss of 1 node and no more would be recovered")
    assert alert(_after([*begun, (ALERT_S, False)]), survived=1, tolerance=1) == ()
