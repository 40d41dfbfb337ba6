"""One interruption of training, or one planned change, and its recovery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orchestrator.core.log.codec import decoder, encode, known_fields
from orchestrator.diagnosis import Suspicion
from orchestrator.fault_kinds import FaultKind

#: Decodes a suspicion from a record of the journal or an incident.
suspicion: Final = decoder(Suspicion)

#: Phases of a recovery in order: name, and the instant at which it ends.
PHASES = (
    ("detect", "t_detect_s"),
    ("fence", "t_fence_s"),
    ("decide", "t_decide_s"),
    ("re-form", "t_reform_s"),
    ("load", "t_load_s"),
    ("first step", "t_first_step_s"),
)


@dataclass(slots=True, kw_only=True)
class Incident:
    """One loss of service or planned change, and what it took to continue training.

    Instants are on the journal's clock (``at_s``). One that the run did not reach or does not know
    is None: ``t_fault_s`` is known only for injected faults.
    """

    number: int = 0  #: Counts from 1.
    kind: str  #: As ``ReportIncident.incident``, such as ``crash`` or ``growth``.
    #: The workers that were proven to have caused it; empty if undecided or planned.
    guilty: tuple[str, ...] = ()
    evidence: str = ""
    attempt: int = 0  #: The attempt that it ended.
    lost_steps: int = 0  #: Completed steps that had to be redone (``orchestrator.core.log.stats``).
    #: Cost of the reservations while the run waited and while it redid steps; 0.0 without a
    #: known price.
    cost_usd: float = 0.0
    layout_before: str = ""  #: Layout of the attempt that it ended, for people.
    layout_after: str = ""  #: Layout of the next one, "" if there was none.
    #: Layouts that were not chosen then, each with the reason, for people.
    other_layouts: tuple[tuple[str, str], ...] = ()
    t_fault_s: float | None = None  #: When the fault was injected.
    t_detect_s: float | None = None  #: When it was found, or the change began.
    t_fence_s: float | None = None  #: When the last member had left.
    t_decide_s: float | None = None  #: When the next attempt was started.
    t_reform_s: float | None = None  #: When its mesh and model were built.
    t_load_s: float | None = None  #: When its state was loaded.
    t_first_step_s: float | None = None  #: When its first step was complete.
    sources: dict[str, int] = field(default_factory=dict)  #: Bytes loaded, by kind of source.
    skipped: tuple[str, ...] = ()  #: A line for each source that could not be loaded.
    rule: str = ""  #: The detection rule that found it; "" if none did.
    verdict: str = ""  #: The verdict's kind as ``orchestrator.diagnosis`` names it; "" if none.
    #: (rank, worker, node) of each rank that caused it, the faulty ones included; empty if not
    #: known.
    places: tuple[tuple[int, str, str], ...] = ()
    #: The same for each member that did not leave when fenced and was killed. Healthy members leave
    #: at once, so these may have failed, too.
    killed: tuple[tuple[int, str, str], ...] = ()
    suspects: tuple[Suspicion, ...] = ()  #: The suspicions when it was recorded.
    #: The folder with its evidence, below the run directory; "" if none was collected.
    folder: str = ""
    #: Whether the run had not trained yet since a person started or resumed it. The time to the
    #: first step then counts as start-up, not as recovery.
    is_start: bool = False

    @property
    def is_planned(self) -> bool:
        """Return whether it was an intended change rather than a failure."""
        kind = FaultKind.of(self.kind)
        return kind is not None and kind.is_planned

    @property
    def who(self) -> str:
        """Return the faulty workers as text, "undecided" if nothing was proven."""
        kind = FaultKind.of(self.kind)
        nobody = "undecided" if kind is None or kind.names else "\N{EN DASH}"
        return ", ".join(self.guilty) or nobody

    @property
    def begin_s(self) -> float | None:
        """Return the instant of the fault, or of its detection if that is not known."""
        return self.t_detect_s if self.t_fault_s is None else self.t_fault_s

    @property
    def end_s(self) -> float | None:
        """Return the instant at which the first new step was complete."""
        return self.t_first_step_s

    @property
    def detect_s(self) -> float | None:
        """Return how long detection took; None if the instant of the fault is not known."""
        if self.t_fault_s is None or self.t_detect_s is None:
            return None
        return max(0.0, self.t_detect_s - self.t_fault_s)

    @property
    def recovery_s(self) -> float | None:
        """Return the time from ``begin_s`` to the first new step; None before it and at start."""
        if self.is_start or self.begin_s is None or self.end_s is None:
            return None
        return max(0.0, self.end_s - self.begin_s)

    @property
    def phases_s(self) -> dict[str, float]:
        """Return the duration of each phase that was reached, in order.

        In a planned change the members are not fenced but finish a step ("yield"). An incident at
        the start has no phases.
        """
        durations: dict[str, float] = {}
        if self.is_start:
            return durations
        before_s = self.t_fault_s
        for name, end in PHASES:
            end_s: float | None = getattr(self, end)
            if end_s is None:
                continue
            if before_s is not None:
                planned = name == "fence" and self.is_planned
                durations["yield" if planned else name] = max(0.0, end_s - before_s)
            before_s = end_s
        return durations

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``incident.json``."""
        document: dict[str, Any] = encode(self)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, number: int) -> Incident:
        """Return the incident of a document, perhaps of another version.

        Missing fields get their defaults. ``number`` is used if the document has none.
        """
        return cls(**{"number": number, "kind": "unknown", **known_fields(cls, document)})


def incident_folder(number: int) -> str:
    """Return the folder of an incident's document and evidence, below the run directory."""
    return f"incidents/{number:04d}"
