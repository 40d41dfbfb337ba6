"""The kinds of faults and planned changes: why an attempt ends, and what was found to be wrong."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from typing import Self


class FaultClass(StrEnum):
    """The budget that a failed attempt is charged to."""

    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    USER = "user"
    UNDECIDED = "undecided"
    PROGRAM = "program"


class Loss(StrEnum):
    """The loss that a fault causes, as the choice of save intervals counts it."""

    NOTHING = "nothing"
    PROCESS = "process"
    NODE = "node"


class FaultKind(StrEnum):
    """A kind of fault, or of planned change; the list is closed.

    The kind of an incident says why the attempt ended, such as ``hang``; its verdict says what was
    found, such as ``frozen``. To add a kind, add a member here and its handler.
    """

    #: How much it explains. While an attempt is fenced, a kind with more weight replaces the cause.
    weight: int
    #: The budget to which an attempt that ended in this way is charged; None for no budget.
    budget: FaultClass | None
    loss: Loss  #: The loss that it causes for the run.
    is_planned: bool  #: Whether it is an intended change; such a change is not a failure.
    names: bool  #: Whether a worker can be proven to have caused it.

    def __new__(
        cls,
        text: str,
        weight: int = 0,
        budget: FaultClass | None = None,
        loss: Loss = Loss.NOTHING,
        names: bool = False,  # noqa: FBT001, FBT002
        is_planned: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """Make a member from its value and its properties."""
        member = str.__new__(cls, text)
        member._value_ = text
        member.weight, member.budget, member.loss = weight, budget, loss
        member.names, member.is_planned = names, is_planned
        return member

    # A worker's process ended, or its node did.
    CRASH = "crash", 3, FaultClass.INFRASTRUCTURE, Loss.PROCESS, True
    OUT_OF_MEMORY = "out_of_memory", 3, FaultClass.INFRASTRUCTURE, Loss.PROCESS, True
    HANG = "hang", 3, FaultClass.INFRASTRUCTURE, Loss.PROCESS, True
    NODE_LOSS = "node_loss", 3, FaultClass.INFRASTRUCTURE, Loss.NODE, True
    PREEMPTION = "preemption", 3, FaultClass.PREEMPTION, Loss.NODE, True
    # The program did something: on one rank, or the same on all.
    EXCEPTION = "exception", 2, FaultClass.USER, Loss.PROCESS, True
    DEVICE_MEMORY = "device_memory", 2, FaultClass.USER, Loss.PROCESS, True
    LAYOUT = "layout_refused", 2
    NOT_FINITE = "not_finite", 2, FaultClass.USER
    # Copies of one state differ: a machine computed or stored something wrong.
    DIVERGED = "diverged", 3, FaultClass.INFRASTRUCTURE, Loss.NOTHING, True
    # Two machines computed different results from the same inputs (``train.recheck``).
    CORRUPT = "corrupt", 3, FaultClass.INFRASTRUCTURE, Loss.NOTHING, True
    # It is not known which worker caused it, or none did.
    UNDECIDED = "undecided", 1, FaultClass.UNDECIDED, Loss.NOTHING, True
    UNLOADABLE = "unloadable", 1, FaultClass.INFRASTRUCTURE
    LINK = "link", 1
    PEER_LOST = "peer_lost", 0, None, Loss.NOTHING, True
    # Intended changes.
    GROWTH = "growth", 0, None, Loss.NOTHING, False, True
    MOVE = "move", 0, None, Loss.NOTHING, False, True
    SLOW = "slow", 0, None, Loss.NOTHING, True, True
    SHARE = "share", 0, None, Loss.NOTHING, False, True
    RESIZE = "resize", 0, None, Loss.NOTHING, False, True
    DRAIN = "drain", 0, None, Loss.NOTHING, False, True
    STOP = "stop", 0, None, Loss.NOTHING, False, True
    CONTROLLER_RESTART = "controller_restart", 0, None, Loss.NOTHING, False, True
    RESUME = "resume", 0, None, Loss.NOTHING, False, True
    COMPLETED = "completed", 0, None, Loss.NOTHING, False, True
    # Signs of ranks in reports or records. NOT_FINITE, DIVERGED, CORRUPT and UNDECIDED above are
    # signs, too, but records alone do not show the first three. In records alone, a process that is
    # dead, frozen or holds its interpreter is ABSENT.
    DEAD = "dead"
    FROZEN = "frozen"
    INTERPRETER_HELD = "interpreter_held"
    ABSENT = "absent"
    DEVICE_STUCK = "device_stuck"
    MISMATCH = "mismatch"
    DESYNC = "desync"
    SLOW_COMPUTE = "slow_compute"
    SLOW_DATA = "slow_data"
    # Signs of links.
    LINK_DEAD = "link_dead"
    SLOW_LINK = "slow_link"
    SLOW_SENDER = "slow_sender"
    SLOW_RECEIVER = "slow_receiver"

    @classmethod
    def of(cls, text: str) -> FaultKind | None:
        """Return the kind that a document names; None if another version of everstep wrote it."""
        with contextlib.suppress(ValueError):
            return cls(text)
        return None
