"""Handles the signals and variables of launchers and schedulers.

Slurm's ``--signal=USR1@120`` sends the signal to every process of a job step: to the command, which
stops the run, but also to workers, keepers and Ray's own processes, which would die in the middle
of a training step.

The variables give a process its rank. Ray's processes inherit those of the shell or job that
started Ray, so libraries in a worker would wait for ranks that do not exist.
"""

import ctypes
import functools
import os
import re
import signal
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

#: The signals that schedulers send some time before they end a job.
SCHEDULERS: Final = (signal.SIGUSR1, signal.SIGUSR2)
#: The variables of torchrun, Slurm, Open MPI, MPICH, Intel MPI, MVAPICH and PMIx. Variables that
#: describe a job stay: its id, its array, its folders.
_PLACES: Final = re.compile(
    r"(LOCAL_|NODE_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|OMPI|PMI|PMIX|MV2_COMM_WORLD)_\w+|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NPROCS|TASK_PID|TASKS_PER_NODE|MPI_TYPE)"
    r"|SLURM_(NTASKS|STEP|PMI)\w*"
)
#: The variables that a process needs to find the others that a launcher started with it.
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPlace:
    """The place of this process among those that a launcher started together."""

    rank: int
    num_ranks: int
    local_rank: int  #: Its number on its machine.
    host: str  #: Host of the store through which they find each other.
    port: int
    is_served: bool  #: Whether the launcher holds that store; else rank 0 does.
    restart: str  #: Number of this start by the same launcher.


def ignore_schedulers() -> None:
    """Make this process and its children ignore these signals, except where they have a handler.

    Any thread may call this. Ray runs actors outside the main thread, where Python cannot set a
    handler.
    """
    for number in SCHEDULERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            ctypes.pythonapi.PyOS_setsig(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))


def crash_by_sigterm() -> None:
    """Make SIGTERM end this process at once, as SIGKILL does. Any thread may call this.

    With Ray's own handler the actor counts as having ended itself, and Ray never restarts it.
    """
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_DFL)))


def forget_place(environment: MutableMapping[str, str]) -> tuple[str, ...]:
    """Remove the variables of ``environment`` that give a rank; return their names, sorted."""
    found = tuple(sorted(name for name in environment if _PLACES.fullmatch(name)))
    for name in found:
        del environment[name]
    return found


@functools.cache
def take_place() -> LaunchedPlace | None:
    """Return the place that a launcher gave this process, in its environment; None if none did.

    Remove the variables, so that no library forms groups of its own.
    """
    have = os.environ.copy()
    if not all(have.get(name) for name in _NEEDED) or int(have["WORLD_SIZE"]) == 1:
        return None
    forget_place(os.environ)
    return LaunchedPlace(
        rank=int(have["RANK"]),
        num_ranks=int(have["WORLD_SIZE"]),
        local_rank=int(have.get("LOCAL_RANK", "0")),
        host=have["MASTER_ADDR"],
        port=int(have["MASTER_PORT"]),
        is_served=have.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=have.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
