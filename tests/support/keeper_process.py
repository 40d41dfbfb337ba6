"""A keeper's memory, door, wire and mirrors in a process of its own, without Ray: to be killed.

    python -m tests.support.keeper_process DIRECTORY

The first line of output is where it serves peers. A line of input is whom to protect: a list of
``[node, host, port, secret in hex]`` to copy, or of such or null with ranks to keep parities with;
it is answered once that is done.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.mirror import Mirrors
from workers.keeper.peers.parity_mirror import ParityMirror
from workers.keeper.peers.server import WireServer
from workers.memory import descriptor_socket
from workers.protocol import GroupPlace, ParityGroup, Peer

_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class KeeperProcess:
    """One that runs."""

    process: subprocess.Popen[str]  #: It.
    door: Path  #: Where trainers of its node come in.
    peer: Peer  #: How other keepers reach it.

    def follow(self, peers: Sequence[Peer]) -> None:
        """Make it copy the versions of these nodes' ranks only."""
        self._tell({"copies_of": list(map(_packed, peers))})

    def protect(self, group: ParityGroup) -> None:
        """Have it keep parities of the group."""
        places = [(each.peer and _packed(each.peer), each.ranks) for each in group.places]
        self._tell({"attempt": group.attempt, "tolerance": group.tolerance, "places": places})

    def kill(self) -> None:
        """SIGKILL it."""
        self.process.kill()
        self.process.wait()

    def _tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def keeper(node: str, directory: Path) -> Iterator[KeeperProcess]:
    """Run the keeper of ``node``; its door is in ``directory``."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.keeper_process", str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            host, port, secret = json.loads(process.stdout.readline())
            peer = Peer(node=node, host=host, port=port, secret=bytes.fromhex(secret))
            yield KeeperProcess(process, descriptor_socket(directory), peer)
        finally:
            process.kill()


def _packed(peer: Peer) -> list[Any]:
    return [peer.node, peer.host, peer.port, peer.secret.hex()]


def _peer(fields: list[Any]) -> Peer:
    node, host, port, secret = fields
    return Peer(node=node, host=host, port=port, secret=bytes.fromhex(secret))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _main(directory: Path) -> None:
    table = ArenaTable(budget_bytes=_BUDGET_BYTES)
    door = DescriptorServer(descriptor_socket(directory), table)
    secret = os.urandom(32)
    server = WireServer(table, host="127.0.0.1", secret=secret)
    mirrors = Mirrors(table)
    _say(json.dumps([*server.address, secret.hex()]))
    parity_mirrors: list[ParityMirror] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "copies_of" in order:
            mirrors.follow(list(map(_peer, order["copies_of"])))
        else:
            places = tuple(
                GroupPlace(peer=fields and _peer(fields), ranks=tuple(ranks))
                for fields, ranks in order.pop("places")
            )
            group = ParityGroup(places=places, **order)
            parity_mirrors.append(ParityMirror(table, group))
        _say("done")
    for mirror in parity_mirrors:
        mirror.stop()
    mirrors.stop()
    server.close()
    door.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
