"""How often to save, and how saved state is protected. Pure."""

from orchestrator.policies.saving.intervals import (
    CadenceFacts,
    CadenceRules,
    FaultsSeen,
    Redundancy,
    Tier,
    cost_share,
    next_pace,
    over_budget,
    rate_per_s,
    taken_steps,
)
from orchestrator.policies.saving.reduced import ReducedTime, alert, noted
from orchestrator.policies.saving.redundancy import (
    Mechanism,
    RedundancyFacts,
    RedundancyPlan,
    plan_redundancy,
    revise,
    state_bytes,
)
