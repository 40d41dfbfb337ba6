"""Choose a layout for the available workers, and the nodes for it.

Pure arithmetic. The user sets the degrees for the full size. For every other size the planner uses
those degrees or divisors of them: ``candidates`` lists them, ``fit`` adapts one to the room on each
node, and ``choose`` decides. ``speed`` estimates the gain of a change. ``forecasts`` estimates
memory and step times on GPUs that are not here.
"""

from orchestrator.policies.layout.candidates import WHOLE, LayoutRules, Refused, candidates
from orchestrator.policies.layout.choose import choose, other_layouts
from orchestrator.policies.layout.fit import Rooms, num_workers, one_node, rooms_of, spread
from orchestrator.policies.layout.forecasts import (
    Asked,
    Forecast,
    forecast,
    forecasts,
    sent_bytes,
)
from orchestrator.policies.layout.hardware import GPUS, MIXTURES, Gpu, Job
from orchestrator.policies.layout.losses import AWAY_H, Nodes, Weighed, weigh
from orchestrator.policies.layout.memory import memory_bytes
from orchestrator.policies.layout.speed import expected_step_s, relative_step, step_ratio
