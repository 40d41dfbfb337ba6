"""The detector's facts about nodes, and how long it keeps them."""

from time import process_time

from orchestrator.detection import Detector, observe, without_silent
from tests.support.histories import WORKERS, calm, watch
from workers.protocol import NodeReport

ON_TWO_NODES = dict(zip(WORKERS, ("n0", "n0", "n1", "n1"), strict=True))


def test_a_silent_node_without_a_member_is_forgotten() -> None:
    """On spot capacity nodes come and go for weeks, and every report would go through them all."""
    rows = [calm(worker, rank) for rank, worker in enumerate(WORKERS)]
    state, at_s = watch(rows, for_s=1.0, node_of=ON_TWO_NODES)
    state, _ = watch(rows[:2], for_s=5.0, state=state, from_s=at_s + 0.25)

    assert set(without_silent(state, WORKERS[:2], 5.0).nodes) == {"n0"}
    assert set(without_silent(state, WORKERS[:2], 6.0).nodes) == {"n0", "n1"}
    assert set(without_silent(state, WORKERS[:3], 5.0).nodes) == {"n0", "n1"}


def test_a_report_costs_no_more_with_many_nodes() -> None:
    """10,000 nodes report 10,000 times a second: each must not copy what is known of all."""

    def took_s(num_nodes: int) -> float:
        state = Detector()
        for number in range(num_nodes):
            report = NodeReport(node=f"n{number}", seq=0, workers=(calm(f"w{number}", number),))
            state = observe(state, report, 100.0)
        times: list[float] = []
        for _ in range(10):
            begin_s = process_time()
            for again in range(50):
                observe(state, NodeReport(node=f"n{again % 8}", seq=1, workers=()), 100.5)
            times.append(process_time() - begin_s)
        return min(times)

    few_s, many_s = took_s(8), took_s(20_000)
    assert many_s < 4 * few_s, (few_s, many_s)
