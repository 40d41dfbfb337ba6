"""Machines whose keepers time transfers to one another, over cables that can be made slow.

Each machine is a network namespace with one process of this module's in it, its agent. It serves
and times transfers by the keeper's own code. No Ray runs here, so a fault takes seconds to be
played. Cables, the switch and limits on them are the kernel's. Needs root, and ``ip`` and ``tc``.
"""

import json
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack, closing
from typing import Any, Final, Self

from tests.support.network_cluster import Switch
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import WireServer, rate_to
from workers.protocol import Peer

_SECRET: Final = b"s" * 32
_FAST: Final = "1gbit"


class LinkLab:
    """Machines on one switch, named m0, m1 and so on."""

    def __init__(self, num: int) -> None:
        self.nodes = [f"m{number}" for number in range(num)]
        self._held = ExitStack()
        self._network = 1 + secrets.randbelow(200)
        self._agents: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, str] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._switch = self._held.enter_context(closing(Switch()))
        try:
            for number, node in enumerate(self.nodes):
                self._boot(node, f"10.214.{self._network}.{number + 1}")
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        """Return the lab."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of it."""
        self._held.close()

    def _boot(self, node: str, host: str) -> None:
        tied = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--kill-child", "--fork"]
        agent = subprocess.Popen(
            [*tied, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._held.callback(_end, agent)
        self._agents[node] = agent
        pid = str(self._read(node)["pid"])
        self._switch.add(node, int(pid))
        inside = ["nsenter", "-t", pid, "-n", "ip"]
        for words in (
            ["addr", "add", f"{host}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run([*inside, *words], check=True)
        self._pids[node] = pid
        self._make_fast(node)
        self._addresses[node] = (host, int(self._ask(node, listen=host)["port"]))

    def rate(self, source: str, target: str) -> float:
        """Return what the keeper of a machine measures to another one."""
        rate: float | None = self._ask(source, time=[target, *self._addresses[target]])["rate"]
        assert rate is not None, f"{source} does not reach {target}"
        return rate

    def _ask(self, node: str, **order: Any) -> dict[str, Any]:
        agent = self._agents[node]
        assert agent.stdin is not None
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()
        return self._read(node)

    def _read(self, node: str) -> dict[str, Any]:
        agent = self._agents[node]
        assert agent.stdout is not None
        answer: dict[str, Any] = json.loads(agent.stdout.readline())
        return answer

    def slow_link(self, source: str, target: str, rate: str) -> None:
        """Let no more than ``rate`` through from one machine to another."""
        self._switch.limit_from(target, self._addresses[source][0], rate, _FAST)

    def slow_receiver(self, node: str, rate: str) -> None:
        """Let no more through to a machine."""
        self._switch.limit(node, rate)

    def slow_sender(self, node: str, rate: str) -> None:
        """Let a machine send no more."""
        inside = ["nsenter", "-t", self._pids[node], "-n", "tc", "qdisc"]
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
        subprocess.run([*inside, "replace", "dev", "eth0", *limit], check=True)

    def heal(self) -> None:
        """Make all cables fast again."""
        for node in self.nodes:
            self._switch.limit(node, "")
            self._make_fast(node)

    def _make_fast(self, node: str) -> None:
        self.slow_receiver(node, _FAST)
        self.slow_sender(node, _FAST)


def _end(agent: subprocess.Popen[str]) -> None:
    agent.kill()
    agent.wait()
    for pipe in (agent.stdin, agent.stdout):
        if pipe is not None:
            pipe.close()


def _agent() -> None:
    _say(pid=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        if "listen" in order:
            table = ArenaTable(budget_bytes=1 << 20)
            server = WireServer(table, host=order["listen"], secret=_SECRET)
            _say(port=server.address[1])
        else:
            node, host, port = order["time"]
            try:
                rate = rate_to(Peer(node=node, host=host, port=port, secret=_SECRET))
            except OSError:
                rate = None
            _say(rate=rate)


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _agent()
