"""Machines that only train and talk: where links are slow, and what keepers see of that.

Each machine is a network namespace with one process of this module's, its agent, in it. The agent
does what a keeper does with connections, by the keeper's own code, and starts a trainer: real gloo
all-reduces with a pause between them. No Ray runs here, so a fault takes seconds to be played.
Cables, switches and limits on them are the kernel's. Needs root, and ``ip`` and ``tc``.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from tests.support.network_cluster import Switch
from workers.keeper.arena_table import ArenaTable
from workers.keeper.peers import WireServer, rate_to
from workers.keeper.sockets import Sockets
from workers.parent_death import end_with_parent
from workers.protocol import Flow, NodeReport, Peer

__all__ = ["LinkLab"]

_SECRET = b"s" * 32
_PORT = 29500
_STEPS_MAX = 64


class LinkLab:
    """Machines on one switch, or on one a rack with a cable between the racks.

    Args:
        num: Machines, named m0, m1 and so on.
        racks: The rack of each, "A" or "B"; "" for one switch.
        between: The rate of the cable between the racks.
        fast: The rate of all other cables.
        size_bytes: Bytes of an all-reduce.
        pause_s: Between two.
    """

    def __init__(
        self,
        num: int,
        *,
        racks: str = "",
        between: str = "1gbit",
        fast: str = "1gbit",
        size_bytes: int = 4 << 20,
        pause_s: float = 0.05,
    ) -> None:
        self.nodes = [f"m{number}" for number in range(num)]
        self._train = {"size_bytes": size_bytes, "pause_s": pause_s}
        self._fast = fast
        self._held = ExitStack()
        self._network = 1 + secrets.randbelow(200)
        self._agents: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self.addresses: dict[str, tuple[str, int]] = {}
        try:
            self._switch = self._held.enter_context(closing(Switch()))
            if racks:
                self._switch.join("rack", between)
            for number, node in enumerate(self.nodes):
                self._boot(node, number, "rack" if racks and racks[number] == "B" else "bridge")
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        """Return the lab."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End all of it."""
        self._held.close()

    def _boot(self, node: str, number: int, bridge: str) -> None:
        tied = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--kill-child", "--fork"]
        agent = subprocess.Popen(
            [*tied, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._held.callback(_end, agent)
        self._agents[node] = agent
        pid = int(self._read(node)["pid"])
        self._switch.add(node, pid, bridge=bridge)
        host = f"10.214.{self._network}.{number + 1}"
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        for words in (
            ["addr", "add", f"{host}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            subprocess.run([*inside, *words], check=True)
        self._pids[node] = pid
        self.slow_receiver(node)
        self.slow_sender(node)
        self.addresses[node] = (host, int(self.ask(node, listen=host)["port"]))

    def ask(self, node: str, **order: Any) -> dict[str, Any]:
        """Have an agent do something; return its answer."""
        self._tell(node, **order)
        return self._read(node)

    def _tell(self, node: str, **order: Any) -> None:
        agent = self._agents[node]
        assert agent.stdin is not None
        agent.stdin.write(json.dumps(order) + "\n")
        agent.stdin.flush()

    def _read(self, node: str) -> dict[str, Any]:
        agent = self._agents[node]
        assert agent.stdout is not None
        line = agent.stdout.readline()
        if not line:
            raise OSError(f"the agent of {node} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def train(self, order: Sequence[str]) -> None:
        """Let trainers restart with these machines as ranks, in this order."""
        for rank, node in enumerate(order):
            place = {"rank": rank, "world": len(order), "host": self.addresses[order[0]][0]}
            self.ask(node, train={**self._train, **place})

    def step_s(self, nodes: Sequence[str], steps: int = 10) -> float:
        """Wait until trainers have made so many more steps; return the median of what one took."""
        for node in nodes:
            self._tell(node, steps=steps)
        return statistics.median([float(self._read(node)["step_s"]) for node in nodes])

    def report(self, node: str) -> NodeReport:
        """Return what a keeper would say of connections now."""
        flows = tuple(
            Flow(worker, (here[0], here[1]), (there[0], there[1]), *counters)
            for worker, here, there, *counters in self.ask(node, look=f"w-{node}")["flows"]
        )
        return NodeReport(node=node, seq=1, workers=(), flows=flows)

    def views(self) -> dict[str, Any]:
        """Return what the shell knows of nodes with keepers that can time transfers."""
        return {
            node: SimpleNamespace(
                node=node, host=host, port=port, secret=_SECRET, lost=asyncio.Event(),
                keeper=SimpleNamespace(rate_to=_RateTo(self, node)),
            )
            for node, (host, port) in self.addresses.items()
        }  # fmt: skip

    def slow_link(self, source: str, target: str, rate: str) -> None:
        """Let no more than ``rate`` through from one machine to another."""
        self._switch.limit_from(target, self.addresses[source][0], rate, self._fast)

    def slow_receiver(self, node: str, rate: str = "") -> None:
        """Let no more through to a machine."""
        self._switch.limit(node, rate or self._fast)

    def slow_sender(self, node: str, rate: str = "") -> None:
        """Let a machine send no more."""
        inside = ["nsenter", "-t", str(self._pids[node]), "-n", "tc", "qdisc"]
        limit = ["root", "tbf", "rate", rate or self._fast, "burst", "256kb", "latency", "400ms"]
        subprocess.run([*inside, "replace", "dev", "eth0", *limit], check=True)

    def heal(self) -> None:
        """Make all cables fast again."""
        for node in self.nodes:
            self._switch.limit(node, "")
            self.slow_receiver(node)
            self.slow_sender(node)


class _RateTo:
    def __init__(self, lab: LinkLab, node: str) -> None:
        self._lab, self._node = lab, node

    async def remote(self, peer: Peer) -> float | None:
        place = [peer.node, peer.host, peer.port]
        answer = await asyncio.to_thread(self._lab.ask, self._node, time=place)
        rate: float | None = answer["rate"]
        return rate


def _end(agent: subprocess.Popen[str]) -> None:
    agent.kill()
    agent.wait()
    for pipe in (agent.stdin, agent.stdout):
        if pipe is not None:
            pipe.close()


def _train(place: dict[str, Any], taken: Any, num: Any) -> None:
    import torch
    import torch.distributed as dist

    # Else ranks of a lab that has ended wait two minutes for one another, and say so then.
    end_with_parent()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place['host']}:{_PORT + place['attempt']}",
        rank=place["rank"],
        world_size=place["world"],
        timeout=timedelta(seconds=120),
    )
    numbers = torch.ones(place["size_bytes"] // 4)
    while True:
        begun_s = time.monotonic()
        dist.all_reduce(numbers)
        numbers.fill_(1.0)
        taken[num.value % len(taken)] = time.monotonic() - begun_s
        num.value += 1
        time.sleep(place["pause_s"])


def _agent() -> None:
    say(pid=os.getpid())
    sockets, context = Sockets(), get_context("spawn")
    trainer: Any = None
    taken, num = context.Array("d", _STEPS_MAX, lock=False), context.Value("Q", lock=False)
    attempt = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "listen" in order:
            server = WireServer(
                ArenaTable(budget_bytes=1 << 20), host=order["listen"], secret=_SECRET
            )
            say(port=server.address[1])
        elif "train" in order:
            if trainer is not None:
                trainer.kill()
                trainer.join()
            attempt += 1
            place = {**order["train"], "attempt": attempt}
            trainer = context.Process(target=_train, args=(place, taken, num), daemon=True)
            trainer.start()
            say()
        elif "steps" in order:
            until = num.value + order["steps"]
            while num.value < until:
                time.sleep(0.01)
            last = [taken[each % _STEPS_MAX] for each in range(until - order["steps"], until)]
            say(step_s=statistics.median(last))
        elif "look" in order:
            pid = trainer.pid if trainer is not None else 0
            say(flows=sockets.look({order["look"]: pid}) or ())
        elif "time" in order:
            node, host, port = order["time"]
            try:
                rate = rate_to(Peer(node=node, host=host, port=port, secret=_SECRET))
            except OSError:
                rate = None
            say(rate=rate)


def say(**answer: Any) -> None:
    """Answer whoever started this agent."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _agent()
