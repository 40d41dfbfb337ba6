"""Find from records of operations which rank, link or program is at fault.

Pure. ``diagnose`` examines hangs (``hang``), calls that differ (``programs``), ranks that compute
or load data slowly (``slow``) and slow transfers (``transfers``). A missing record of a call does
not prove that the rank did not call: such a verdict is ``undecided`` and says what is missing.
``Live`` names the suspects of a run while it trains. ``trace`` draws the records, and
``flight_recorder_dumps`` converts them for torch's tools.
"""

from orchestrator.diagnosis import links
from orchestrator.diagnosis.analyzer import diagnose, stopped
from orchestrator.diagnosis.flight_recorder import flight_recorder_dumps
from orchestrator.diagnosis.flows import Flows, Transfer
from orchestrator.diagnosis.graph import WaitGraph
from orchestrator.diagnosis.hang import hangs
from orchestrator.diagnosis.links import dead
from orchestrator.diagnosis.live import Live, roles_of
from orchestrator.diagnosis.records import Doing, Operation, Records, matched
from orchestrator.diagnosis.reports import OS_STATES, doing, graph_of, records_of, waits
from orchestrator.diagnosis.trace import trace
from orchestrator.diagnosis.verdicts import Guilty, Suspicion, Verdict, is_agreed, listed
