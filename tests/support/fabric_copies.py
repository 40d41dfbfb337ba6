"""Copies between two keepers on a fabric of two spines: by a mirror, or over one connection.

A real keeper's server runs on one node and its mirror on another, each as a process of this module.
"""

import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from tests.support.fabric import Fabric, read_line, say
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.mirror import Mirrors
from workers.keeper.peers.server import WireServer
from workers.memory import descriptor_socket, notify
from workers.protocol import Held, Peer

_SECRET: Final = b"of this fabric"
_ARENA: Final = "w0000.0"
_SIZE_BYTES: Final = 32 << 20
HOLDER, COPIER = 0, 1


class Copies:
    """A holder of snapshots, and a copier: a mirror, or one connection by a spine both ways."""

    def __init__(self, fabric: Fabric, spine: int | None = None) -> None:
        self._holder = fabric.start(HOLDER, "-m", __name__, "hold", fabric.host(HOLDER))
        port = int(read_line(self._holder)[0])
        source = 0
        if spine is not None:
            source = next(
                each
                for each in range(21_000, 22_000)
                if fabric.spine_of(COPIER, HOLDER, each, port) == spine
                and fabric.spine_of(HOLDER, COPIER, port, each) == spine
            )
        words = ["copy", fabric.host(HOLDER), str(port), str(source)]
        self._copier = fabric.start(COPIER, "-m", __name__, *words)
        # A first copy is complete.
        read_line(self._holder)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        """Read what the holder prints of each copy, so that it never waits for a reader."""
        assert self._holder.stdout is not None
        while self._holder.stdout.readline():
            pass

    def end(self) -> None:
        """End both processes; the fabric closes their pipes at its end."""
        for process in (self._copier, self._holder):
            process.kill()
            process.wait()


def _hold(host: str) -> None:
    """Serve a rank's snapshots, a new one whenever the last is copied, until it is killed."""
    table = ArenaTable(budget_bytes=1 << 40)
    arena = table.reserve(_ARENA, body_bytes=_SIZE_BYTES)
    server = WireServer(table, host=host, secret=_SECRET)
    say(server.address[1])
    with tempfile.TemporaryDirectory() as directory:
        path = descriptor_socket(Path(directory))
        # It serves until the process is killed.
        _door = DescriptorServer(path, table)
        step = 0
        while True:
            buffer = arena.choose(())
            step += 1
            arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
            arena.finish(buffer, data_bytes=_SIZE_BYTES, record_bytes=0)
            notify(path, _ARENA)
            while not arena.is_followed() or arena.copy_behind():
                time.sleep(1e-3)
            say(step)


def _copy(host: str, port: int, source_port: int) -> None:
    """Copy from the holder: as a mirror, or over one connection from a source port."""
    if not source_port:
        mirrors = Mirrors(ArenaTable(budget_bytes=1 << 40))
        mirrors.follow([Peer(node="holder", host=host, port=port, secret=_SECRET)])
        sys.stdin.read()
        mirrors.stop()
        return
    client = WireClient((host, port), secret=_SECRET)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind(("", source_port))
    connection.connect((host, port))
    client.use(connection)
    news, copied = -1, dict[str, Held]()
    while True:
        listing = client.list_arenas(after=news, timeout_s=1.0, copied=copied)
        news, held = listing.news, listing.arenas[_ARENA].parts[-1]
        if copied.get(_ARENA) != held:
            client.read(_ARENA, held, 0, [memoryview(bytearray(held.data_bytes))])
            copied = {_ARENA: held}


def _main(role: str, host: str, *rest: Any) -> None:
    if role == "hold":
        _hold(host)
    else:
        _copy(host, *map(int, rest))


if __name__ == "__main__":
    _main(*sys.argv[1:])
