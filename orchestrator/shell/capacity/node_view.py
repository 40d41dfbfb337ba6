"""The controller's view of a node."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from workers.protocol import LEASE_S, Peer


@dataclass(slots=True)
class NodeView:
    """A node and its keeper."""

    node: str  #: Ray node id, hex.
    raylet_address: tuple[str, int]
    rack: str = ""  #: Rack, whose nodes fail together; "" if unknown.
    state: str = "alive"  #: alive, draining or lost.
    notice: str = ""  #: The source of the notice of its end; "" without a notice.
    taken_s: float = math.inf  #: When it ends, on the run's clock; infinity if unknown.
    raylet_pid: int = 0  #: Process id of the raylet; 0 until the keeper reports it.
    keeper_pid: int = 0  #: Process id of the keeper; 0 while there is none.
    #: Lower bound of how far its clock is ahead of the controller's; 0 if it is behind.
    clock_ahead_s: float = 0.0
    lease_s: float = LEASE_S  #: How long its trainers continue without a controller, in seconds.
    lost_s: float = 0.0  #: When it was declared lost, on the run's clock.
    is_dead: bool = False  #: Whether it is lost and none of its processes can be alive.
    is_returning: bool = False  #: Whether only its keeper died and is restarting.
    is_met: bool = False  #: Whether an earlier controller started its keeper.
    num_reports: int = 0  #: How often its keeper has reported.
    #: Set once a keeper is requested; its result is the handle.
    starting: asyncio.Future[Any] | None = None
    keeper: Any = None
    host: str = ""  #: Where the keeper serves snapshots; "" while it does not.
    port: int = 0
    #: Peers must send this to the keeper; b"" until the keeper answers.
    secret: bytes = field(default=b"", repr=False)
    #: Tasks that run until the node is lost.
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    care: asyncio.Task[None] | None = None  #: The task in ``tasks`` that ends with the keeper.
    ending: asyncio.Task[None] | None = None  #: Set while the keeper is being ended.
    #: Set once the keeper has answered.
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self, at_s: float) -> dict[str, Any]:
        """Return the node's row of the run's status at ``at_s``."""
        return {
            "node": self.node,
            # Not 0, which `kill` takes for its own process group.
            "raylet_pid": self.raylet_pid or None,
            "keeper_pid": self.keeper_pid or None,
            "state": self.state,
            "notice": self.notice,
            "taken_in_s": round(self.taken_s - at_s) if math.isfinite(self.taken_s) else None,
        }

    @property
    def peer(self) -> Peer:
        """Return how other keepers reach the keeper."""
        return Peer(node=self.node, host=self.host, port=self.port, secret=self.secret)


def view_of(row: Mapping[str, Any], rack_label: str) -> NodeView:
    """Return a node from a row of Ray's node table; ``rack_label`` as for ``Nodes``."""
    return NodeView(
        node=row["NodeID"],
        raylet_address=(row["NodeManagerAddress"], row["NodeManagerPort"]),
        rack=row["Labels"].get(rack_label, ""),
    )


def told_nodes(
    views: Mapping[str, NodeView],
    described: Mapping[str, Any],
    at_s: float,
    num_nodes: int | None = None,
) -> list[dict[str, Any]]:
    """Return at most ``num_nodes`` rows (None for all), those of ``core.describe`` first."""
    first = (row["node"] for row in described["nodes"])
    names = dict.fromkeys((*(name for name in first if name in views), *views))
    return [views[name].told(at_s) for name in islice(names, num_nodes)]
