"""The verdicts of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.fault_kinds import FaultKind
from ucp_core.numerics import shortened


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
        """Return the ranks, links and nodes, each sorted."""
        return cls(
            ranks=tuple(sorted(ranks)), nodes=tuple(sorted(nodes)), links=tuple(sorted(links))
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another kind of fault that may be the true one."""

    kind: FaultKind
    guilty: Guilty = Guilty()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One fault, with its evidence."""

    kind: FaultKind
    guilty: Guilty = Guilty()  #: Empty if nothing can be named.
    #: From 0 to 1: how certain kind and guilty are, by the rule that found them.
    confidence: float
    since_s: float | None = None  #: When it began, on the clock of the records; None if unknown.
    evidence: str  #: Sentences for people.
    alternatives: tuple[Alternative, ...] = ()  #: Other possible kinds, the likeliest first.

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as ``everstep diagnose --json`` and ``everstep status`` show it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion(Verdict):
    """A rank, node or link that seems to delay the others while a run trains; no proof."""

    since_s: float  #: When it began, on the clock of the reports' receiver.
    worker: str = ""  #: A worker that the run could do without; "" if a link is suspected.
    #: Time of a micro-batch, or of a step with a slow link, divided by what it should take; 0.0 if
    #: unknown.
    times: float = 0.0
    #: Whether it was about equally slow in each of the last steps, unlike a pause, a recompile or
    #: another program on its machine.
    is_steady: bool = False
    #: Whether its work may have grown, or its machine may be busy, so that the machine may be
    #: healthy; it is not convicted then.
    may_be_work: bool = False


def is_agreed(one: Suspicion, suspects: Iterable[Suspicion], num_ranks: int) -> bool:
    """Return whether all ``num_ranks`` ranks of a node are slow alike."""
    alike = [
        each
        for each in suspects
        if (each.kind, each.guilty.nodes) == (one.kind, one.guilty.nodes) and not each.may_be_work
    ]
    return len(alike) == num_ranks > 1


def waiting(ranks: Iterable[int]) -> str:
    """Return for people that ranks wait."""
    ranks = set(ranks)
    return f"{listed(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def listed(ranks: Iterable[int]) -> str:
    """Return ranks for people: the first eight, and the number of the others."""
    ordered = sorted(set(ranks))
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shortened(ordered, 8)}"
