"""A keeper that serves one arena with one snapshot in it, and a peer that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.wired import SECRET, write
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.server import WireServer
from workers.keeper.slots import NodeSlots
from workers.memory import Arena


@pytest.fixture
def slots() -> Iterator[NodeSlots]:
    slots = NodeSlots(budget_bytes=1 << 30)
    yield slots
    slots.drop("w0001")


@pytest.fixture
def arena(slots: NodeSlots, size: int) -> Arena:
    """The one arena; each module says how large its snapshots are."""
    arena = slots.reserve("w0001", body_bytes=size)
    write(arena, 1, size=size)
    return arena


@pytest.fixture
def server(slots: NodeSlots) -> Iterator[WireServer]:
    server = WireServer(slots, host="127.0.0.1", secret=SECRET)
    yield server
    server.close()


@pytest.fixture
def client(server: WireServer) -> Iterator[WireClient]:
    client = WireClient(server.address, secret=SECRET)
    yield client
    client.close()
