"""How long trainers go on without word from the controller."""

import time
from pathlib import Path

import pytest

from workers.protocol import LEASE_S, LEAVE_SHARE
from workers.telemetry import Lease, has_run_out, lease_s
from workers.telemetry.lease import VARIABLE

LEAVE_S = LEAVE_SHARE * LEASE_S


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def _watch(lease: Lease, clock: _Clock, seconds: float) -> None:
    """Let a keeper that runs look at its lease for so long."""
    for _ in range(int(seconds / 0.25)):
        clock.sleep(0.25)
        lease.look()


def test_a_lease_lasts_while_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    lease = Lease(tmp_path)
    for _ in range(5):
        _watch(lease, clock, LEAVE_S - 1.0)
        assert not has_run_out(tmp_path)
        lease.renew()
    _watch(lease, clock, LEAVE_S)
    assert has_run_out(tmp_path)
    lease.renew()
    assert not has_run_out(tmp_path)


def test_no_lease_is_needed_without_a_keeper(tmp_path: Path) -> None:
    """A script that somebody runs alone trains for as long as it takes."""
    assert not has_run_out(tmp_path)


def test_a_keeper_that_was_stopped_could_hear_no_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of which everything stood still for an hour trains on."""
    clock = _Clock(monkeypatch)
    lease = Lease(tmp_path)
    _watch(lease, clock, 10.0)
    clock.sleep(3600.0)
    lease.look()
    assert not has_run_out(tmp_path)
    _watch(lease, clock, LEAVE_S - 10.0)
    assert has_run_out(tmp_path)


def test_a_keeper_that_is_started_again_extends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not heard of the controller either; and without any the lease runs out as well."""
    clock = _Clock(monkeypatch)
    _watch(Lease(tmp_path), clock, LEAVE_S / 2)
    clock.sleep(LEAVE_S / 2)
    assert has_run_out(tmp_path)
    lease = Lease(tmp_path)
    assert has_run_out(tmp_path)
    lease.renew()
    assert not has_run_out(tmp_path)


@pytest.mark.parametrize(
    ("said", "seconds"), [(None, 60.0), ("600", 600.0), ("soon", 60.0), ("0", 60.0), ("inf", 60.0)]
)
def test_a_lease_is_as_long_as_ray_waits_for_the_head(said: str | None, seconds: float) -> None:
    """With the head back after minutes, trainers that had stopped would have lost them."""
    assert lease_s({} if said is None else {VARIABLE: said}) == seconds


def test_trainers_leave_before_the_end_of_a_longer_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch)
    lease = Lease(tmp_path, 600.0)
    _watch(lease, clock, 449.0)
    assert not has_run_out(tmp_path)
    _watch(lease, clock, 1.0)
    assert has_run_out(tmp_path)
