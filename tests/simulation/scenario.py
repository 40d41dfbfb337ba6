"""Scenario files: events in, the machine's answer written below each; reviewed as a diff.

A file has comments (``#``), one ``rules(...)`` line, and a line per event: ``1.5 Kind(field=...)``.
Indented lines are the answer: each action, then ``[phase attempt=n]``. ``--show`` prints the same
form, so a seed that found a bug becomes a scenario by copying the lines that matter.
"""

import ast
from dataclasses import fields
from enum import StrEnum
from typing import Any

from orchestrator.core import RunRules, RunState, step
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.values import kinds
from orchestrator.diagnosis import Guilty, Suspicion
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import CapacityRules, LayoutRules, RedundancyPlan
from tests.simulation.checkers import check
from workers.settings import SnapshotSettings

_EVENTS: dict[str, Any] = kinds(ev, ev.Event)


def answer(text: str) -> str:
    """Return a scenario with new answers of the machine.

    Raises:
        ValueError: A line is not of the form that is described above.
    """
    rules: RunRules | None = None
    state = RunState()
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(" "):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            if line.startswith("rules("):
                rules = _rules(line)
                continue
            event = _event(line)
        except (SyntaxError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}, {line!r}: {error}") from error
        if rules is None:
            raise ValueError(f"line {number}: events come after a line rules(...)")
        state, actions = step(state, event, rules=rules)
        check(state)
        lines += [f"  {one_line(action)}" for action in actions]
        lines.append(f"  {phase_line(state)}")
    return "\n".join(lines) + "\n"


def one_line(item: ev.Event | act.Action) -> str:
    """Return an event or action as a call, without ``at_s`` and fields at their default."""
    values = (
        f"{field.name}={_text(getattr(item, field.name))}"
        for field in fields(item)
        if field.name != "at_s" and not _is_default(getattr(item, field.name), field.default)
    )
    return f"{type(item).__name__}({', '.join(values)})"


def phase_line(state: RunState) -> str:
    """Return where the run is, as scenarios show it."""
    return f"[{state.phase} attempt={state.attempt.number}]"


def _is_default(value: Any, default: Any) -> bool:
    protects_nothing = isinstance(value, RedundancyPlan) and value.is_final and not value.tolerance
    return bool(value == default) or protects_nothing


def _text(value: Any) -> str:
    if isinstance(value, RedundancyPlan):
        return repr(value.reason)
    if isinstance(value, StrEnum):
        value = value.value
    return repr(value) if isinstance(value, str | int | float | tuple) else f"'{value}'"


def _arguments(call: str) -> tuple[str, dict[str, Any]]:
    node = ast.parse(call.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("expected Kind(field=value, ...)")
    values = {str(kw.arg): ast.literal_eval(kw.value) for kw in node.keywords}
    return node.func.id, values


def _rules(line: str) -> RunRules:
    _, values = _arguments(line)
    degrees = {
        axis: values.pop(axis)
        for axis in ("dp_replicate", "cp", "tp", "pp", "ep", "fixed")
        if axis in values
    }
    layout = LayoutRules(**degrees)
    snapshot = SnapshotSettings(tolerance=values.pop("tolerance", 0))
    capacity = CapacityRules(usd_per_hour=values.pop("usd_per_hour", (0.0,)))
    return RunRules(run="scenario", layout=layout, snapshot=snapshot, capacity=capacity, **values)


def _event(line: str) -> ev.Event:
    at_s, call = line.split(" ", 1)
    kind, values = _arguments(call)
    if "how" in values:
        values["how"] = ev.Leaving(values["how"])
    if "suspects" in values:
        values["suspects"] = tuple(
            Suspicion(
                kind=FaultKind.SLOW_COMPUTE,
                guilty=Guilty.of([rank]),
                confidence=0.9,
                since_s=since_s,
                worker=worker,
                times=times,
                evidence=f"rank {rank} is slow.",
            )
            for rank, worker, times, since_s in values["suspects"]
        )
    event: ev.Event = _EVENTS[kind](at_s=float(at_s), **values)
    return event
