"""The status of a run whose controller does not answer, or that is not complete yet."""

import asyncio
import contextlib
import json
import math
import socket
import threading
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.config import load
from orchestrator.core import Phase, RunState, RunStats, describe
from orchestrator.core import events as ev
from orchestrator.driver import plan_each_node, plan_losses, read_status
from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError, JournalCorruptError
from orchestrator.policies import RecoveryPlan
from orchestrator.report import CONFIG, CONTACT, SUMMARY, Seen, tell
from orchestrator.shell.capacity import NodeView
from orchestrator.shell.memory.redundancy_status import loss_document
from orchestrator.shell.serve.http import StatusPage
from tests.support.checkpoints import save, small_state
from tests.support.histories import ATTEMPT, calm
from tests.support.journals import NUM_WORKERS, Journaled, config_at
from tests.support.live_pages import collector, live_page, require
from tests.support.made import held_of
from ucp_core.storage import join
from workers.protocol import (
    CHECKPOINTS,
    Inventory,
    PartRef,
    Source,
    StepFacts,
    WorkerPhase,
    WorkerReport,
    stored_source,
)

T = TypeVar("T")

#: Where nothing listens: the port is reserved.
_NOBODY = {"url": "http://127.0.0.1:1", "ray_address": "127.0.0.1:1", "namespace": "x", "pid": 1}


def _run_in(directory: Path) -> Journaled:
    config = config_at(directory)
    run = Journaled(config)
    run.grow(60)
    (directory / CONFIG).write_text(config.to_yaml())
    (directory / CONTACT).write_text(json.dumps(_NOBODY))
    return run


def _status(described: dict[str, Any] | None = None, **seen: Any) -> dict[str, Any]:
    """Return the status of a run that a living controller has seen so."""
    state = {**describe(RunState()), **(described or {})}
    config = load("run: {directory: runs/x}\nworkers: {max: 2}\n")
    return tell(state, RunStats(), config, seen=Seen(at_s=0.0, **seen)).status


def test_what_is_not_known_of_a_process_is_no_number(tmp_path: Path) -> None:
    """`kill 0` ends the user's own shell and all that it has started."""
    run = _run_in(tmp_path)

    document = read_status(str(tmp_path))

    assert document["controller"] == "down"
    pids = [worker["pid"] for worker in (*document["workers"], *document["standbys"])]
    assert pids == [worker.pid for worker in run.state.fleet.workers.values()]
    assert [node["raylet_pid"] for node in document["nodes"]] == [None] * NUM_WORKERS
    assert [node["keeper_pid"] for node in document["nodes"]] == [None] * NUM_WORKERS


def test_a_run_that_was_stopped_is_not_called_finished(tmp_path: Path) -> None:
    """It has steps left, and the same command resumes it."""
    _run_in(tmp_path)
    phases = []
    for outcome in ("stopped", "completed"):
        (tmp_path / SUMMARY).write_text(json.dumps({"outcome": outcome}))
        phases.append(read_status(str(tmp_path))["phase"])
    told = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout

    assert phases[0] == "stopped"
    assert phases[1] != "stopped"
    assert told.startswith(phases[1])


def test_a_node_whose_keeper_has_not_said_who_it_is_has_no_process_yet() -> None:
    """The controller that answers knows no more than its keepers have told."""
    view = NodeView(node="a", raylet_address=("127.0.0.1", 1))
    document = _status(nodes=[view.told(0.0)])

    assert [(row["raylet_pid"], row["keeper_pid"]) for row in document["nodes"]] == [(None, None)]


def test_a_run_that_is_over_has_no_workers_and_no_nodes(tmp_path: Path) -> None:
    """Its cluster may be gone for weeks, and its nodes may be others' or gone."""
    _run_in(tmp_path)
    (tmp_path / SUMMARY).write_text("{}")

    document = read_status(str(tmp_path))

    assert document["controller"] == "over"
    assert (document["workers"], document["nodes"], document["pending_capacity"]) == ([], [], 0)


def test_a_loss_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    """It is null in the metrics, which is the last line of a run that diverged."""
    _run_in(tmp_path)
    (tmp_path / "metrics").mkdir()
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}]
    (tmp_path / "metrics/rank0.jsonl").write_text("\n".join(map(json.dumps, lines)))

    assert read_status(str(tmp_path))["loss"] is None


def test_steps_of_a_run_whose_head_is_away_are_counted(tmp_path: Path) -> None:
    """No controller journals them; with the loss of the last one a user would take it for stuck."""
    _run_in(tmp_path)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/rank0.jsonl").write_text('{"step": 70, "loss": 0.5}\n{"step": 71')

    document = read_status(str(tmp_path))

    assert (document["controller"], document["step"], document["loss"]) == ("down", 70, 0.5)


def test_tokens_of_a_step_are_known_once_all_members_have_told_theirs() -> None:
    """Half of them would be shown as half the speed."""
    rows = [
        {"rank": rank, "worker": f"w{rank}", "node": "n", "pid": 1, "state": "training"}
        for rank in range(2)
    ]

    def tokens(*told: float) -> float | None:
        reports = {
            f"w{rank}": replace(calm(f"w{rank}", rank), facts=StepFacts(tokens=each, lr=0.1))
            for rank, each in enumerate(told)
        }
        described = {"attempt": ATTEMPT, "members": rows, "num_members": len(rows)}
        seen_at_s = dict.fromkeys(reports, 0.0)
        document = _status(described, reports=reports, seen_at_s=seen_at_s)
        assert document["lr"] == 0.1
        found: float | None = document["step_tokens"]
        return found

    assert tokens(64.0, 32.0) == 96.0
    assert tokens(64.0) is None
    assert tokens(64.0, math.nan) is None
    assert tokens(0.0, 0.0) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_living_controller_tells_no_loss_that_json_cannot_hold(loss: float) -> None:
    """Other readers than ours refuse the whole document."""
    report = WorkerReport(
        worker="w0001",
        pid=1,
        os_state="R",
        attempt=1,
        rank=0,
        phase=WorkerPhase.FORWARD,
        step=2,
        micro_batch=0,
        moved_bytes=0,
        phase_s=0.0,
        beat_age_s=0.0,
        processor_s=0.0,
        step_s=1.0,
        loss=loss,
        groups=(),
    )
    row = {"rank": 0, "worker": "w0001", "node": "n", "pid": 1, "state": "training"}
    described = {"attempt": 1, "members": [row]}
    document = _status(described, reports={"w0001": report}, seen_at_s={"w0001": 0.0})

    assert json.dumps(document, allow_nan=False)


def test_what_is_stored_while_memory_is_asked_is_in_memory_too(tmp_path: Path) -> None:
    """Storage that was looked at later had a newer step, and seemed to be all that is left."""
    run = _run_in(tmp_path)
    nodes = [node.name for node in run.state.fleet.nodes.values()][:2]
    asked: list[int] = []

    async def losses() -> dict[str, Any]:
        step = 19 + len(asked)
        asked.append(step)
        inventories = [
            Inventory(
                node=node,
                parts=tuple(
                    PartRef(node=node, arena=f"w{rank}.1", held=held_of(step, rank))
                    for rank in (0, 1)
                ),
            )
            for node in nodes
        ]
        document = loss_document(inventories, run.state)
        if step == 19:
            save(run.store, small_state(), step=20, root=join(run.path, CHECKPOINTS))
        return document

    plan = asyncio.run(_plan(tmp_path, losses, nodes[1]))

    assert (plan.source, plan.step) == ("memory", 20)


def test_a_plan_counts_on_nothing_that_could_not_be_loaded(tmp_path: Path) -> None:
    """A stored version with a damaged block is committed and whole but for its checksum."""
    run = _run_in(tmp_path)
    for step in (10, 20):
        save(run.store, small_state(), step=step, root=join(run.path, CHECKPOINTS))
    nodes = [node.name for node in run.state.fleet.nodes.values()]
    part = PartRef(node=nodes[0], arena="w0.1", held=replace(held_of(30, 0), world_size=1))
    _find_damaged(run, stored_source(20, 1), part.source)

    async def losses() -> dict[str, Any]:
        return loss_document([Inventory(node=nodes[0], parts=(part,))], run.state)

    plan = asyncio.run(_plan(tmp_path, losses, nodes[1]))

    assert (plan.source, plan.step) == ("storage", 10)


def test_a_plan_leaves_a_node_under_notice_as_the_run_would(tmp_path: Path) -> None:
    """It trains there until it has to leave, so the node counts as one of the run's."""
    run = _run_in(tmp_path)
    nodes = [node.name for node in run.state.fleet.nodes.values()]
    # There is no other machine to be had.
    run._fold_one(ev.NodeDraining(at_s=run.at_s, node=nodes[0], deadline_s=run.at_s + 100.0))

    async def losses() -> dict[str, Any]:
        return loss_document([], run.state)

    plan = asyncio.run(_plan(tmp_path, losses, nodes[1]))

    assert plan.workers_before == NUM_WORKERS
    assert plan.workers_after == NUM_WORKERS - 2


def test_what_could_not_be_loaded_is_named_while_the_controller_is_down(tmp_path: Path) -> None:
    """The journal knows it, and what is said to be in storage is what the run would resume from."""
    run = _run_in(tmp_path)
    for step in (10, 20):
        save(run.store, small_state(), step=step, root=join(run.path, CHECKPOINTS))
    _find_damaged(run, stored_source(20, 1))

    redundancy = read_status(str(tmp_path))["redundancy"]

    assert redundancy["stored_step"] == 10
    (problem,) = redundancy["problems"]
    assert problem.startswith("step 20 of attempt 1 in storage could not be loaded")


def test_without_a_loss_to_plan_each_node_is_planned_for(tmp_path: Path) -> None:
    """A user who asks what may be lost does not know yet which machine it will be."""
    run = _run_in(tmp_path)
    nodes = [node.name for node in run.state.fleet.nodes.values()]

    async def losses() -> dict[str, Any]:
        return loss_document([], run.state)

    plans = asyncio.run(_answered(tmp_path, losses, plan_each_node))

    assert [plan.lost_nodes for plan in plans] == [(node,) for node in nodes]
    assert {plan.workers_after for plan in plans} == {NUM_WORKERS - 1}


@pytest.mark.parametrize(
    "answer",
    [
        b'{"directory": "/of/another/run", "phase": "training", "step": 4242}',
        b"<html>login</html>",
        b"[1]",
        b"\xff",
        b"",
    ],
)
def test_a_stranger_who_has_the_port_by_now_is_not_the_controller(
    tmp_path: Path, answer: bytes
) -> None:
    """Another run with the same fixed port was shown as this one, and alive."""
    _run_in(tmp_path)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)

    assert _status_beside(tmp_path, head + answer)["controller"] == "down"
    with pytest.raises(CapacityError, match="the controller does not answer"):
        _beside(tmp_path, head + answer, lambda url: plan_losses(url, ["a"]))


def test_a_stranger_that_speaks_no_http_is_not_the_controller(tmp_path: Path) -> None:
    """An SSH server answers first, and with a banner."""
    _run_in(tmp_path)

    assert _status_beside(tmp_path, b"SSH-2.0-OpenSSH_9.2\r\n")["controller"] == "down"


def test_a_proxy_of_the_user_is_not_asked_for_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not reach a cluster's own network."""
    _run_in(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    urllib.request.install_opener(None)  # that was made without a proxy
    body = json.dumps({"directory": str(tmp_path)}).encode()

    found = _status_beside(tmp_path, b"HTTP/1.1 200 OK\r\n\r\n" + body)

    assert found["controller"] == "alive"


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    """It is left alone in a terminal, and must not watch a run that is over for ever."""
    _run_in(tmp_path)
    threading.Timer(1.5, (tmp_path / SUMMARY).write_text, ["{}"]).start()

    lines = CliRunner().invoke(app, ["status", str(tmp_path), "--watch", "--json"]).stdout

    seen = [json.loads(line)["controller"] for line in lines.splitlines()]
    assert len(seen) >= 2
    assert seen == ["down"] * (len(seen) - 1) + ["over"]


def _status_beside(directory: Path, said: bytes) -> dict[str, Any]:
    return _beside(directory, said, read_status)


def _beside(directory: Path, said: bytes, ask: Callable[[str], T]) -> T:
    """Call ``ask`` while somebody at the controller's address says ``said`` to whoever comes."""

    def answer(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client:
                    client.sendall(said)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(4096):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        contact = {**_NOBODY, "url": f"http://127.0.0.1:{server.getsockname()[1]}"}
        (directory / CONTACT).write_text(json.dumps(contact))
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        try:
            return ask(str(directory))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _find_damaged(run: Journaled, *sources: Source) -> None:
    """Let a member leave because of what was damaged; the next attempt had it from elsewhere."""
    run._fold(
        ev.WorkerLeft(
            at_s=run.at_s,
            attempt=run.state.attempt.number,
            worker=run.state.fleet.workers[run.state.attempt.members[0]].name,
            how=ev.Leaving.UNLOADABLE,
            step=0,
            detail="a checksum differs",
            damaged=sources,
        )
    )
    assert run.state.phase is Phase.TRAINING
    assert run.state.bad == sources


async def _plan(
    directory: Path, losses: Callable[[], Awaitable[dict[str, Any]]], *lose: str
) -> RecoveryPlan:
    """Return what the run in ``directory`` would do, if its controller told ``losses``."""
    return await _answered(directory, losses, lambda url: plan_losses(url, lose))


async def _answered(
    directory: Path, losses: Callable[[], Awaitable[dict[str, Any]]], ask: Callable[[str], T]
) -> T:
    """Call ``ask`` with the run in ``directory`` while its controller tells ``losses``."""

    async def told() -> dict[str, Any]:
        return {**await losses(), "directory": str(directory)}

    page = StatusPage(
        host="127.0.0.1",
        port=0,
        status=dict,
        losses=told,
        metrics=collector(),
        live=live_page(directory),
        act=require,
        require=lambda _token: None,
    )
    contact = {**_NOBODY, "url": await page.start()}
    (directory / CONTACT).write_text(json.dumps(contact))
    try:
        return await asyncio.to_thread(ask, str(directory))
    finally:
        await page.stop()


def test_without_a_controller_only_the_end_of_a_compacted_journal_is_read(tmp_path: Path) -> None:
    """A day of a large run took a minute to fold, at each call."""
    run = Journaled(config_at(tmp_path), fault_every=20)
    run.is_compacting = False
    run.grow(60)
    run.compact()
    run.grow(80)
    segment = Path(run.path, "journal", "000001.jsonl")
    lines = segment.read_bytes()
    # A reader of its beginning fails.
    segment.write_bytes(b"x" * 100 + lines[100:])

    folded = Run(run.path).folded()

    assert repr((folded.state, folded.stats)) == repr((run.state, run.stats))
    Path(run.path, "compacted.json").unlink()
    with pytest.raises(JournalCorruptError):
        Run(run.path).folded()
