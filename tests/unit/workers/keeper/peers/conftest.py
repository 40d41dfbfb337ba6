"""A keeper that serves one arena with one snapshot in it, and a peer that asks for it."""

from collections.abc import Iterator

import pytest

from tests.support.wired import SECRET, write
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.server import WireServer
from workers.memory import Arena


@pytest.fixture
def table() -> Iterator[ArenaTable]:
    table = ArenaTable(budget_bytes=1 << 30)
    yield table
    table.drop("w0001")


@pytest.fixture
def arena(table: ArenaTable, size: int) -> Arena:
    """The one arena; each module says how large its snapshots are."""
    arena = table.reserve("w0001", body_bytes=size)
    write(arena, 1, size=size)
    return arena


@pytest.fixture
def server(table: ArenaTable) -> Iterator[WireServer]:
    server = WireServer(table, host="127.0.0.1", secret=SECRET)
    yield server
    server.close()


@pytest.fixture
def client(server: WireServer) -> Iterator[WireClient]:
    client = WireClient(server.address, secret=SECRET)
    yield client
    client.close()
