"""Says from records of operations which rank, link or program is at fault. Pure.

``diagnose`` looks at hangs (``hang``), calls that differ (``programs``), ranks that compute or load
data slowly (``slow``) and slow transfers (``transfers``). A call without a record is
unknown, and no sign that a rank does not wait: such a verdict is ``undecided``, and says what is
missing.
"""

from orchestrator.diagnosis.analyzer import diagnose
from orchestrator.diagnosis.graph import WaitGraph, wait_graph
from orchestrator.diagnosis.programs import difference
from orchestrator.diagnosis.records import SPANS, Operation, Records, matched
from orchestrator.diagnosis.verdicts import Guilty, Kind, Verdict

__all__ = [
    "SPANS",
    "Guilty",
    "Kind",
    "Operation",
    "Records",
    "Verdict",
    "WaitGraph",
    "diagnose",
    "difference",
    "matched",
    "wait_graph",
]
