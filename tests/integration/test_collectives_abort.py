"""Abort, leave and form again, with real processes over gloo.

One group of processes goes through one attempt after another, as workers do; each test looks
at what one attempt left behind.
"""

import contextlib
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.collective_cases import reduce_scatter_single
from tests.support.ranks import Place, running, until
from workers import collectives
from workers.collectives import AbortedError, CollectiveError
from workers.telemetry import RingReader

#: An abort takes a few milliseconds on an idle machine; the bound allows for a busy one, and is far
#: below the timeout of what is aborted.
ABORT_S_MAX = 20.0
NUM_RANKS = 4


def all_reduce(_: int) -> None:
    dist.all_reduce(torch.ones(1000))


def reduce_scatter(world_size: int) -> None:
    reduce_scatter_single(torch.zeros(8), torch.ones(8 * world_size))


def all_to_all(world_size: int) -> None:
    dist.all_to_all_single(torch.zeros(world_size), torch.ones(world_size))


def send_recv(world_size: int) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(4), world_size - 1)
    else:
        dist.recv(torch.zeros(4), 0)


def recv_from_anybody(_: int) -> None:
    dist.recv(torch.zeros(4))


def barrier(_: int) -> None:
    dist.barrier()


def fsdp_forward(world_size: int) -> None:
    model, loss = _fsdp(world_size)
    del model
    assert loss > 0


def fsdp_backward(_: int) -> None:
    model, loss = _FORWARDED.pop()
    loss.backward()
    del model


def _fsdp(world_size: int) -> tuple[nn.Module, torch.Tensor]:
    replicas = 2 if world_size == NUM_RANKS else 1
    mesh = init_device_mesh(
        "cpu", (replicas, world_size // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model(torch.ones(4, 16)).square().sum()


#: Model and loss of the forward pass before ``fsdp_backward``, in this process.
_FORWARDED: list[tuple[nn.Module, torch.Tensor]] = []

#: (what is aborted, number of ranks); one attempt each, in this order: torch 2.11 crashes if the
#: thread that used DTensor first has ended.
PLAYS: list[tuple[Callable[[int], None], int]] = [
    (all_reduce, 4),
    (reduce_scatter, 3),
    (all_to_all, 4),
    (send_recv, 2),
    (recv_from_anybody, 3),
    (barrier, 3),
    (fsdp_backward, 4),
    (fsdp_forward, 3),
]


def _play(place: Place, attempt: int, operation: Callable[[int], None], size: int) -> Any:
    """Call ``operation`` on all ranks but the last; abort it where it waits."""
    if place.rank >= size:
        return None
    collectives.form(**place.formation(attempt, size))
    dist.barrier()
    collectives.check()
    checked: dict[str, Any] = {}
    missing = place.rank == size - 1
    waits: list[tuple[str, tuple[int, ...], str]] = []
    caught: list[tuple[float, BaseException]] = []
    if operation is fsdp_backward:
        _FORWARDED.append(_fsdp(size))
        # For whoever was aborted in the forward pass another one would wait there for ever.
        _meet(place, f"forward-{attempt}", size)

    def call() -> None:
        try:
            if not missing:
                operation(size)
        except (AbortedError, CollectiveError) as error:
            caught.append((time.monotonic(), error.with_traceback(None)))

    thread = threading.Thread(target=call)
    thread.start()
    if missing:
        thread.join()
    else:
        until(
            lambda: any(
                group.waiting_s > 1.0 for group in RingReader(place.ring_path).look().groups
            ),
            f"waiting in {operation.__name__} for longer than those need who only are late",
        )
        groups = RingReader(place.ring_path).look().groups
        waits = [(one.group, tuple(one.ranks), one.op) for one in groups if one.waiting_s]
    aborted_s = time.monotonic()
    collectives.abort(attempt)
    thread.join()
    later: BaseException | None = None
    try:
        dist.all_reduce(torch.ones(1))
    except AbortedError as error:
        later = error.with_traceback(None)
    try:
        collectives.check()
    except AbortedError as error:
        checked = error.facts
    # Leaving closes connections, which whoever does not wait yet would see as a loss.
    _meet(place, f"attempt-{attempt}", size)
    collectives.leave()
    return {
        "latency_s": [when_s - aborted_s for when_s, _ in caught],
        "errors": [error for _, error in caught],
        "later": later,
        "checked": checked,
        "waits": waits,
    }


def _meet(place: Place, where: str, size: int) -> None:
    """Return once so many ranks have come there."""
    (place.directory / f"{where}-by-{place.rank}").touch()
    until(lambda: len(list(place.directory.glob(f"{where}-by-*"))) == size, f"all at {where}")


def play_all(place: Place) -> list[Any]:
    results = [_play(place, attempt, *play) for attempt, play in enumerate(PLAYS, start=1)]
    # A process that ends closes its connections, which the others would rightly see as a loss.
    _meet(place, "end", NUM_RANKS)
    return results


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with running(play_all, NUM_RANKS, tmp_path_factory.mktemp("rings")) as ranks:
        yield ranks.results()


@pytest.mark.parametrize("index", range(len(PLAYS)), ids=[play[0].__name__ for play in PLAYS])
def test_abort_from_another_thread_ends_the_wait(played: list[Any], index: int) -> None:
    """gloo's own abort leaves all of these asleep until their timeout."""
    operation, size = PLAYS[index]
    waiting = [played[rank][index] for rank in range(size - 1)]

    assert all(len(one["errors"]) == 1 for one in waiting)
    assert {type(one["errors"][0]) for one in waiting} == {AbortedError}
    assert max(one["latency_s"][0] for one in waiting) < ABORT_S_MAX
    assert f"attempt {index + 1} was aborted during" in str(waiting[0]["errors"][0])
    assert operation is PLAYS[index][0]


@pytest.mark.parametrize("index", range(len(PLAYS)), ids=[play[0].__name__ for play in PLAYS])
def test_calls_after_an_abort_raise_at_once(played: list[Any], index: int) -> None:
    """Training code that swallows the first error must not go on in a fenced attempt."""
    for rank in range(PLAYS[index][1]):
        later = played[rank][index]["later"]
        assert isinstance(later, AbortedError)
        assert later.facts == {"attempt": index + 1, "op": "all_reduce"}
        assert played[rank][index]["checked"] == {"attempt": index + 1, "op": "check"}


def test_a_wait_for_anybody_is_of_its_rank_alone(played: list[Any]) -> None:
    """torch calls it by a name of its own. Passed by, a rank that waits seems to compute."""
    index = PLAYS.index((recv_from_anybody, 3))

    for rank in (0, 1):
        assert played[rank][index]["waits"] == [(f"world *>{rank}", (rank,), "recv")]


def wait_for_a_missing_peer(place: Place) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    collectives.abort(1)
    for attempt in (1, 2):
        thread_at: list[float] = []

        def fence(number: int = attempt, at: list[float] = thread_at) -> None:
            # Until then the rendezvous has no peer to wait for: the other one never comes.
            until(lambda: bool(list(place.directory.glob("w0.ring"))), "forming")
            time.sleep(0.3)
            at.append(time.monotonic())
            collectives.abort(number)

        thread = threading.Thread(target=fence)
        thread.start()
        start_s = time.monotonic()
        with contextlib.suppress(AbortedError):
            collectives.form(**place.formation(attempt, 2))
            outcomes["formed"] = attempt
        ended_s = time.monotonic()
        thread.join()
        outcomes[f"attempt {attempt}"] = (ended_s - start_s, ended_s - thread_at[0])
        collectives.leave()
    collectives.form(**place.formation(3, 1))
    x = torch.ones(1)
    dist.all_reduce(x)
    collectives.leave()
    return outcomes | {"sum": x.item()}


def test_form_can_be_aborted_while_a_peer_is_missing(tmp_path: Path) -> None:
    """A second fault during re-formation is the usual way to get here; no group exists yet."""
    with running(wait_for_a_missing_peer, 1, tmp_path) as ranks:
        (outcomes,) = ranks.results()

    assert "formed" not in outcomes
    assert outcomes["attempt 1"][0] < 0.3 + ABORT_S_MAX
    assert outcomes["attempt 2"][1] < ABORT_S_MAX
    assert outcomes["sum"] == 1.0


def meet_a_newcomer(place: Place) -> float:
    if place.rank == 0:

        def fence() -> None:
            until(lambda: distributed_c10d._world.group_count > 0, "the groups of attempt 1")
            collectives.abort(1)

        thread = threading.Thread(target=fence)
        thread.start()
        with contextlib.suppress(AbortedError):
            collectives.form(**place.formation(1, 2))
        thread.join()
        collectives.leave()
    collectives.form(**place.formation(2, 2))
    x = torch.ones(1)
    dist.all_reduce(x)
    collectives.leave()
    return x.item()


def test_a_survivor_of_an_aborted_formation_forms_with_a_newcomer(tmp_path: Path) -> None:
    """torch counts the groups a process has begun; a new process has begun none."""
    with running(meet_a_newcomer, 2, tmp_path) as ranks:
        assert ranks.results() == [2.0, 2.0]


def outlive_a_peer(place: Place) -> Any:
    collectives.form(**place.formation(1, 3))
    dist.all_reduce(torch.ones(1000))
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    timer = threading.Timer(1.0, collectives.abort, (1,))
    timer.start()
    start_s = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except (AbortedError, CollectiveError) as error:
        seen = error.with_traceback(None)
    waited_s = time.monotonic() - start_s
    timer.join()
    collectives.leave()
    collectives.form(**place.formation(2, 2))
    x = torch.ones(1)
    dist.all_reduce(x)
    return seen, waited_s, x.item(), _wait_in_vain(place)


def _wait_in_vain(place: Place) -> float:
    """Leave the attempt after rank 0 has called a collective alone; return for how long."""
    collectives.set_timeout(0.5)
    done = place.directory / "waited in vain"
    begun_s = time.monotonic()
    # Rank 0 must not have begun long before.
    _meet(place, "waiting in vain", 2)
    if place.rank == 0:
        with contextlib.suppress(CollectiveError):
            dist.all_reduce(torch.ones(1))
        done.touch()
    until(done.exists, "rank 0")
    waited_s = time.monotonic() - begun_s
    collectives.leave()
    return waited_s


def test_survivors_of_a_killed_peer_form_again(tmp_path: Path) -> None:
    """gloo tells some survivors at once and others never: all must be out after the abort."""
    with running(outlive_a_peer, 3, tmp_path) as ranks:
        results = ranks.results()

    assert results[2] is None
    for error, waited_s, total, in_vain_s in results[:2]:
        assert isinstance(error, AbortedError | CollectiveError)
        assert waited_s < 1.0 + ABORT_S_MAX
        assert total == 2.0
        # The groups were made with 120 s.
        assert 0.5 <= in_vain_s < 60.0


def _held() -> list[int]:
    """Return how many descriptors and threads this process has."""
    return [sum(1 for _ in Path("/proc/self", kind).iterdir()) for kind in ("fd", "task")]


def outlive_many(place: Place) -> list[list[int]]:
    """Lose one peer after the other while rank 0 waits for it; return what rank 0 holds."""
    seen = []
    if place.rank == 0:
        # Things that a process keeps anyway.
        collectives.form(**place.formation(1, 1))
        collectives.leave()
        seen.append(_held())
    for attempt in range(2, 2 + NUM_RANKS - 1):
        if place.rank == 0:
            collectives.form(**place.formation(attempt, 2, timeout_s=600.0))
            with contextlib.suppress(AbortedError, CollectiveError):
                while True:
                    dist.all_reduce(torch.ones(1000))
            collectives.abort(attempt)
            collectives.leave()
            seen.append(_held())
        elif place.rank == attempt - 1:
            collectives.form(**place.formation(attempt, 2, timeout_s=600.0) | {"rank": 1})
            dist.all_reduce(torch.ones(1000))
            os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == 0:
        until(lambda: all(map(int.__le__, _held(), seen[0])), "the groups of the lost peers")
        seen.append(_held())
    return seen


def test_groups_of_killed_peers_are_let_go_of_long_before_their_timeout(tmp_path: Path) -> None:
    """A run on spot nodes may lose many within a timeout."""
    with running(outlive_many, NUM_RANKS, tmp_path) as ranks:
        seen = ranks.results()[0]

    assert len(seen) == NUM_RANKS + 1
    assert seen[-1] <= seen[0]


def _abort_amid_a_collective() -> None:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    threading.Timer(0.2, collectives.abort, (1,)).start()
    with contextlib.suppress(AbortedError):
        work.wait()


def forget_late(place: Place) -> list[float]:
    """Leave an attempt amid a collective, and forget its group afterwards; return both times."""
    collectives.form(**place.formation(1, 2))
    took_s = []
    if place.rank == 0:
        world = dist.group.WORLD
        begun_s = time.monotonic()
        _abort_amid_a_collective()
        collectives.leave()
        took_s.append(time.monotonic() - begun_s)
        begun_s = time.monotonic()
        del world
        took_s.append(time.monotonic() - begun_s)
    # The peer has the group meanwhile, as one that hangs would.
    _meet(place, "end", 2)
    return took_s


def test_no_rank_waits_for_a_group_whose_peer_hangs(tmp_path: Path) -> None:
    """The thread that drops the last reference to it waits in gloo until the timeout."""
    with running(forget_late, 2, tmp_path) as ranks:
        took_s = ranks.results()[0]

    assert len(took_s) == 2
    assert max(took_s) < ABORT_S_MAX


def hide(place: Place) -> bool:
    """Leave an attempt amid a collective, its group in a cycle that only C++ holds, for another."""
    collectives.form(**place.formation(1, 2))
    is_gone = False
    if place.rank == 0:
        _abort_amid_a_collective()
        group = weakref.ref(dist.group.WORLD)
        inner: list[Any] = [group()]
        inner.append(inner)
        hooked = torch.ones(1, requires_grad=True) * 2
        hooked.register_hook(inner.append)
        outer: list[Any] = [hooked * 3]
        outer.append(outer)
        del inner, hooked, outer
        collectives.leave()
        is_gone = group() is None
    _meet(place, "end", 2)
    return is_gone


def test_a_group_in_a_cycle_behind_another_is_let_go_of_at_once(tmp_path: Path) -> None:
    """As FSDP's hooks have it now and then, depending on where in a step a peer was lost."""
    with running(hide, 2, tmp_path) as ranks:
        assert ranks.results()[0]


def test_errors_survive_pickling() -> None:
    """Ray ships them; an exception that loses its facts on the way is of no use."""
    error = CollectiveError("all_reduce failed", attempt=3, group="world", op="all_reduce", seq=9)

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is CollectiveError
    assert (str(again), again.facts) == (str(error), error.facts)
