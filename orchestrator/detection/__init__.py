"""Detect that an attempt hangs, and which worker is to blame.

Pure. ``observe`` folds the keepers' reports into a ``Detector``; ``judge`` returns its verdict. A
waiting rank is never named. Without sufficient evidence the verdict is undecided.
"""

from orchestrator.detection.detector import Detector, observe, silent_nodes, without_silent
from orchestrator.detection.leaving import at_work
from orchestrator.detection.limits import PATIENCE, Limits, as_seconds, limits_from
from orchestrator.detection.verdict import Hang, Judgement, NodeSilent, Stalled, judge
