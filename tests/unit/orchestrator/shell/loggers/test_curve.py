"""One curve of many attempts, and what is given out when."""

import json
from dataclasses import asdict
from math import isnan
from typing import Any

from pydantic import TypeAdapter

from orchestrator.shell.loggers import Curve
from workers.protocol import METRICS, VALIDATION, VALUES


def line(step: int, attempt: int = 1, **more: Any) -> str:
    return json.dumps({"step": step, "attempt": attempt, **more})


def test_a_step_is_given_once_nothing_more_can_belong_to_it() -> None:
    """Lines of a script and of an evaluation come after the step's own line."""
    curve = Curve()
    curve.add(METRICS, [line(1, loss=4.0, lr=0.1, wall_time=7.0), line(2, loss=3.0)])
    curve.add(VALIDATION, [line(2, loss=2.5)])
    curve.add(VALUES, [line(1, values={"accuracy": 0.5}), line(1, values={"accuracy": 0.6})])

    [first] = curve.take()
    assert (first.step, first.wall_time) == (1, 7.0)
    expected = {"train/loss": 4.0, "train/lr": 0.1, "everstep/attempt": 1.0, "accuracy": 0.6}
    assert first.values == expected
    assert curve.take() == []

    curve.add(VALUES, [line(2, values={"accuracy": None})])
    [last] = curve.take(is_final=True)
    assert last.values["validation/loss"] == 2.5
    assert isnan(last.values["accuracy"])


def test_steps_that_were_lost_are_given_as_they_were_trained_last() -> None:
    """And those that were given already are not given twice."""
    curve = Curve()
    curve.add(METRICS, [line(step, loss=step) for step in (1, 2, 3)])
    curve.add(VALUES, [line(3, values={"accuracy": 0.1}), line(4, values={"accuracy": 0.2})])
    assert [one.step for one in curve.take()] == [1, 2]

    curve.add(METRICS, [line(2, 2, loss=20), line(3, 2, loss=30)])
    # A process of the fenced attempt woke up.
    curve.add(METRICS, [line(4, 1, loss=4)])
    curve.add(VALUES, [line(3, 1, values={"accuracy": 0.9})])
    curve.add(METRICS, [line(4, 2, loss=40)])

    points = curve.take(is_final=True)
    assert [(one.step, dict(one.values)) for one in points] == [
        (3, {"train/loss": 30.0, "everstep/attempt": 2.0}),
        (4, {"train/loss": 40.0, "everstep/attempt": 2.0}),
    ]


def test_what_a_script_said_before_another_attempt_began_counts() -> None:
    """The files are read one after the other: the first line of the next attempt comes earlier."""
    curve = Curve()
    curve.add(METRICS, [line(step, loss=step) for step in (1, 2, 3)])
    curve.add(METRICS, [line(3, 2, loss=30), line(4, 2, loss=40)])
    curve = TypeAdapter(Curve).validate_json(json.dumps(asdict(curve)))
    curve.add(VALIDATION, [line(2, loss=2.5), line(3, loss=3.5)])
    lines = [line(step, values={"accuracy": step}) for step in (1, 2, 3)]
    curve.add(VALUES, [*lines, line(3, 2, values={"accuracy": 33})])

    points = {one.step: one.values for one in curve.take(is_final=True)}
    assert [points[step].get("accuracy") for step in (1, 2, 3, 4)] == [1.0, 2.0, 33.0, None]
    assert [points[step].get("validation/loss") for step in (1, 2, 3)] == [None, 2.5, None]


def test_a_curve_continues_from_its_document_and_skips_torn_lines() -> None:
    whole, cut = Curve(), Curve()
    lines = [line(1, loss=1), '{"step": 2, "att', line(2, loss=2), line(3, 2, loss=3)]
    whole.add(METRICS, lines)
    cut.add(METRICS, lines[:3])
    again = TypeAdapter(Curve).validate_json(json.dumps(asdict(cut)))
    again.add(METRICS, lines[3:])

    assert whole.take(is_final=True) == again.take(is_final=True) != []
