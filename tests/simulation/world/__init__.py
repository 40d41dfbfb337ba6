"""The virtual cluster: nodes, processes, memory, storage."""

from tests.simulation.world.cluster import CORRUPT, SimCluster
from tests.simulation.world.journaling import SimJournal
from tests.simulation.world.memory import answers
from tests.simulation.world.neighbour import Neighbour
from tests.simulation.world.orphans import Orphans
from tests.simulation.world.parts import (
    COPY_S,
    STEP_S,
    SimAttempt,
    SimModel,
    SimNode,
    SimWorker,
    Tiers,
)
from tests.simulation.world.storage import Storage
from tests.simulation.world.wires import World

__all__ = [
    "COPY_S",
    "CORRUPT",
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
