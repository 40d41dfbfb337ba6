"""The verdicts of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """The kind of a fault; the list is closed.

    From records alone a process that is dead, frozen or holds its interpreter is ``absent``, and
    not-finite numbers and diverged replicas are not seen.
    """

    DEAD = "dead"
    FROZEN = "frozen"
    INTERPRETER_HELD = "interpreter_held"
    ABSENT = "absent"
    LINK_DEAD = "link_dead"
    DEVICE_STUCK = "device_stuck"
    SLOW_COMPUTE = "slow_compute"
    SLOW_DATA = "slow_data"
    SLOW_LINK = "slow_link"
    SLOW_SENDER = "slow_sender"
    SLOW_RECEIVER = "slow_receiver"
    MISMATCH = "mismatch"
    DESYNC = "desync"
    NOT_FINITE = "not_finite"
    DIVERGED = "diverged"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guilty:
    """Ranks, nodes and links to blame, each sorted; a link is (sender, receiver)."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    links: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        ranks: Iterable[int] = (),
        links: Iterable[tuple[int, int]] = (),
        nodes: Iterable[str] = (),
    ) -> Guilty:
        """Return them, each sorted."""
        return cls(
            ranks=tuple(sorted(ranks)), nodes=tuple(sorted(nodes)), links=tuple(sorted(links))
        )


class Alternative(NamedTuple):
    """Another kind that a verdict may be."""

    kind: Kind
    guilty: Guilty = Guilty()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong."""

    kind: Kind
    guilty: Guilty = Guilty()  #: Empty if nobody can be named.
    #: From 0 to 1: how sure it is that kind and guilty are right, by the rule used.
    confidence: float
    since_s: float | None  #: When it began, on the clock of the records; None if that is not known.
    evidence: str  #: Sentences for people.
    alternatives: tuple[Alternative, ...] = ()  #: Other kinds that it can be, the likelier first.

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``everstep diagnose --json``."""
        return {
            "kind": str(self.kind),
            "guilty": asdict(self.guilty),
            "confidence": self.confidence,
            "since_s": self.since_s,
            "evidence": self.evidence,
            "alternatives": [
                {"kind": str(kind), "guilty": asdict(guilty)} for kind, guilty in self.alternatives
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion(Verdict):
    """A rank, node or link that seems to hold the others up while a run trains. No proof."""

    since_s: float  #: Since when, on the clock of the reports' receiver.
    worker: str = ""  #: A worker that the run could do without; "" if a link is suspected.
    #: How many times as long as it should a micro-batch takes, or with a slow link a step; 0.0
    #: if that is not known.
    times: float = 0.0
    #: It was about as slow in each of the last steps. A pause, a recompile or another program on
    #: its machine is not.
    is_steady: bool = False
    #: Nothing tells a slow machine from work that has grown: no conviction.
    may_be_work: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``everstep status``."""
        return {
            **Verdict.to_json(self),
            "worker": self.worker,
            "times": self.times,
            "is_steady": self.is_steady,
            "may_be_work": self.may_be_work,
        }


def is_agreed(one: Suspicion, suspects: Iterable[Suspicion], num_ranks: int) -> bool:
    """Return whether all ranks of a node, of which there are ``num_ranks``, are slow alike."""
    alike = [
        each
        for each in suspects
        if (each.kind, each.guilty.nodes) == (one.kind, one.guilty.nodes) and not each.may_be_work
    ]
    return len(alike) == num_ranks > 1


def listed(ranks: Iterable[int]) -> str:
    """Return ranks for people: the first eight, and how many there are beside them."""
    ordered = sorted(set(ranks))
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""  # noqa: PLR2004
    word = "rank" if len(ordered) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ordered[:8]))}{more}"
