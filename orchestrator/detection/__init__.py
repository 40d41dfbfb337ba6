"""Finds out that an attempt hangs and which worker is to blame.

Pure: reports in, verdict out. ``observe`` folds the keepers' reports into a ``Detector``; ``judge``
evaluates it. A waiting rank is never named. If the evidence does not decide, the verdict is
undecided.
"""

from orchestrator.detection.detector import Detector, observe, without_silent
from orchestrator.detection.leaving import at_work
from orchestrator.detection.limits import PATIENCE, Limits, as_seconds, limits_from
from orchestrator.detection.verdict import Hang, Judgement, NodeSilent, Stalled, judge
from orchestrator.detection.waits import graph_of
