"""Copies between keepers over a fabric of two spines, beside training and a spine that slows down.

    python -m tests.benchmarks traffic [--mib 96] [--rounds 6] [--mbit 200]

Four nodes of namespaces, each with a link to two spines; the kernel hashes connections to one of
them (``tests.support.fabric``). A real keeper's server on one node, its mirror on another.

- ``one_mbit_s``: one connection, which is what any number of them gets that meet on one spine;
  ``streams_mbit_s``: the mirror; 1.7 times as much is asked for.
- ``step``: a training of two nodes whose sums fill a spine for more than half of each step, alone,
  beside one connection on the same spine, and beside the mirror. At most 5 % longer is asked for.
- ``back_s``: from the moment when a spine slows down to a tenth until half a second in which copies
  have 0.9 of what both spines carry then; 5 s are asked for.

Rates are those of the links, headers included. NCCL's own paths are not ours to choose: switches
may route adaptively, and its environment only sets how many connections there are
(NCCL_IB_QPS_PER_CONNECTION).
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from tests.support.fabric import Fabric, close, read_line
from workers.keeper.arena_table import ArenaTable
from workers.keeper.descriptor_server import DescriptorServer
from workers.keeper.peers.client import WireClient
from workers.keeper.peers.mirror import Mirrors
from workers.keeper.peers.server import WireServer
from workers.memory import descriptor_socket, notify
from workers.protocol import Held, Peer

SECRET: Final = b"of this benchmark"
ARENA: Final = "w0000.0"
HOLDER, COPIER = 0, 1
TRAIN_PORT: Final = 4000
TARGETS: Final = {"gain": 1.7, "longer": 1.05, "back_s": 5.0}
#: A step: bytes each way, and computation.
STEP_S, STEP_SHARE = 0.8, 0.6


def hold(host: str, size_bytes: int) -> None:
    """Serve a rank's snapshots, a new one whenever the last is copied, until it is killed."""
    table = ArenaTable(budget_bytes=1 << 40)
    arena = table.reserve(ARENA, body_bytes=size_bytes)
    server = WireServer(table, host=host, secret=SECRET)
    print(server.address[1], flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = descriptor_socket(Path(directory))
        # It serves until the process is killed.
        _door = DescriptorServer(path, table)
        step = 0
        while True:
            buffer = arena.choose(())
            step += 1
            arena.begin(buffer, attempt=1, step=step, rank=0, world_size=1)
            arena.finish(buffer, data_bytes=size_bytes, record_bytes=0)
            begun_s = time.perf_counter()
            notify(path, ARENA)
            while not arena.is_followed() or arena.copy_behind():
                time.sleep(1e-3)
            print(time.perf_counter() - begun_s, flush=True)


def copy(host: str, port: int, *, plain_from: int) -> None:
    """Copy from the holder: as a mirror, or over one connection from a source port."""
    if not plain_from:
        mirrors = Mirrors(ArenaTable(budget_bytes=1 << 40))
        mirrors.follow([Peer(node="holder", host=host, port=port, secret=SECRET)])
        sys.stdin.read()
        mirrors.stop()
        return
    client = WireClient((host, port), secret=SECRET)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind(("", plain_from))
    connection.connect((host, port))
    client.use(connection)
    news, copied = -1, dict[str, Held]()
    while True:
        listing = client.list_arenas(after=news, timeout_s=1.0, copied=copied)
        news, held = listing.news, listing.arenas[ARENA].parts[-1]
        if copied.get(ARENA) != held:
            client.read(ARENA, held, 0, [memoryview(bytearray(held.data_bytes))])
            copied = {ARENA: held}


def train(host: str, other: str, source_port: int, size_bytes: int, compute_s: float) -> None:
    """Send and receive so much each step, as a ring of two does; print how long each step took."""
    listener = socket.create_server((host, TRAIN_PORT))
    print("up", flush=True)
    sys.stdin.readline()
    sending = socket.create_connection((other, TRAIN_PORT), source_address=(host, source_port))
    receiving, _ = listener.accept()
    payload, space = memoryview(bytearray(size_bytes)), memoryview(bytearray(size_bytes))
    while True:
        begun_s = time.perf_counter()
        thread = threading.Thread(target=sending.sendall, args=(payload,))
        thread.start()
        done = 0
        while done < size_bytes:
            done += receiving.recv_into(space[done:])
        thread.join()
        time.sleep(compute_s)
        print(time.perf_counter() - begun_s, flush=True)


class Bench:
    """The processes on a fabric."""

    def __init__(self, fabric: Fabric, size_bytes: int, mbit_s: float) -> None:
        self.fabric = fabric
        self.size_bytes = size_bytes
        self.mbit_s = mbit_s

    def role(self, node: int, *words: str) -> Any:
        """Start a role of this module on a node."""
        return self.fabric.start(node, "-m", "tests.benchmarks.bench_traffic", *words)

    def copies(self, spine: int | None = None) -> tuple[Any, Any]:
        """Start a holder and a copier: a mirror, or one connection by a spine both ways."""
        holder = self.role(HOLDER, "--hold", self.fabric.host(HOLDER), str(self.size_bytes))
        port = int(read_line(holder)[0])
        source = 0
        if spine is not None:
            source = next(
                each
                for each in range(21_000, 22_000)
                if self.fabric.spine_of(COPIER, HOLDER, each, port) == spine
                and self.fabric.spine_of(HOLDER, COPIER, port, each) == spine
            )
        words = ["--copy", self.fabric.host(HOLDER), str(port), str(source)]
        return holder, self.role(COPIER, *words)

    def training(self) -> Any:
        """Start the training over spine 0; its steps can be read from what is returned."""
        size = str(int(STEP_S * STEP_SHARE * self.mbit_s * 1e6 / 8 * 0.95))
        nodes, found = (HOLDER, COPIER), []
        for here, there in (nodes, nodes[::-1]):
            source = self.fabric.port_by(here, there, 0, TRAIN_PORT)
            words = [self.fabric.host(here), self.fabric.host(there), str(source), size]
            found.append(self.role(here, "--train", *words, str(STEP_S * (1 - STEP_SHARE))))
        for each in found:
            read_line(each)
        for each in found:
            each.stdin.write("\n")
        return found[0]


def end(*processes: Any) -> None:
    """End processes."""
    for each in processes:
        close(each)


class Times:
    """The durations that a process prints, as they come."""

    def __init__(self, process: Any) -> None:
        self._came = threading.Condition()
        self._found: list[float] = []
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: Any) -> None:
        for line in process.stdout:
            with self._came:
                self._found.append(float(line))
                self._came.notify_all()

    def next(self, number: int) -> list[float]:
        """Return those of what ends from now on."""
        with self._came:
            end = len(self._found) + number
            if not self._came.wait_for(lambda: len(self._found) >= end, 120.0):
                raise TimeoutError("nothing comes to an end")
            return self._found[end - number : end]


def measure_rates(bench: Bench, rounds: int) -> dict[str, Any]:
    """Return the rate of copies over one connection, and of the mirror."""
    found: dict[str, Any] = {}
    for name, spine in (("one", 0), ("streams", None)):
        processes = bench.copies(spine)
        took_s = Times(processes[0]).next(rounds)[1:]
        end(*reversed(processes))
        rates = [8e-6 * bench.size_bytes / each for each in took_s]
        found[f"{name}_mbit_s"] = [round(each) for each in rates]
        found[name] = statistics.median(rates)
    return {
        "one_mbit_s": found["one_mbit_s"],
        "streams_mbit_s": found["streams_mbit_s"],
        "gain": round(found["streams"] / found["one"], 2),
    }


def measure_steps(bench: Bench, num_steps: int, rounds: int) -> dict[str, Any]:
    """Return the time of steps alone, beside one connection by the same spine, and the mirror."""
    training = bench.training()
    steps = Times(training)
    found: dict[str, list[float]] = {"alone": [], "one": [], "streams": []}
    rates: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        # In turn: the machine is as busy for one as for another.
        for name in found:
            copies = [] if name == "alone" else bench.copies(0 if name == "one" else None)
            if copies:
                Times(copies[0]).next(1)
            before, begun_s = sum(bench.fabric.received_bytes(COPIER)), time.monotonic()
            found[name] += steps.next(num_steps)
            took_s = time.monotonic() - begun_s
            sent = sum(bench.fabric.received_bytes(COPIER)) - before
            rates[name].append(8e-6 * sent / took_s)
            end(*reversed(copies))
            steps.next(2)
    end(training)
    mean = {name: statistics.fmean(each) for name, each in found.items()}
    return {
        "step_s": {name: round(each, 3) for name, each in mean.items()},
        "one_longer": round(mean["one"] / mean["alone"], 3),
        "longer": round(mean["streams"] / mean["alone"], 3),
        "links_mbit_s": {name: round(statistics.fmean(each)) for name, each in rates.items()},
    }


def measure_slow(bench: Bench, seconds: float) -> dict[str, Any]:
    """Return how soon copies have 0.9 of what is left after a spine slows down to a tenth."""
    holder, copier = bench.copies()
    Times(holder).next(2)
    before = sum(bench.fabric.rate(COPIER, 1.0))
    bench.fabric.limit(0, bench.mbit_s / 10)
    begun_s, left, back_s, rates = time.monotonic(), 1.1 * bench.mbit_s, None, []
    while time.monotonic() - begun_s < seconds:
        rates.append(round(sum(bench.fabric.rate(COPIER, 0.5)) / left, 2))
        if back_s is None and rates[-1] >= 0.9:
            back_s = round(time.monotonic() - begun_s, 2)
    bench.fabric.limit(0, bench.mbit_s)
    end(copier, holder)
    return {"before_mbit_s": round(before), "share_of_left": rates, "back_s": back_s}


def main() -> None:
    """Print one JSON object; ``missed`` names the targets that were not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--copy", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        hold(given.hold[0], int(given.hold[1]))
    elif given.copy:
        copy(given.copy[0], int(given.copy[1]), plain_from=int(given.copy[2]))
    elif given.train:
        host, other, source, size, compute_s = given.train
        train(host, other, int(source), int(size), float(compute_s))
    else:
        with Fabric(mbit_s=given.mbit) as fabric:
            bench = Bench(fabric, given.mib << 20, given.mbit)
            found: dict[str, Any] = {}
            if given.only in ("", "rates"):
                found |= measure_rates(bench, given.rounds)
            if given.only in ("", "steps"):
                found |= measure_steps(bench, given.steps, rounds=2)
            if given.only in ("", "slow"):
                found |= measure_slow(bench, 10.0)
        found["missed"] = [
            name
            for name, target in TARGETS.items()
            if name in found and (found[name] is None or (found[name] < target) == (name == "gain"))
        ]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
