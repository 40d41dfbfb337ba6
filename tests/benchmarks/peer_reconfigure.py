"""The peer of everstep's groups: torch's reconfigure (2.14), and what it does not do.

A group that was made with ``enable_reconfigure`` can connect to other members later. Each member
has a handle. All of them must call with the same handles and the same number, which they exchange
here by a board in the store.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import Place, running

#: Their functions are in no release before 2.14.
_dist: Any = dist
_c10d: Any = torch._C._distributed_c10d


def why_not() -> str:
    """Return why nothing can be measured here, or ""."""
    if hasattr(dist, "_reconfigure"):
        return ""
    return f"torch {torch.__version__} has no reconfigure; it came with torch 2.14"


class Groups(Protocol):
    """What the benchmark asks of either kind of groups."""

    def form(self, attempt: int, members: Sequence[int]) -> None:
        """Form a group of ``members``, which all call this."""

    def abort(self) -> None:
        """End the waits of this process, from another thread."""


class Board:
    """What processes tell each other through the store. Each thread needs one of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        self._store = dist.PrefixStore("board", store)

    def post(self, key: str, value: Any) -> None:
        """Tell it to everybody."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str, timeout_s: float = 240.0) -> Any:
        """Return what was told, once it was."""
        self._store.wait([key], timedelta(seconds=timeout_s))
        return json.loads(self._store.get(key))

    def gather(self, key: str, members: Iterable[int]) -> dict[int, Any]:
        """Return what each of them told."""
        return {member: self.read(f"{key}-{member}") for member in members}


class Reconfigured:
    """torch's reconfigurable group of all ranks."""

    def __init__(
        self, place: Place, timeout_s: float, *, num_first: int = 4, port: int | None = None
    ) -> None:
        self.rank = place.rank
        self.board = Board(place.port)
        self.timeout = timedelta(seconds=timeout_s)
        # The group is not connected yet, and need not have this size when it is.
        _dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port or place.port, wait_for_workers=False),
            rank=self.rank,
            world_size=max(num_first, self.rank + 1),
            timeout=self.timeout,
            enable_reconfigure=True,
        )

    def form(self, attempt: int, members: Sequence[int]) -> None:
        """Connect to ``members``."""
        self.board.post(f"handle-{attempt}-{self.rank}", _dist._get_reconfigure_handle())
        handles = list(self.board.gather(f"handle-{attempt}", members).values())
        _dist._reconfigure(attempt, handles, timeout=self.timeout).wait()

    def abort(self) -> None:
        """Call torch's abort."""
        _dist.group.WORLD.abort()


#: A collective that ends at all has ended by then.
_PATIENCE_S: Final = 2.0
#: What each process does; rank 0 returns what it saw.
_Look = Callable[[Place, Reconfigured], Any]


def _waits(place: Place, groups: Reconfigured) -> Any:
    """Two ranks stop one after the other; a second thread forms a group of the rest each time."""
    seen: dict[str, list[Any]] = {"formed_ms": [], "wait_goes_on": [], "new_group_works": []}
    members = list(range(4))
    groups.form(1, members)
    for victim in (3, 2):
        groups.board.post(f"here-{victim}-{place.rank}", value=True)
        groups.board.gather(f"here-{victim}", members)
        if place.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        waiting = threading.Thread(target=_call_for_ever, daemon=True)
        waiting.start()
        # Until it waits for the rank that stopped.
        waiting.join(_PATIENCE_S)
        groups.abort()
        members.remove(victim)
        begun_s = time.monotonic()
        groups.form(10 - victim, members)
        seen["formed_ms"].append(round((time.monotonic() - begun_s) * 1e3, 1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        seen["wait_goes_on"].append(waiting.is_alive())
        seen["new_group_works"].append(_is_done(work))
    return seen


def _call_for_ever() -> None:
    with contextlib.suppress(RuntimeError):
        while True:
            dist.all_reduce(torch.ones(1000))


def _is_done(work: Any) -> bool:
    end_s = time.monotonic() + _PATIENCE_S
    while not work.is_completed() and time.monotonic() < end_s:
        time.sleep(0.001)
    return bool(work.is_completed())


def _second_fault(place: Place, groups: Reconfigured) -> Any:
    """A member is dead when the others form; then they form without it."""
    groups.form(1, range(3))
    groups.board.post(f"handle-2-{place.rank}", _dist._get_reconfigure_handle())
    groups.board.gather("handle-2", range(3))
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.2, groups.abort).start()
    seen = {"forming": _tried(lambda: groups.form(2, range(3)))}
    begun_s = time.monotonic()
    groups.form(3, range(2))
    return seen | {"again_ms": round((time.monotonic() - begun_s) * 1e3, 1)}


def _sub_groups(place: Place, groups: Reconfigured) -> Any:
    """Rank 1 of a mesh of 2 x 2 is lost."""
    groups.form(1, range(4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups.board.post(f"meshed-{place.rank}", value=True)
    groups.board.gather("meshed", range(4))
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    groups.form(2, (0, 2, 3))
    old = mesh.get_group("b")
    seen = {
        "world_size": dist.get_world_size(),
        "ranks_of_world": dist.get_process_group_ranks(dist.group.WORLD),
        "mesh_size": mesh.size(),
        "old_sub_group": _tried(lambda: dist.all_reduce(torch.ones(1), group=old)),
        "new_sub_group": _tried(
            lambda: dist.all_reduce(torch.ones(1), group=dist.new_group(timeout=groups.timeout))
        ),
    }
    groups.board.post(f"seen-{place.rank}", value=True)
    groups.board.gather("seen", (0, 2, 3))
    return seen


def _new_process(place: Place, groups: Reconfigured) -> Any:
    """Ranks 0 and 1 had a sub-group before rank 2 came."""
    if place.rank < 2:
        groups.form(1, range(2))
        dist.new_group()
    groups.form(2, range(3))
    return {"new_sub_group": _tried(lambda: dist.new_group(timeout=groups.timeout))}


def _new_store(place: Place, groups: Reconfigured) -> Any:
    """Rank 2 comes by a store that was started later."""
    if place.rank < 2:
        groups.form(1, range(2))
    if place.rank == 0:
        later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        groups.board.post("port", later.port)
    if place.rank == 2:
        dist.destroy_process_group()
        timeout_s = groups.timeout.total_seconds()
        groups = Reconfigured(place, timeout_s, port=groups.board.read("port"))
    seen = {"forming": _tried(lambda: groups.form(2, range(3)))}
    groups.board.post(f"tried-{place.rank}", value=True)
    groups.board.gather("tried", range(3))
    return seen


def _records(place: Place, groups: Reconfigured) -> Any:
    """What torch's flight recorder and hooks tell of a rank that waits, and of one that stops."""
    groups.form(1, range(2))
    world: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    called: list[str] = []
    world.register_pre_hook(1, lambda _: called.append("begin"))
    world.register_post_hook(2, lambda _: called.append("end"))
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        groups.board.post("recorded", value=True)
    threading.Thread(target=_call_for_ever, daemon=True).start()
    until_s = time.monotonic() + _PATIENCE_S
    trace: dict[str, Any] = {}
    while not trace.get("entries") and time.monotonic() < until_s:
        trace = json.loads(_c10d._dump_fr_trace_json())
    entry = trace["entries"][-1] if trace.get("entries") else {}
    return {
        "own_record": {key: entry.get(key) for key in ("profiling_name", "state")},
        "hooks": called,
        "record_of_stopped": _tried(lambda: groups.board.read("recorded", _PATIENCE_S)),
    }


def _tried(call: Callable[[], Any]) -> str:
    """Return what came of ``call``, and when."""
    begun_s = time.monotonic()
    try:
        call()
        came = "done"
    except (RuntimeError, ValueError) as error:
        came = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return f"{came} ({time.monotonic() - begun_s:.1f} s)"


def _life(look: _Look, place: Place, *, num_first: int, timeout_s: float) -> None:
    groups = Reconfigured(place, timeout_s, num_first=num_first)
    seen = look(place, groups)
    if place.rank == 0:
        groups.board.post("found", seen)
    # A process that ends closes its connections, and the others would see that.
    groups.board.read("end")


def _limit(
    name: str, look: _Look, num_first: int, num_ranks: int, timeout_s: float
) -> dict[str, Any]:
    life = functools.partial(_life, look, num_first=num_first, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory() as folder, running(life, num_ranks, Path(folder)) as ranks:
        return {"limit": name, **Board(ranks.store.port).read("found")}


#: Functions that each take the timeout of the groups and return what was seen.
LIMITS: Final[list[Callable[[float], dict[str, Any]]]] = [
    # Nothing must end by the timeout here.
    lambda timeout_s: _limit("a wait for a stopped rank", _waits, 4, 4, 20 * timeout_s),
    functools.partial(_limit, "a second fault while forming", _second_fault, 3, 3),
    functools.partial(_limit, "sub-groups and meshes", _sub_groups, 4, 4),
    functools.partial(_limit, "sub-groups with a new process", _new_process, 2, 3),
    functools.partial(_limit, "a new process with a new store", _new_store, 2, 3),
    functools.partial(_limit, "records", _records, 2, 2),
]
