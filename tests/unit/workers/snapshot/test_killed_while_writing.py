"""A trainer is killed at every moment of writing a snapshot: the version before is whole.

The real writer runs in a process of its own, on memory that the keeper here holds too. At every
line, in whichever thread, it looks whether that memory has changed, and kills itself with SIGKILL
behind the first change, behind the second, and so on, until it comes to its end.
"""

import os
import signal
import traceback

import pytest
import torch

from tests.support.doomed import Fate, Moment
from tests.support.snapshot_rank import Node, Rank, state
from ucp_core.native import load
from workers.memory import Arena, LocalPart, open_version
from workers.protocol import Held
from workers.snapshot import SnapshotMemory
from workers.state import StateEntry

_DONE = 3
#: Tensors of the state below that have elements.
NUM_TENSORS = 6


def _state(step: int) -> list[StateEntry]:
    torch.manual_seed(step)
    return state()


def _write(node: Node, num_changes: int) -> None:
    """Take snapshots of steps 1 to 3 as a trainer, which is killed behind a change of the third."""
    arenas: list[Arena] = []
    fate = Fate(lambda: arenas, stride=1)
    fate.install()
    rank = Rank(SnapshotMemory(node.directory, "w0001"))
    assert rank.ready(_state(0))
    for step in (1, 2):
        assert rank.take(step, _state(step))
        assert rank.writer.wait(step)
    entries = _state(3)
    assert rank.writer._arena is not None
    arenas.append(rank.writer._arena)
    fate.doom(Moment.CHANGE, num_changes, signal.SIGKILL)
    assert rank.take(3, entries, pin=True)
    assert rank.writer.wait(3)


def _dies(node: Node, num_changes: int) -> bool:
    """Return whether a process that writes died behind that many changes."""
    pid = os.fork()
    if pid == 0:
        try:
            _write(node, num_changes)
            os._exit(_DONE)
        except BaseException:  # noqa: BLE001  the parent's test must not go on in the child
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == _DONE
    return False


def _check_whole(arena: Arena, held: Held) -> None:
    """Assert that a version is bit for bit the state after its step."""
    entries = _state(held.step)
    need = [(entry.tensor, torch.zeros_like(entry.tensor), entry) for entry in entries]
    load(
        open_version({0: LocalPart(arena, held)}),
        [entry.local_tensor(target) for _, target, entry in need],
    )
    for expected, target, entry in need:
        assert torch.equal(expected, target), (held.step, entry.fqn)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_wherever_the_writer_is_killed_a_whole_version_is_held(node: Node) -> None:
    """Between two tensors, before and behind the record, the header, and the pin."""
    seen: list[tuple[int, ...]] = []
    for num_changes in range(100):
        died = _dies(node, num_changes)
        arena = node.arena()
        found = arena.versions()
        steps = tuple(held.step for held in found)
        assert steps in {(1, 2), (1, 2, 3)}, num_changes
        for held in found:
            _check_whole(arena, held)
        pinned = arena.pinned()
        assert pinned is None or arena.held(pinned) == found[-1]
        if not died:
            break
        assert not seen or seen[-1] <= steps
        seen.append(steps)
        node.table.drop("w0001.1")
    else:
        pytest.fail("the memory changes more often than was tried")
    # The header, each of the tensors that have elements, the record, the header, what is told.
    assert seen.count((1, 2)) >= 1 + NUM_TENSORS
    assert seen.count((1, 2, 3)) >= 1
    assert arena.pinned() is not None
