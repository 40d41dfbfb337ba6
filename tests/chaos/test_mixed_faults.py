"""Faults of every kind in one unattended run on a real network: the same weights."""

from pathlib import Path

import pytest

from tests.benchmarks.bench_soak import soak
from tests.benchmarks.soak_faults import KINDS, draw
from tests.benchmarks.soak_ledger import summed
from tests.support.network_cluster import why_not

pytest.importorskip("moto", reason="storage that can fail")
pytest.importorskip("s3fs", reason="what talks to it")

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]


def test_a_fault_of_each_kind_after_the_other_leaves_the_same_weights(tmp_path: Path) -> None:
    """In an order that a seed draws, some two at once; then the run ends as a calm one."""
    orders = [draw(30, index) for index in range(len(KINDS))]

    lines = soak(
        orders, 30, tmp_path / "soak.jsonl",
        per_sitting=len(orders), local=False, has_redis=False,
    )  # fmt: skip

    found = summed(lines)
    assert not found["not_survived"]
    assert not found["healthy_blamed"]
    assert (found["ended"], found["exactly_once"], found["same_weights"]) == (1, 1, 1)
