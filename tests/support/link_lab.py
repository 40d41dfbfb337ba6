"""Machines whose keepers time transfers to one another, over cables that can be made slow.

Each machine is a node of a fabric with one spine and has one process of this module, its agent. It
serves and times transfers by the keeper's own code. No Ray runs here, so a fault takes seconds to
be played. Needs root, and ``ip`` and ``tc``.
"""

import sys
from contextlib import ExitStack
from typing import Final, Self

from tests.support.fabric import Fabric, read_line, say
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import WireServer, rate_to
from workers.protocol import Peer

_SECRET: Final = b"s" * 32
#: Far below what a busy machine carries, so that its own load is no slow link.
_FAST_MBIT_S: Final = 400.0


class LinkLab:
    """Machines on one switch, named m0, m1 and so on."""

    def __init__(self, num: int) -> None:
        self.nodes = [f"m{number}" for number in range(num)]
        with ExitStack() as stack:
            self._fabric = stack.enter_context(Fabric(num, num_spines=1, mbit_s=_FAST_MBIT_S))
            hosts = [self._fabric.host(number) for number in range(num)]
            self._agents = [
                self._fabric.start(number, "-m", __name__, host)
                for number, host in enumerate(hosts)
            ]
            self._places = [
                (host, read_line(agent)[0]) for host, agent in zip(hosts, self._agents, strict=True)
            ]
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        """Return the lab."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of it."""
        self._held.close()

    def rate(self, source: str, target: str) -> float:
        """Return what the keeper of a machine measures to another one."""
        agent, place = self._agents[self._number(source)], self._places[self._number(target)]
        assert agent.stdin is not None
        print(*place, file=agent.stdin, flush=True)
        (rate,) = read_line(agent)
        assert rate != "none", f"{source} does not reach {target}"
        return float(rate)

    def slow_link(self, source: str, target: str, mbit_s: float) -> None:
        """Let no more through from one machine to another."""
        self._fabric.limit_between(self._number(source), self._number(target), 0, mbit_s)

    def slow_receiver(self, node: str, mbit_s: float) -> None:
        """Let no more through to a machine."""
        self._fabric.limit_received(self._number(node), 0, mbit_s)

    def slow_sender(self, node: str, mbit_s: float) -> None:
        """Let a machine send no more."""
        self._fabric.limit_sent(self._number(node), 0, mbit_s)

    def heal(self) -> None:
        """Make all cables fast again."""
        self._fabric.limit(0, _FAST_MBIT_S)

    def _number(self, node: str) -> int:
        return self.nodes.index(node)


def _agent(host: str) -> None:
    server = WireServer(ArenaTable(budget_bytes=1 << 20), host=host, secret=_SECRET)
    say(server.address[1])
    for line in sys.stdin:
        there, port = line.split()
        try:
            rate = rate_to(Peer(node=there, host=there, port=int(port), secret=_SECRET))
        except OSError:
            rate = None
        say("none" if rate is None else rate)


if __name__ == "__main__":
    _agent(sys.argv[1])
