"""Finds out that an attempt hangs, and who is to blame. Pure: reports in, verdict out.

``observe`` folds the keepers' reports into a ``Detector``; ``judge`` looks at it. A waiting
rank is never named, and what cannot be decided is said to be undecided.
"""

from orchestrator.detection.detector import Detector, observe, without_silent
from orchestrator.detection.leaving import at_work
from orchestrator.detection.limits import PATIENCE, Limits, as_seconds, limits_from
from orchestrator.detection.verdict import Judgement, NodeSilent, Stalled, Verdict, judge
from orchestrator.detection.waits import graph_of
