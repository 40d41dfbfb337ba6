"""Decisions as pure functions: layout, order, versions, saving, growth, sharing, budgets."""

from orchestrator import policies
from orchestrator.policies import (
    bad_sources,
    budgets,
    capacity,
    growth,
    node_order,
    sharing,
    slow,
    versions,
)
from orchestrator.policies.budgets import BudgetRules, Fault, UserError
from orchestrator.policies.capacity import CapacityRules
from orchestrator.policies.growth import GrowthRules
from orchestrator.policies.layout import (
    AWAY_H,
    GPUS,
    MIXTURES,
    WHOLE,
    Asked,
    Forecast,
    Gpu,
    Job,
    LayoutRules,
    Nodes,
    Refused,
    Rooms,
    Weighed,
    choose,
    expected_step_s,
    forecast,
    forecasts,
    memory_bytes,
    num_workers,
    one_node,
    other_layouts,
    rooms_of,
    sent_bytes,
    spread,
    step_ratio,
    weigh,
)
from orchestrator.policies.saving import (
    CadenceFacts,
    CadenceRules,
    FaultsSeen,
    Mechanism,
    ReducedTime,
    Redundancy,
    RedundancyFacts,
    RedundancyPlan,
    Tier,
    alert,
    cost_share,
    next_pace,
    noted,
    over_budget,
    plan_redundancy,
    revise,
    state_bytes,
    taken_steps,
)
from orchestrator.policies.sharing import Share, Sharing, SharingRules
from orchestrator.policies.slow import SlowRules
from orchestrator.policies.versions import MEMORY, STORAGE, Protection, Version, complete
from orchestrator.policies.whatif import (
    LossFacts,
    RecoveryPlan,
    StoredVersion,
    WorkerPlace,
    plan_recovery,
)
