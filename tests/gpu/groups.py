"""Groups of four ranks on one device: form, use, abort, form again; a peer that dies.

Whether their collectives are right, the tests with the marker gpu show.
"""

import functools
import os
import threading
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from tests.gpu.parts import Lab
from tests.gpu.rows import tell
from tests.support.ranks import Place, running, until
from workers import collectives
from workers.collectives import AbortedError, CollectiveError
from workers.telemetry import RingReader

NUM_RANKS: Final = 4
#: Formed, aborted and left so often; the first ones fill caches that stay.
ATTEMPTS: Final = 20
SETTLED: Final = 4
LEAK_BYTES_MAX: Final = 64 << 20
#: An aborted communicator is released by a thread of its own.
STABLE_S, STABLE_S_MAX = 1.0, 10.0
RUN_S_MAX: Final = 150.0
#: A rank waits when it does so for longer than for a late one.
WAITED_S: Final = 0.2
#: A peer that dies closes its sockets, which NCCL sees or not.
NOTICED_S_MAX: Final = 10.0
NOTHING: Final = "nothing"


def groups(lab: Lab) -> None:
    """Tell what four ranks saw."""
    attempts = ATTEMPTS if lab.full else 6
    play = functools.partial(_play, on_cpu=lab.on_cpu, attempts=attempts)
    with lab.folder("groups") as folder, running(play, NUM_RANKS, folder) as ranks:
        seen = ranks.results(RUN_S_MAX)
    formed, unblocked = (max(one[name] for one in seen) for name in ("form_s", "unblock_s"))
    tell("groups", "forming, slowest of the last", f"{formed:.2f} s")
    tell("groups", "one small all-reduce", f"{1e3 * seen[0]['small_s']:.2f} ms")
    tell("groups", "abort to unblocked, slowest", f"{unblocked:.3f} s", "<= 2 s", ok=unblocked <= 2)
    leaked = max(one["leaked_bytes"] for one in seen)
    what = f"device memory after {attempts} attempts over {SETTLED}"
    tell("groups", what, f"{leaked / 2**20:.0f} MiB", "<= 64", ok=leaked <= LEAK_BYTES_MAX)
    dead = functools.partial(_recv_from_dead, on_cpu=lab.on_cpu)
    with lab.folder("dead") as folder, running(dead, NUM_RANKS, folder) as ranks:
        told = next(one for one in ranks.results(RUN_S_MAX) if one is not None)
    is_raised = not told.startswith(NOTHING)
    tell("groups", "recv from a dead peer", told, "raises", ok=is_raised)


def _device(place: Place, *, on_cpu: bool) -> torch.device:
    if not on_cpu:
        torch.cuda.set_per_process_memory_fraction(1 / NUM_RANKS)
        collectives.share_device(f"rank{place.rank}", 1 / NUM_RANKS)
    return torch.device("cpu" if on_cpu else "cuda")


def _play(place: Place, *, on_cpu: bool, attempts: int) -> dict[str, Any]:
    device = _device(place, on_cpu=on_cpu)
    store = dist.TCPStore("127.0.0.1", place.port, wait_for_workers=False)
    seen: dict[str, Any] = {"leaked_bytes": 0, "unblock_s": 0.0}
    used_bytes: dict[int, int] = {}
    for attempt in range(1, attempts + 1):
        begun_s = time.monotonic()
        _form(place, attempt, on_cpu=on_cpu)
        seen["form_s"] = time.monotonic() - begun_s
        if attempt == 1:
            seen["small_s"] = _small_s(device)
        unblocked_s = _abort_in_flight(place, attempt, device, store)
        if attempt > 1:
            seen["unblock_s"] = max(seen["unblock_s"], unblocked_s)
        collectives.leave()
        _meet(store, f"left-{attempt}")
        if not on_cpu and attempt in (SETTLED, attempts):
            torch.cuda.empty_cache()
            used_bytes[attempt] = _used_bytes()
            _meet(store, f"measured-{attempt}")
            seen["leaked_bytes"] = used_bytes[attempt] - used_bytes[SETTLED]
    return seen


def _used_bytes() -> int:
    """Return the memory that all ranks have on the device, once they release no more of it."""
    since_s = begun_s = time.monotonic()
    used: tuple[int, int] | None = None
    while time.monotonic() - since_s < STABLE_S and time.monotonic() - begun_s < STABLE_S_MAX:
        found = torch.cuda.mem_get_info()
        if found != used:
            used, since_s = found, time.monotonic()
        time.sleep(0.05)
    assert used is not None
    free, total = used
    return total - free


def _form(place: Place, attempt: int, *, on_cpu: bool) -> None:
    how = place.formation(attempt, NUM_RANKS) | {"backend": "gloo" if on_cpu else "nccl"}
    collectives.form(**how)


def _meet(store: dist.TCPStore, name: str) -> None:
    """Return when every rank has come here."""
    if store.add(name, 1) == NUM_RANKS:
        store.set(f"{name}-all", "")
    store.wait([f"{name}-all"])


def _small_s(device: torch.device, count: int = 20) -> float:
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    tensor.item()
    begun_s = time.monotonic()
    for _ in range(count):
        dist.all_reduce(tensor)
    tensor.item()
    return (time.monotonic() - begun_s) / count


def _abort_in_flight(
    place: Place, attempt: int, device: torch.device, store: dist.TCPStore
) -> float:
    """Wait for a rank that does not come, abort that, and return how long the wait went on."""
    dist.barrier()
    if place.rank == NUM_RANKS - 1:
        # Its end would end the wait of the others.
        _meet(store, f"unblocked-{attempt}")
        collectives.abort(attempt)
        return 0.0
    tensor = torch.ones(1 << 20, device=device)
    aborted: list[float] = []
    is_over = threading.Event()

    def waits() -> bool:
        # The abort of another rank may have ended the wait by closing the connection.
        return is_over.is_set() or any(one.waiting_s > WAITED_S for one in reader.look().groups)

    def abort() -> None:
        until(waits, "waiting")
        aborted.append(time.monotonic())
        collectives.abort(attempt)

    reader = RingReader(place.ring_path)
    thread = threading.Thread(target=abort)
    thread.start()
    try:
        dist.all_reduce(tensor)
        tensor[0].item()
        collectives.check()
    except (AbortedError, CollectiveError):
        pass
    ended_s = time.monotonic()
    is_over.set()
    thread.join()
    _meet(store, f"unblocked-{attempt}")
    return max(0.0, ended_s - aborted[0])


def _recv_from_dead(place: Place, *, on_cpu: bool) -> str:
    """Receive from a rank that has died; abort if the transport does not notice.

    Each pair has sent before: NCCL connects a pair at its first use, and nothing ends that.
    """
    device, attempt = _device(place, on_cpu=on_cpu), 1
    _form(place, attempt, on_cpu=on_cpu)
    tensor = torch.zeros(4, device=device)
    if place.rank == NUM_RANKS - 1:
        dist.send(tensor, 0)
    elif place.rank == 0:
        dist.recv(tensor, NUM_RANKS - 1)
        for other in range(1, NUM_RANKS - 1):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)
    tensor[0].item()
    dist.barrier()
    if place.rank == NUM_RANKS - 1:
        os._exit(0)
    timer = threading.Timer(NOTICED_S_MAX, collectives.abort, [attempt])
    timer.start()
    begun_s = time.monotonic()
    told = NOTHING
    try:
        dist.recv(tensor, 0 if place.rank else NUM_RANKS - 1)
        tensor[0].item()
        while time.monotonic() - begun_s < NOTICED_S_MAX + 5:
            # On a device the error comes from the thread that looks at it.
            collectives.check()
            time.sleep(0.01)
    except (AbortedError, CollectiveError) as error:
        told = type(error).__name__
        collectives.abort(attempt)
    timer.cancel()
    took_s = time.monotonic() - begun_s
    collectives.leave()
    return f"{told} after {took_s:.2f} s"
