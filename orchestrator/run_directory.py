"""Read a run directory: journal, metrics, incidents, summary.

It may be read while the run is under way: a missing file counts as empty, and a last line that is
half written is skipped. ``orchestrator.shell`` writes these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

from orchestrator.errors import JournalCorruptError, RunNotFoundError
from ucp_core.storage import Store, join, open_store

#: The run's settings, as they were resolved when it was last started or resumed.
CONFIG = "config.yaml"
#: The same of each start and resume, under the number of the incarnation of the controller.
SETTINGS = "settings"
#: Written by each incarnation of the controller: how to reach it.
CONTACT = "controller.json"
#: The journal up to some record, folded, so that a restarted controller reads only the rest.
COMPACTED = "compacted.json"
#: The committed versions in storage.
CHECKPOINTS = "checkpoints"
#: Written last: once it is there the run is over.
SUMMARY = "summary.json"
#: Written by rank 0 when it completes the last step (``workers.train``).
RESULT = "result.json"

#: Phases of a recovery in order: name, and the instant at which it ends.
PHASES = (
    ("detect", "t_detect_s"),
    ("fence", "t_fence_s"),
    ("decide", "t_decide_s"),
    ("re-form", "t_reform_s"),
    ("load", "t_load_s"),
    ("first step", "t_first_step_s"),
)

#: Kinds of incident that are planned (``orchestrator.core.actions.ReportIncident``).
PLANNED = frozenset({"growth", "drain", "stop", "controller_restart", "resume"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step, as rank 0 wrote it.

    Attributes:
        step: Optimizer step, from 1.
        attempt: The attempt that took it.
        loss: Mean over the tokens of the global batch; nan if it was not a number.
        grad_norm: Before clipping; nan likewise.
        learning_rate: Of this step.
        tokens: Tokens that carry loss.
        samples: Of this step.
        step_s: Duration.
        num_workers: Workers that took it.
        layout: Their layout, for people.
    """

    step: int
    attempt: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    samples: int
    step_s: float
    num_workers: int
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption of training and its repair.

    Instants are on the journal's clock (``at_s``). They are None if the run did not get that far or
    does not know: ``t_fault_s`` is known only for injected faults.

    Attributes:
        number: Counts from 1.
        kind: Such as ``crash``, ``node_loss``, ``hang``; ``growth`` and ``drain`` are planned.
        guilty: The workers that were proven to have caused it; empty if undecided or planned.
        evidence: The proof, in one line.
        instants: By field name, ``t_fault_s`` to ``t_first_step_s``.
        lost_steps: Completed steps that had to be redone.
        layout_before: For people.
        layout_after: For people.
        sources: Bytes loaded, by source.
        skipped: A line for each source that could not be loaded.
    """

    number: int
    kind: str
    guilty: tuple[str, ...]
    evidence: str
    instants: Mapping[str, float | None]
    lost_steps: int
    layout_before: str
    layout_after: str
    sources: Mapping[str, int]
    skipped: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """Return the faulty workers for people, "undecided" if nothing was proven."""
        # Damaged data is nobody's fault either.
        is_blameless = self.kind in PLANNED or self.kind == "unloadable"
        nobody = "\N{EN DASH}" if is_blameless else "undecided"
        return ", ".join(self.guilty) or nobody

    @property
    def begin_s(self) -> float | None:
        """Return the instant of the fault; of its detection if the fault's is not known."""
        fault_s = self.instants.get("t_fault_s")
        return fault_s if fault_s is not None else self.instants.get("t_detect_s")

    @property
    def end_s(self) -> float | None:
        """Return the instant at which the first new step was complete."""
        return self.instants.get("t_first_step_s")

    @property
    def detect_s(self) -> float | None:
        """Return how long detection took; None if the instant of the fault is not known."""
        fault_s, detected_s = self.instants.get("t_fault_s"), self.instants.get("t_detect_s")
        return None if fault_s is None or detected_s is None else max(0.0, detected_s - fault_s)

    @property
    def recovery_s(self) -> float | None:
        """Return the time from ``begin_s`` to the first new step, None before that."""
        if self.begin_s is None or self.end_s is None:
            return None
        return max(0.0, self.end_s - self.begin_s)

    @property
    def phases_s(self) -> dict[str, float]:
        """Return the duration of each phase that was reached, in order.

        A planned change fences nobody: its members finish a step ("yield").
        """
        durations: dict[str, float] = {}
        before_s = self.instants.get("t_fault_s")
        for name, end in PHASES:
            end_s = self.instants.get(end)
            if end_s is None:
                continue
            if before_s is not None:
                planned = name == "fence" and self.kind in PLANNED
                durations["yield" if planned else name] = max(0.0, end_s - before_s)
            before_s = end_s
        return durations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of a run directory.

    Attributes:
        url: Of the run directory.
        config_text: The resolved configuration as YAML.
        journal: One mapping per record, oldest first.
        steps: In order; a step that was redone is there once, as it was taken last.
        incidents: By number.
        summary: ``summary.json``; empty before the run is over.
    """

    url: str
    config_text: str = ""
    journal: tuple[Mapping[str, Any], ...] = ()
    steps: tuple[StepRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rstrip("/").rsplit("/", 1)[-1]


def read_run(url: str) -> RunRecord:
    """Return the run whose directory is at ``url`` (a path or an fsspec URL).

    Raises:
        RunNotFoundError: There is no run at ``url``.
        JournalCorruptError: A line of the journal that is not the last of its segment is damaged.
    """
    store, path = open_store(url)
    record = RunRecord(
        url=url,
        config_text=_text(store, join(path, CONFIG)),
        journal=tuple(_journal(store, join(path, "journal"))),
        steps=_steps(_text(store, join(path, "metrics/rank0.jsonl"))),
        incidents=tuple(_incidents(store, join(path, "incidents"))),
        summary=_object(_text(store, join(path, SUMMARY))),
    )
    if not (record.config_text or record.journal or record.summary or record.steps):
        raise RunNotFoundError(
            f"{url} holds no run: neither config.yaml nor a journal is there; "
            "name the folder that `everstep run` printed as its run directory",
            url=url,
        )
    return record


def _text(store: Store, path: str) -> str:
    return store.read(path).decode(errors="replace") if store.exists(path) else ""


def _object(text: str) -> dict[str, Any]:
    return _document(text) or {}


def _document(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _journal(store: Store, directory: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for name in store.list(directory):
        lines = _text(store, join(directory, name)).splitlines()
        for number, line in enumerate(lines, start=1):
            record = _document(line)
            if record is not None:
                records.append(record)
            elif number < len(lines):
                raise JournalCorruptError(
                    f"journal/{name}:{number} is not a JSON object; "
                    "restore the file or move it away to read the rest",
                    path=f"journal/{name}",
                    line=number,
                )
    return records


def _steps(text: str) -> tuple[StepRecord, ...]:
    by_step: dict[int, StepRecord] = {}
    attempt = 0
    for line in text.splitlines():
        document = _document(line)
        if document is not None and "step" in document:
            record = _step(document)
            if record.attempt < attempt:
                continue  # a process of a fenced attempt woke up and wrote
            if record.attempt > attempt:
                # It begins after the commit; the steps beyond it are lost.
                by_step = {step: found for step, found in by_step.items() if step < record.step}
            attempt = record.attempt
            by_step[record.step] = record
    return tuple(by_step[step] for step in sorted(by_step))


def _step(document: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(document["step"]),
        attempt=int(document.get("attempt", 0)),
        loss=_number(document, "loss"),
        grad_norm=_number(document, "grad_norm"),
        learning_rate=_number(document, "lr"),
        tokens=int(document.get("tokens", 0)),
        samples=int(document.get("samples", 0)),
        step_s=float(document.get("step_s", 0.0)),
        num_workers=int(document.get("num_workers", 0)),
        layout=layout_text(document.get("layout")),
    )


def _incidents(store: Store, directory: str) -> list[Incident]:
    incidents: list[Incident] = []
    for name in store.list(directory):
        document = _object(_text(store, join(directory, name, "incident.json")))
        if document:
            incidents.append(_incident(len(incidents) + 1, document))
    return incidents


def _incident(number: int, document: Mapping[str, Any]) -> Incident:
    fields = ("t_fault_s", *(end for _, end in PHASES))
    instants = {name: _float(document.get(name)) for name in fields}
    evidence = document.get("evidence", "")
    return Incident(
        number=int(document.get("number", number)),
        kind=str(document.get("kind", "unknown")),
        guilty=tuple(str(who) for who in document.get("guilty", ())),
        evidence=evidence if isinstance(evidence, str) else json.dumps(evidence),
        instants=instants,
        lost_steps=int(document.get("lost_steps") or 0),
        layout_before=layout_text(document.get("layout_before")),
        layout_after=layout_text(document.get("layout_after")),
        sources={str(k): int(v) for k, v in (document.get("sources") or {}).items()},
        skipped=tuple(str(line) for line in document.get("skipped") or ()),
    )


def _number(document: Mapping[str, Any], name: str) -> float:
    """Return a number that is null if it was nan, which JSON does not have."""
    value = document.get(name)
    return nan if value is None else float(value)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def layout_text(layout: Any) -> str:
    """Return a layout for people; it is stored as text or as degrees by axis."""
    if isinstance(layout, Mapping):
        used = [f"{axis}={degree}" for axis, degree in layout.items() if degree != 1]
        return " x ".join(used) or "1 worker"
    return str(layout or "")
