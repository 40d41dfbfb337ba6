"""A fabric of two spines: nodes of Linux namespaces with equal-cost routes, hashed over ports.

Each node is its own leaf, with a link to every spine, and the kernel's multipath routing hashes
addresses and ports to one of them, as switches do. Each direction of each link has a limit. All of
it ends with the process that made it. Needs root, and ``ip`` and ``tc`` of iproute2.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Self

#: Time of a full queue at the full rate: a shallow switch's buffer would be less.
_QUEUE = ("burst", "64kb", "limit", "600kb")
_SETTINGS = (
    "net.ipv4.ip_forward=1", "net.ipv4.fib_multipath_hash_policy=1",
    "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
    "net.ipv4.tcp_congestion_control=reno",
)  # fmt: skip


#: Ends a process with the one that started it, also if that one is killed.
_TIED = ("setpriv", "--pdeathsig", "KILL")


@functools.cache
def why_not() -> str:
    """Return why no fabric can be made here; "" if it can."""
    if os.geteuid():
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if not which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with Fabric(num_nodes=2) as fabric:
            fabric.spine_of(0, 1, 20_000, 4000)
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        return f"this kernel makes no fabric: {error}"
    return ""


class _Space:
    """A network namespace."""

    def __init__(self) -> None:
        command = [*_TIED, "unshare", "--net"]
        script = "echo up && exec sleep infinity"
        self.process = subprocess.Popen([*command, "sh", "-c", script], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.call("sysctl", "-q", "-w", *_SETTINGS)
        self.call("ip", "link", "set", "lo", "up")

    def words(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.process.pid), "-n", *words]

    def call(self, *words: str) -> str:
        done = subprocess.run(
            self.words(*words), check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fabric:
    """Nodes that reach each other by every spine."""

    def __init__(self, num_nodes: int = 4, num_spines: int = 2, *, mbit_s: float = 200.0) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._spines = [_Space() for _ in range(num_spines)]
        self._nodes = [_Space() for _ in range(num_nodes)]
        for number, node in enumerate(self._nodes):
            node.call("ip", "addr", "add", f"{self.host(number)}/32", "dev", "lo")
            for place, spine in enumerate(self._spines):
                pid = str(node.process.pid)
                peer = ("peer", "name", f"s{place}", "netns", pid)
                spine.call("ip", "link", "add", f"n{number}", "type", "veth", *peer)
                for space, device, end in ((spine, f"n{number}", 1), (node, f"s{place}", 2)):
                    address = f"10.215.{place * num_nodes + number}.{end}/24"
                    space.call("ip", "addr", "add", address, "dev", device)
                    space.call("ip", "link", "set", device, "up")
                way = f"10.215.{place * num_nodes + number}.2"
                spine.call("ip", "route", "add", f"{self.host(number)}/32", "via", way)
            hops = [
                word
                for place in range(num_spines)
                for word in (
                    "nexthop", "via", f"10.215.{place * num_nodes + number}.1", "dev", f"s{place}",
                )
            ]  # fmt: skip
            node.call("ip", "route", "add", "10.214.0.0/24", "src", self.host(number), *hops)
        for place in range(num_spines):
            self.limit(place, mbit_s)

    def __enter__(self) -> Self:
        """Return the fabric."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes that were started here, and the namespaces."""
        for process in self._processes:
            close(process)
        for space in (*self._nodes, *self._spines):
            space.close()

    @staticmethod
    def host(node: int) -> str:
        """Return the address of a node, which is not that of a link."""
        return f"10.214.0.{node + 1}"

    def limit(self, spine: int, mbit_s: float) -> None:
        """Let no more through each direction of each link of a spine."""
        for number in range(len(self._nodes)):
            self.limit_sent(number, spine, mbit_s)
            self.limit_received(number, spine, mbit_s)

    def limit_sent(self, node: int, spine: int, mbit_s: float) -> None:
        """Let a node send no more to a spine."""
        _limit(self._nodes[node], f"s{spine}", mbit_s)

    def limit_received(self, node: int, spine: int, mbit_s: float) -> None:
        """Let no more through from a spine to a node."""
        _limit(self._spines[spine], f"n{node}", mbit_s)

    def limit_between(self, source: int, target: int, spine: int, mbit_s: float) -> None:
        """Let no more through a spine from one node to another; the rest is not limited."""
        device, space = f"n{target}", self._spines[spine]
        space.call("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb")
        space.call(
            "tc", "class", "add", "dev", device, "parent", "1:", "classid", "1:2", "htb", "rate",
            f"{mbit_s}mbit",
        )  # fmt: skip
        space.call(
            "tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "u32",
            "match", "ip", "src", self.host(source), "flowid", "1:2",
        )  # fmt: skip

    def start(self, node: int, *arguments: str) -> subprocess.Popen[str]:
        """Start this Python on a node; lines go in and out."""
        words = self._nodes[node].words(sys.executable, *arguments)
        process = subprocess.Popen(
            [*_TIED, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def spine_of(self, node: int, other: int, source_port: int, port: int) -> int:
        """Return by which spine a node sends to another from one TCP port to another."""
        told = self._nodes[node].call(
            "ip", "route", "get", self.host(other), "from", self.host(node), "ipproto", "tcp",
            "sport", str(source_port), "dport", str(port),
        )  # fmt: skip
        words = told.split()
        return int(words[words.index("dev") + 1].removeprefix("s"))

    def received_bytes(self, node: int) -> list[int]:
        """Return what a node has received from each spine so far."""
        text = Path(f"/proc/{self._nodes[node].process.pid}/net/dev").read_text()
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        counts = {name.strip(): int(rest.split()[0]) for name, rest in rows.items()}
        return [counts[f"s{place}"] for place in range(len(self._spines))]

    def rate(self, node: int, seconds: float) -> list[float]:
        """Return what a node receives from each spine now, in Mbit/s, headers included."""
        begun_s, before = time.monotonic(), self.received_bytes(node)
        time.sleep(seconds)
        took_s = time.monotonic() - begun_s
        after = self.received_bytes(node)
        return [8e-6 * (new - old) / took_s for old, new in zip(before, after, strict=True)]


def _limit(space: _Space, device: str, mbit_s: float) -> None:
    how = ("root", "tbf", "rate", f"{mbit_s}mbit", *_QUEUE)
    space.call("tc", "qdisc", "replace", "dev", device, *how)


def close(process: subprocess.Popen[str]) -> None:
    """End a process that was started on a node."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def read_line(process: subprocess.Popen[str]) -> Sequence[str]:
    """Return the words of the next line that a process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OSError("the process ended")
    return line.split()


def say(*words: object) -> None:
    """Print a line of words for whoever started this process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
