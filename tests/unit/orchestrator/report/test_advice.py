"""A report tells its reader what to do."""

from typing import Any

import pytest

from orchestrator.core import Incident, RunStats
from orchestrator.core.state import Table
from orchestrator.report.advice import advice, named_nodes


def _stats(**values: Any) -> RunStats:
    trained = [("training", 2.0, 100.0)]
    stats = RunStats(step=400, num_workers=4, sizes=[(20.0, 4)], spans=trained, outcome="completed")
    stats._began_s, stats._now_s, stats._phase_since_s = 0.0, 100.0, 100.0
    stats._time.spend("start", 2.0)
    stats._time.spend("steps", 97.0)
    stats._time.spend("recovery", 100.0)
    for name, value in values.items():
        setattr(stats, name, value)
    stats._pending = Table.of((number, ("0", 0.0)) for number in range(4 - stats.num_workers))
    return stats


def _failure(node: str, **values: Any) -> Incident:
    named = {"guilty": ("w1",), "places": ((1, "w1", node),), "folder": "incidents/0001"}
    return Incident(**{"kind": "crash", **named, **values})


@pytest.mark.parametrize(
    ("stats", "incidents", "said"),
    [
        (
            {"num_workers": 2, "lost_nodes": ["aeed281d" + 48 * "0"]},
            (),
            "Node aeed281d never came back: 2 of 4 places are open.",
        ),
        ({"num_workers": 3}, (), "1 of 4 places is open. The last refusal: no quota."),
        ({"spans": [("waiting", 0.0, 27.0), ("training", 27.0, 100.0)]}, (), "27 % of the time"),
        ({}, [_failure("a"), _failure("b"), _failure("a"), _failure("a")], "a was named in 3 of 4"),
        ({}, [_failure("a"), _failure("b")], ""),
        ({}, [_failure("a", guilty=(), places=())], "1 failure named no worker"),
        (
            {},
            [_failure("a", t_detect_s=10.0, t_fence_s=11.0, t_decide_s=21.0, t_first_step_s=24.0)],
            "14.0 s, 14 % of the time since start-up; the longest phase is 'decide' with 10.0 s.",
        ),
        ({"lost_steps": 40}, (), "40 steps had to be redone"),
        (
            {"outcome": "stopped", "reason": "everstep stop", "step": 90},
            (),
            "ended at step 90 of 400: everstep stop. The same command resumes it",
        ),
    ],
)
def test_each_trouble_has_its_sentence(
    stats: dict[str, Any], incidents: list[Incident], said: str
) -> None:
    """A number tells what was; the reader asks what to do."""
    lines = advice(_stats(**stats), incidents, goal=400, why_refused="no quota")

    assert any(said in line for line in lines) if said else not lines
    assert len(lines) <= 1


def test_a_validation_loss_that_rises_names_the_step_to_keep() -> None:
    """A page showed it rise from 1.42 to 1.83 over a thousand steps, and advised nothing."""
    rising = [
        (80.0, 2.1),
        (160.0, 1.6),
        (320.0, 1.4244),
        (480.0, 1.5),
        (640.0, 1.6),
        (1899.0, 1.83),
    ]
    noisy = [(80.0, 1.5), (160.0, 1.42), (320.0, 1.43), (480.0, 1.44), (640.0, 1.425)]

    (said,) = advice(_stats(), [], goal=400, validation=rising)
    assert said.startswith(
        "The validation loss has risen since step 320: from 1.424 to 1.83 at step 1899."
    )
    assert "`everstep export --best`" in said
    for quiet in (noisy, rising[:4], rising[:3], []):
        assert advice(_stats(), [], goal=400, validation=quiet) == []


def test_a_node_is_gone_while_the_run_may_get_it_back() -> None:
    """Three seconds after a kill a page said that the node never came back."""
    stats = _stats(num_workers=2, lost_nodes=["aeed281d"], outcome="")

    (said,) = advice(stats, [], goal=400)
    assert said.startswith("Node aeed281d is gone: 2 of 4 places are open.")


def test_a_place_whose_worker_is_starting_is_not_open() -> None:
    """A second after each recovery a page told people to add a node."""
    stats = _stats(num_workers=3, lost_nodes=["aeed281d"], outcome="")
    stats._pending = Table()

    assert advice(stats, [], goal=400) == []
    stats.num_workers = 4
    assert advice(stats, [], goal=400) == [
        "Node aeed281d is gone; the run has as many workers as before."
    ]


def test_start_up_is_no_news_once_a_run_trains() -> None:
    """In its first minute it is nearly all of the time."""
    began = [("waiting", 0.0, 90.0), ("training", 90.0, 100.0)]

    assert advice(_stats(spans=began, outcome=""), [], goal=400) == []


def test_named_workers_are_counted_by_node_and_kind() -> None:
    """Workers get new names at each start, and the machine below them stays."""
    hang = _failure("a", kind="hang")
    growth = Incident(kind="growth", places=((0, "w0", "b"),))

    rows = named_nodes([_failure("b"), hang, _failure("a"), growth])

    assert rows == [("a", 2, {"hang": 1, "crash": 1}), ("b", 1, {"crash": 1})]
