"""The virtual cluster: nodes, processes, memory, storage."""

from orchestrator.simulation.world.cluster import SimCluster
from orchestrator.simulation.world.journaling import SimJournal
from orchestrator.simulation.world.memory import answers
from orchestrator.simulation.world.neighbour import Neighbour
from orchestrator.simulation.world.orphans import Orphans
from orchestrator.simulation.world.parts import (
    COPY_S,
    STEP_S,
    SimAttempt,
    SimModel,
    SimNode,
    SimWorker,
    Tiers,
)
from orchestrator.simulation.world.storage import Storage
from orchestrator.simulation.world.wires import World

__all__ = [
    "COPY_S",
    "STEP_S",
    "Neighbour",
    "Orphans",
    "SimAttempt",
    "SimCluster",
    "SimJournal",
    "SimModel",
    "SimNode",
    "SimWorker",
    "Storage",
    "Tiers",
    "World",
    "answers",
]
