"""A machine that says itself when it goes, by a command of the user's own, on a real cluster."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_cluster import NetworkCluster, why_not
from tests.support.network_runs import NetworkRun, digest_alone

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]

STEPS = 120


@pytest.fixture
def cluster() -> Iterator[NetworkCluster]:
    """Three nodes and a head."""
    with NetworkCluster(3) as made:
        yield made


def test_a_machine_that_says_when_it_goes_is_left_before_and_loses_no_step(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """Two say so within a second, one takes it back: that one is used again, the other one dies."""
    said = tmp_path / "said"
    said.mkdir()
    run = NetworkRun(
        cluster, tmp_path / "run", f"train.steps={STEPS}", "workers.min=1", "workers.max=3",
        f'notices.command=sh -c "cat {said}/$(hostname) || true"', pace_s=0.3,
    )  # fmt: skip
    before = run.settle(workers=3)
    spared, taken = run.ranks()[1:]

    told_s = time.time()
    for machine in (spared, taken):
        (said / f"node{machine}").write_text("25 the rack is cleaned")
    run.first(lambda line: line["num_workers"] == 1, 25.0)
    (said / f"node{spared}").unlink()
    run.whole_again(told_s, workers=2)
    time.sleep(max(0.0, told_s + 25.0 - time.time()))
    after = run.settle(workers=2)
    cluster.kill(taken)
    summary = run.finish()

    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "none was redone"
    assert lines[-1]["attempt"] == after["attempt"] > before["attempt"], "no worker missed it"
    assert (summary["outcome"], summary["lost_steps"]) == ("completed", 0)
    assert summary["weights_digest"] == digest_alone(tmp_path, STEPS)
