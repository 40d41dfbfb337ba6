"""What launchers and schedulers of other kinds do to a process: their signals and variables.

Slurm's ``--signal=USR1@120`` sends the signal to every process of a step: to the command, which
stops the run, and to workers, keepers and Ray's own processes, which it would end in mid-step.

The variables tell a process its place among others. Ray's processes keep those of the shell or the
job that started them, and libraries in a worker would wait for ranks that do not exist.
"""

from __future__ import annotations

import ctypes
import re
import signal
from collections.abc import MutableMapping
from typing import Final

#: The signals that schedulers send some time before they end a job.
SCHEDULERS: Final = (signal.SIGUSR1, signal.SIGUSR2)
#: The variables of torchrun, Slurm, Open MPI, MPICH, Intel MPI, MVAPICH and PMIx. What describes a
#: job stays: its id, its array, its folders.
_PLACES: Final = re.compile(
    r"(LOCAL_|NODE_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|OMPI|PMI|PMIX|MV2_COMM_WORLD)_\w+|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NPROCS|TASK_PID|TASKS_PER_NODE|MPI_TYPE)"
    r"|SLURM_(NTASKS|STEP|PMI)\w*"
)


def ignore_schedulers() -> None:
    """Have this process, and those that it starts, ignore these signals unless they have a handler.

    From any thread: Ray makes actors beside the main thread, where Python sets no handler.
    """
    for number in SCHEDULERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            ctypes.pythonapi.PyOS_setsig(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))


def crash_by_sigterm() -> None:
    """Have SIGTERM end this process at once, as SIGKILL does; from any thread, likewise.

    Ray's own handler ends an actor as if that were its wish, and Ray never starts it again.
    """
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_DFL)))


def forget_place(environment: MutableMapping[str, str]) -> tuple[str, ...]:
    """Remove what another launcher told a process of its place; return the names, sorted."""
    found = tuple(sorted(name for name in environment if _PLACES.fullmatch(name)))
    for name in found:
        del environment[name]
    return found
