"""What is said of a run whose controller does not answer, or is not complete yet."""

import json
from pathlib import Path

from orchestrator.core.state import RunState, describe
from orchestrator.run_directory import CONFIG, CONTACT, SUMMARY
from orchestrator.shell.nodes import NodeView
from orchestrator.shell.status_document import status_document
from orchestrator.status import read_status
from tests.support.journals import NUM_WORKERS, Journaled, config_at

#: Where nothing listens: the port is reserved.
_NOBODY = {"url": "http://127.0.0.1:1", "ray_address": "127.0.0.1:1", "namespace": "x", "pid": 1}


def _run_in(directory: Path) -> Journaled:
    config = config_at(directory)
    run = Journaled(config)
    run.grow(60)
    (directory / CONFIG).write_text(config.to_yaml())
    (directory / CONTACT).write_text(json.dumps(_NOBODY))
    return run


def test_what_is_not_known_of_a_process_is_no_number(tmp_path: Path) -> None:
    """`kill 0` ends the user's own shell and all that it has started."""
    run = _run_in(tmp_path)

    document = read_status(str(tmp_path))

    assert document["controller"] == "down"
    pids = [worker["pid"] for worker in document["workers"]]
    assert pids == [worker.pid for worker in run.state.workers.values()]
    assert [node["raylet_pid"] for node in document["nodes"]] == [None] * NUM_WORKERS
    assert [node["keeper_pid"] for node in document["nodes"]] == [None] * NUM_WORKERS


def test_a_node_whose_keeper_has_not_said_who_it_is_has_no_process_yet() -> None:
    """The controller that answers knows no more than its keepers have told."""
    document = status_document(
        described=describe(RunState()),
        redundancy={},
        cadence={},
        loaded={},
        reports={},
        seen_at_s={},
        nodes={"a": NodeView(node="a", raylet_address=("127.0.0.1", 1))},
        at_s=0.0,
    )

    assert [(row["raylet_pid"], row["keeper_pid"]) for row in document["nodes"]] == [(None, None)]


def test_a_run_that_is_over_has_nobody_and_nothing_any_more(tmp_path: Path) -> None:
    """Its cluster may be gone for weeks, and its nodes are others' or nobody's."""
    _run_in(tmp_path)
    (tmp_path / SUMMARY).write_text("{}")

    document = read_status(str(tmp_path))

    assert document["controller"] == "over"
    assert (document["workers"], document["nodes"], document["pending_capacity"]) == ([], [], 0)
