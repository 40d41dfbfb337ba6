"""Times of a rank's own work on its device, as a reader outside gets them; it is simulated."""

import time
from pathlib import Path

import pytest

from tests.support.device_work import DeviceClock
from workers.collectives.device_spans import DeviceSpans
from workers.protocol import Digest, StepCost
from workers.telemetry import RecordRing, RingReader, read_ring


class Rank:
    """A rank that gathers in its first forward pass and reduces in its last backward pass."""

    def __init__(self, path: Path) -> None:
        self.device = DeviceClock()
        ring = RecordRing(path, attempt=1, num_ranks=2)
        ring.assign(0, on_device=True)
        self.spans = DeviceSpans(ring, mark=self.device.mark)
        self.reader = RingReader(path)

    def span(self, op: str, device_s: float, *, step: int, number: int, calls: bool) -> None:
        self.spans.span(op, step=step, micro_batch=number)
        self.device.now_s += device_s
        self.spans.num_calls += calls
        tokens = 100 * (number + 1) if op == "data" else 0
        self.spans.span("", step=step, micro_batch=number, tokens=tokens)
        # Others' work, between the spans.
        self.device.now_s += 5.0

    def passes(self, step: int, *passes: tuple[float, float]) -> None:
        for number, (forward_s, backward_s) in enumerate(passes):
            is_last = number == len(passes) - 1
            self.span("data", 0.0, step=step, number=number, calls=False)
            self.span("forward", forward_s, step=step, number=number, calls=number == 0)
            self.span("backward", backward_s, step=step, number=number, calls=is_last)

    def step(self, step: int, *passes: tuple[float, float]) -> None:
        self.passes(step, *passes)
        self.span("optimizer", 0.0, step=step, number=0, calls=False)

    def digest(self) -> Digest:
        self.reader.look()
        found = self.reader.digest(now_ns=time.monotonic_ns())
        assert found is not None
        return found


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "w0.ring")


def compute(costs: tuple[StepCost, ...]) -> dict[int, float]:
    return {cost.step: round(cost.compute_s, 6) for cost in costs}


def test_a_step_costs_its_fastest_passes_without_calls(rank: Rank) -> None:
    """A pass with calls holds a wait for others, of which nothing is known."""
    rank.step(1, (0.001, 0.5), (0.4, 0.3), (0.2, 0.001))

    (cost,) = rank.digest().costs
    assert (cost.step, round(cost.compute_s, 6)) == (1, 0.5)
    assert cost.tokens == 300, "of two passes the larger number"


def test_a_step_without_such_a_pass_has_no_cost(rank: Rank) -> None:
    rank.step(1, (0.2, 0.3))

    assert rank.digest().costs == ()
    rank.step(2, (0.2, 0.3), (0.2, 0.3))
    assert compute(rank.digest().costs) == {2: 0.5}


def test_a_step_that_lasts_for_many_digests_has_the_cost_of_all_its_passes(rank: Rank) -> None:
    """Spans are over on the host long before the device has done them."""
    rank.step(1, (0.2, 0.3), (0.2, 0.3))
    rank.passes(2, (9.0, 0.3), (0.4, 9.0))
    first = rank.digest()
    assert (compute(first.costs), first.span) == ({1: 0.5}, "")
    assert rank.digest().costs == ()
    rank.span("forward", 0.0, step=2, number=2, calls=True)
    rank.spans.span("optimizer", step=2, micro_batch=0)
    assert (rank.digest().costs, rank.digest().span) == ((), "optimizer")
    rank.spans.span("", step=2, micro_batch=0)

    assert compute(rank.digest().costs) == {2: 0.7}
    assert rank.digest().costs == ()


def test_what_the_device_has_not_done_is_unknown(rank: Rank, tmp_path: Path) -> None:
    """torch refuses to tell the time of a place that was not reached, and no thread may wait."""
    rank.device.is_there = False
    rank.step(1, (0.2, 0.3), (0.2, 0.3))
    rank.device.is_there = True
    rank.step(2, (0.2, 0.3), (0.2, 0.3))

    assert compute(rank.digest().costs) == {2: 0.5}
    told = {
        (one.step, one.op, one.micro_batch): one for one in read_ring(tmp_path / "w0.ring").records
    }
    assert told[2, "forward", 1].device_s == pytest.approx(0.2)
    assert told[2, "forward", 0].device_s == told[1, "forward", 1].device_s == 0.0
    assert told[2, "forward", 1].history == 0
