"""Values that are pickled by their fields."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from tests.support.histories import calm
from workers.protocol import Digest, NodeReport, StepCost


def test_a_report_comes_back_as_it_was_and_frozen() -> None:
    """Its fields are set past its constructor: one could be left out, or mixed up."""
    rows = tuple(calm(f"w{rank}", rank) for rank in range(3))
    digest = Digest(costs=(StepCost(7, 0.5, 0.25),), span="data", span_s=1.5)
    report = NodeReport(node="n", seq=4, workers=(replace(rows[0], digest=digest), *rows[1:]))

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(report, protocol=protocol))
        assert repr(again) == repr(report)
        assert replace(again, seq=5).workers is again.workers
        with pytest.raises(FrozenInstanceError):
            again.workers[0].step = 9
