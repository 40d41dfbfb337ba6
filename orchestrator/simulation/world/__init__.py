"""The virtual cluster: nodes, processes, memory, storage."""

from orchestrator.simulation.world.cluster import SimCluster
from orchestrator.simulation.world.journaling import SimJournal
from orchestrator.simulation.world.parts import STEP_S, SimNode, SimWorker
from orchestrator.simulation.world.saving import COPY_S, Tiers

__all__ = [
    "COPY_S",
    "STEP_S",
    "SimCluster",
    "SimJournal",
    "SimNode",
    "SimWorker",
    "Tiers",
]
