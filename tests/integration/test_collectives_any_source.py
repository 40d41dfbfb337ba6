"""Receiving from whichever member sends first, which torch calls by a name of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import Place, running, until
from workers import collectives
from workers.collectives import AbortedError
from workers.records.ring import RingReader

NUM_RANKS = 3
#: An abort takes milliseconds; far below the timeout of what is aborted.
ABORT_S_MAX = 20.0


def receive(place: Place) -> Any:
    """Have rank 0 receive what rank 1 sends, and then wait in vain until it is aborted."""
    collectives.form(**place.formation(1, NUM_RANKS))
    done = place.directory / "done"
    if place.rank:
        if place.rank == 1:
            dist.send(torch.full((4,), 7.0), 0)
        until(done.exists, "rank 0")
        collectives.abort(1)
        collectives.leave()
        return None
    got = torch.zeros(4)
    sender = dist.recv(got)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            dist.recv(torch.zeros(4))
        except AbortedError as error:
            caught.append(error.with_traceback(None))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        until(
            lambda: any(group.waiting_s > 0 for group in RingReader(place.ring_path).attempt()[1]),
            "the wait is recorded",
            limit_s=ABORT_S_MAX,
        )
        waits = [
            (group.group, tuple(group.ranks), group.op)
            for group in RingReader(place.ring_path).attempt()[1]
        ]
        collectives.abort(1)
        thread.join(ABORT_S_MAX)
    finally:
        done.touch()
    collectives.leave()
    return sender, got.tolist(), waits, [type(error) for error in caught]


def test_who_receives_from_anybody_is_recorded_and_woken(tmp_path: Path) -> None:
    """Passed by, the wait ends by its timeout only, and who waits looks like who computes."""
    with running(receive, NUM_RANKS, tmp_path) as ranks:
        sender, got, waits, caught = ranks.results()[0]

    assert (sender, got) == (1, [7.0] * 4)
    assert waits == [("world *>0", (0,), "recv")]
    assert caught == [AbortedError]
