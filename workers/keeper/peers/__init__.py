"""Keepers of other nodes: serve byte ranges to them over TCP, and copy their snapshots."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.keeper.peers.client import RemotePart, WireClient
    from workers.keeper.peers.frames import accepted
    from workers.keeper.peers.mirror import Mirrors
    from workers.keeper.peers.probe import unreached
    from workers.keeper.peers.server import WireServer
    from workers.keeper.peers.timed import rate_to


__getattr__ = lazy_door(__name__)
