"""A fault among four ranks over gloo: everstep's groups beside torch's own reconfigure.

    python -m tests.benchmarks reconfigure [--rounds 10] [--timeout 3] [--limits]

Four processes of this machine call collectives in a loop. A fault hits one of them: SIGKILL
(``killed``), SIGSTOP (``stopped``), or it calls no more (``late``). The three others get out of
their collectives, form a group of three, do 20 steps, form a group of four with a new process (or
with the late one) and do 20 steps again. With ``told`` each survivor calls ``abort`` at once in a
second thread. Without it, a survivor learns of the fault from gloo alone. Each line of output is
one kind of fault with one kind of groups:

- ``unblocked_ms``: from the fault until the last survivor is out.
- ``by_abort_ms``: the same, from the order to abort.
- ``by_timeout``: how many survivors got out by the timeout only.
- ``to_three_ms``, ``to_four_ms``: from the order to form until the first collective was right on
  all ranks. A handshake over the store is in it, as is the rendezvous of either kind.
- ``step_before_ms``, ``step_three_ms``, ``step_four_ms``: the median step. Each one is checked.
- ``sockets``, ``threads``: of rank 0 after the first formation, and after all rounds.

``--limits`` adds what torch's reconfigure does not do (``peer_reconfigure``). All of this needs
torch 2.14; with an older one the benchmark says so and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from tests.benchmarks.common import load_average, percentile, spread
from tests.benchmarks.peer_reconfigure import LIMITS, Board, Groups, Reconfigured, why_not
from tests.support.ranks import Place, running
from workers import collectives

NUM_RANKS: Final = 4
NUM_STEPS: Final = 20
#: 100 KB, as a bucket of small gradients.
NUM_ELEMENTS: Final = 25_000
#: (fault, whether the survivors are told).
FAULTS: Final = (
    ("killed", True),
    ("killed", False),
    ("stopped", True),
    ("stopped", False),
    ("late", False),
)
#: How long the threads of a group may need to end, beyond its timeout.
SETTLE_S: Final = 8.0


class Ours:
    """everstep's groups: each formation is an attempt of its own."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._attempt = 0

    def form(self, attempt: int, members: Sequence[int]) -> None:
        """Leave the groups before and form those of ``members``."""
        collectives.leave()
        self._attempt = attempt
        given = self._place.formation(attempt, len(members), self._timeout_s)
        collectives.form(**given | {"rank": members.index(self._place.rank)})

    def abort(self) -> None:
        """End the waits of this process."""
        collectives.abort(self._attempt)


KINDS: Final[dict[str, Any]] = {"everstep": Ours, "torch": Reconfigured}


class Round(NamedTuple):
    """One fault: the processes that it concerns, by their numbers, in order of ranks."""

    number: int
    members: list[int]
    victim: int
    after: list[int]

    @property
    def survivors(self) -> list[int]:
        return [member for member in self.members if member != self.victim]


def schedule(fault: str, rounds: int) -> list[Round]:
    """Return the rounds. A dead process is replaced by a new one, a late one returns."""
    found: list[Round] = []
    members = list(range(NUM_RANKS))
    for number in range(rounds):
        place = 1 + number % (NUM_RANKS - 1)
        after = list(members)
        if fault != "late":
            after[place] = NUM_RANKS + number
        found.append(Round(number, members, members[place], after))
        members = after
    return found


def step(members: Sequence[int], own: int) -> None:
    """Call two collectives and check what they return."""
    rank, num_ranks = members.index(own), len(members)
    value = torch.full((NUM_ELEMENTS,), rank + 1.0)
    dist.all_reduce(value)
    parts = [torch.zeros(8) for _ in members]
    dist.all_gather(parts, torch.full((8,), float(rank)))
    assert bool((value == num_ranks * (num_ranks + 1) / 2).all()), value
    assert [part[0].item() for part in parts] == list(range(num_ranks)), parts


def steps_ms(members: Sequence[int], own: int) -> float:
    """Do some steps; return how long the median one took."""
    took_ms = []
    for _ in range(NUM_STEPS):
        begun_s = time.perf_counter()
        step(members, own)
        took_ms.append((time.perf_counter() - begun_s) * 1e3)
    return percentile(took_ms, 0.5)


def held() -> tuple[int, int]:
    """Return how many sockets and threads this process has."""
    num_sockets = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            num_sockets += str(each.readlink()).startswith("socket:")
    return num_sockets, len(list(Path("/proc/self/task").iterdir()))


def live(place: Place, *, kind: str, fault: str, told: bool, rounds: int, timeout_s: float) -> Any:
    """Be one process in all rounds; return what it held at first and at last."""
    board, own = Board(place.port), place.rank
    groups: Groups = KINDS[kind](place, timeout_s)
    before = held()
    for one in schedule(fault, rounds):
        if own in one.members:
            if one.number == 0:
                _form(groups, board, "form", 1, one.members, own)
                before = held()
            _until_fault(groups, board, one, own, fault=fault, told=told)
            if own != one.victim:
                board.read(f"shrink-{one.number}")
                _form(groups, board, f"shrunk-{one.number}", 2 * one.number + 2, one.survivors, own)
        if own in one.after:
            board.read(f"grow-{one.number}")
            _form(groups, board, f"grown-{one.number}", 2 * one.number + 3, one.after, own)
    end_s = time.monotonic() + timeout_s + SETTLE_S
    while time.monotonic() < end_s and any(a > b for a, b in zip(held(), before, strict=True)):
        time.sleep(0.05)
    left = held()
    board.post(f"end-{own}", value=True)
    board.read("end")
    return before, left


def _form(
    groups: Groups, board: Board, said: str, attempt: int, members: list[int], own: int
) -> None:
    groups.form(attempt, members)
    step(members, own)
    done_s = time.monotonic()
    board.post(f"{said}-{own}", {"at_s": done_s, "step_ms": steps_ms(members, own)})


def _until_fault(
    groups: Groups, board: Board, one: Round, own: int, *, fault: str, told: bool
) -> None:
    if told:
        port = board.port

        def heed() -> None:
            Board(port).read(f"abort-{one.number}")
            groups.abort()

        threading.Thread(target=heed, daemon=True).start()
    steady = {"step_ms": steps_ms(one.members, own), "at_s": time.monotonic()}
    board.post(f"steady-{one.number}-{own}", steady)
    if fault == "late" and own == one.victim:
        return
    try:
        while True:
            step(one.members, own)
    except (collectives.GroupError, RuntimeError):
        board.post(f"out-{one.number}-{own}", {"at_s": time.monotonic()})


def play(kind: str, fault: str, *, told: bool, rounds: int, timeout_s: float) -> dict[str, Any]:
    """Hurt a group again and again; return what that took."""
    found: dict[str, list[float]] = {}
    play_round = functools.partial(_play, fault=fault, told=told, timeout_s=timeout_s, found=found)
    life = functools.partial(
        live, kind=kind, fault=fault, told=told, rounds=rounds, timeout_s=timeout_s
    )
    num_processes = NUM_RANKS + (0 if fault == "late" else rounds)
    chosen = schedule(fault, rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(life, num_processes, Path(folder)) as ranks,
    ):
        board = Board(ranks.store.port)
        board.gather("form", chosen[0].members)
        for one in chosen:
            play_round(board, ranks.pid(one.victim), one)
        board.gather("end", chosen[-1].after)
        board.post("end", value=True)
        before, left = ranks.results()[0]
    by_timeout = found.pop("by_timeout")
    return {
        "fault": fault,
        "told": told,
        "groups": kind,
        **{name: spread(values) for name, values in found.items()},
        "by_timeout": f"{sum(map(int, by_timeout))} of {rounds * (NUM_RANKS - 1)}",
        "sockets": [before[0], left[0]],
        "threads": [before[1], left[1]],
        "load": load_average()[0],
    }


def _play(
    board: Board,
    pid: int,
    one: Round,
    *,
    fault: str,
    told: bool,
    timeout_s: float,
    found: dict[str, list[float]],
) -> None:
    """Play a round and add its figures to ``found``."""

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    steady = board.gather(f"steady-{one.number}", one.members)
    if fault == "late":
        fault_s = steady[one.victim]["at_s"]
    else:
        # A moment anywhere in a step.
        time.sleep(random.uniform(0.0, 0.02))
        fault_s = time.monotonic()
        os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    told_s = time.monotonic()
    if told:
        board.post(f"abort-{one.number}", value=True)
    out_s = [said["at_s"] for said in board.gather(f"out-{one.number}", one.survivors).values()]
    if fault == "stopped":
        os.kill(pid, signal.SIGKILL)
    note("unblocked_ms", (max(out_s) - fault_s) * 1e3)
    if told:
        note("by_abort_ms", (max(out_s) - told_s) * 1e3)
    note("by_timeout", sum(at_s - fault_s > 0.9 * timeout_s for at_s in out_s))
    note("step_before_ms", max(said["step_ms"] for said in steady.values()))
    for order, answer, name, members in (
        ("shrink", "shrunk", "three", one.survivors),
        ("grow", "grown", "four", one.after),
    ):
        ordered_s = time.monotonic()
        board.post(f"{order}-{one.number}", value=True)
        said = board.gather(f"{answer}-{one.number}", members).values()
        note(f"to_{name}_ms", (max(each["at_s"] for each in said) - ordered_s) * 1e3)
        note(f"step_{name}_ms", max(each["step_ms"] for each in said))


def main() -> None:
    """Print one JSON object for each fault and kind of groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=3.0, help="of a collective, in seconds")
    parser.add_argument("--limits", action="store_true", help="what torch's does not do")
    options = parser.parse_args()
    if reason := why_not():
        print(json.dumps({"skipped": reason}))
        return
    for fault, told in FAULTS:
        for kind in KINDS:
            row = play(kind, fault, told=told, rounds=options.rounds, timeout_s=options.timeout)
            print(json.dumps(row), flush=True)
    for limit in LIMITS if options.limits else ():
        print(json.dumps(limit(options.timeout)), flush=True)


if __name__ == "__main__":
    main()
