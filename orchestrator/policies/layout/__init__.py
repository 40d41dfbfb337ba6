"""Which layout the workers that are left take, and on which nodes. Pure arithmetic.

The user names the degrees for the full size. For every other size the planner takes those degrees,
or divisors of them: ``candidates`` lists them, ``fit`` sizes one to the room on each node, and
``choose`` decides; ``speed`` says what a change would win,
and ``hardware`` what to expect of GPUs that are not here.
"""

from orchestrator.policies.layout.candidates import WHOLE, LayoutRules, Refused, candidates
from orchestrator.policies.layout.choose import choose, other_layouts
from orchestrator.policies.layout.fit import Rooms, num_workers, one_node, rooms_of, spread
from orchestrator.policies.layout.hardware import (
    GPUS,
    MIXTURES,
    Forecast,
    Gpu,
    Job,
    forecast,
    forecasts,
    memory_bytes,
    sent_bytes,
)
from orchestrator.policies.layout.speed import (
    expected_step_s,
    relative_step,
    step_ratio,
    step_text,
)

__all__ = [
    "GPUS",
    "MIXTURES",
    "WHOLE",
    "Forecast",
    "Gpu",
    "Job",
    "LayoutRules",
    "Refused",
    "Rooms",
    "candidates",
    "choose",
    "expected_step_s",
    "forecast",
    "forecasts",
    "memory_bytes",
    "num_workers",
    "one_node",
    "other_layouts",
    "relative_step",
    "rooms_of",
    "sent_bytes",
    "spread",
    "step_ratio",
    "step_text",
]
