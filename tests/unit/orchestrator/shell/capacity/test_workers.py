"""The controller's side of worker processes; these are stood in for at Ray's handles."""

import asyncio
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from orchestrator.core import events as ev
from orchestrator.shell.capacity import Nodes, NodeView
from orchestrator.shell.capacity import workers as workers_module
from tests.support.keeper_handles import Call, ClusterTable, nodes_of, workers_of
from workers.protocol import Ending

NODE = "a1b2" * 14
#: The address of a machine that does not answer, which says nothing of its processes.
NOWHERE = ("224.0.0.1", 9)


def _node_with(**calls: Call) -> Nodes:
    """Return a watcher that knows a node whose keeper answers ``calls``."""
    nodes = nodes_of(ClusterTable(), lambda _: None)
    nodes.views[NODE] = NodeView(NODE, NOWHERE, keeper=SimpleNamespace(**calls))
    return nodes


@pytest.mark.parametrize(
    ("error", "num_killed"),
    [(ActorUnavailableError("no connection", b"0" * 16), 1), (ActorDiedError(), 0)],
)
def test_a_worker_that_cannot_be_reached_after_a_restart_is_killed(
    monkeypatch: pytest.MonkeyPatch, error: RayError, num_killed: int
) -> None:
    """It is replaced, and trained or waited on unseen: it was unknown when the run ended."""
    posted: asyncio.Queue[ev.Event] = asyncio.Queue()
    killed: list[Any] = []

    async def refuse() -> None:
        raise error

    async def kill(_: str) -> bool:
        return True

    handle = SimpleNamespace(hello=Call(refuse), hold=Call(refuse))
    workers = workers_of(_node_with(kill=Call(kill)), posted.put_nowait)

    async def play() -> ev.Event:
        assert await workers.survey([("w0001", NODE, 60.0)]) == []
        # As the machine orders for each that was not found.
        workers.kill("w0001")
        return await asyncio.wait_for(posted.get(), 120.0)

    monkeypatch.setattr("ray.get_actor", lambda *_, **__: handle)
    monkeypatch.setattr("ray.kill", lambda found, **_: killed.append(found))

    assert isinstance(asyncio.run(play()), ev.WorkerExited)
    assert killed == [handle] * num_killed
    assert posted.empty()


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_node_is_lost_unless_a_worker_there_answers(
    monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """A stopped keeper holds up the others, and its healthy node was given up for it."""
    monkeypatch.setattr(workers_module, "ALIVE_S", 120.0 if answers else 0.01)
    posted: asyncio.Queue[ev.Event] = asyncio.Queue()
    nodes = nodes_of(ClusterTable(), posted.put_nowait)
    nodes.views[NODE] = NodeView(NODE, NOWHERE)
    workers = workers_of(nodes, posted.put_nowait)
    is_there = asyncio.Event()

    async def hello() -> dict[str, int]:
        await is_there.wait()
        return {"pid": 7, "attempt": 1}

    async def hold() -> None:
        await asyncio.Event().wait()

    async def play() -> list[ev.Event]:
        is_there.set()
        await workers.survey([("w0001", NODE, 120.0)])
        ready = await posted.get()
        if not answers:
            is_there.clear()
        for _ in range(3):
            workers.node_silent(NODE, 2.0, "no report")
        said = await asyncio.wait_for(posted.get(), 120.0)
        return [ready, said]

    handle = SimpleNamespace(hello=Call(hello), hold=Call(hold))
    monkeypatch.setattr("ray.get_actor", lambda *_, **__: handle)

    _, said = asyncio.run(play())
    expected = {
        True: ev.KeeperSilent(at_s=0.0, node=NODE, silent_s=2.0, is_awaited=True),
        False: ev.NodeLost(at_s=1.0, node=NODE, cause="no report"),
    }
    assert said == expected[answers]
    assert posted.empty()
    assert nodes.views[NODE].lost.is_set() is not answers


def test_a_node_is_not_lost_if_its_keeper_dies_while_a_worker_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its silence has a reason: Ray restarts the keeper."""
    monkeypatch.setattr(workers_module, "ALIVE_S", 0.01)
    posted: list[ev.Event] = []
    nodes = nodes_of(ClusterTable(), posted.append)
    view = nodes.views[NODE] = NodeView(NODE, NOWHERE)
    workers = workers_of(nodes, posted.append)

    async def play() -> None:
        workers.node_silent(NODE, 2.0, "no report")
        view.is_returning = True
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(play())
    assert posted == []
    assert not view.lost.is_set()


def test_no_worker_starts_beside_one_that_may_still_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill is lost with the network; it is told again until the node says that it worked."""
    heard: list[str] = []
    answers = iter([False, False, True])

    async def kill(worker: str) -> bool:
        is_gone = next(answers)
        heard.append(f"{worker} is {'gone' if is_gone else 'not confirmed'}")
        return is_gone

    async def hello() -> dict[str, int]:
        return {"pid": 7}

    async def hold() -> None:
        await asyncio.Event().wait()

    def boot(*, worker: str, directory: str) -> Any:
        assert directory
        heard.append(f"{worker} starts")
        return SimpleNamespace(hello=Call(hello), hold=Call(hold))

    seen: dict[tuple[str, type[ev.Event]], asyncio.Event] = defaultdict(asyncio.Event)
    posted: list[ev.WorkerReady | ev.WorkerExited] = []

    def post(event: ev.Event) -> None:
        assert isinstance(event, ev.WorkerReady | ev.WorkerExited)
        posted.append(event)
        seen[event.worker, type(event)].set()

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=boot))
    monkeypatch.setattr("ray.remote", lambda _: actor)
    workers = workers_of(_node_with(kill=Call(kill)), post)

    async def play() -> None:
        workers.start("w0001", NODE)
        await asyncio.wait_for(seen["w0001", ev.WorkerReady].wait(), 120.0)
        workers.kill("w0001")
        await asyncio.wait_for(seen["w0001", ev.WorkerExited].wait(), 120.0)
        # As the machine does when the node is back: one is started, is not wanted, is another.
        workers.start("w0002", NODE)
        await asyncio.sleep(0)
        workers.kill("w0002")
        workers.start("w0003", NODE)
        await asyncio.wait_for(seen["w0003", ev.WorkerReady].wait(), 120.0)
        await workers.close()

    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    asyncio.run(play())

    lost = "w0001 is not confirmed"
    assert heard == ["w0001 starts", lost, lost, "w0001 is gone", "w0003 starts"]
    exited = [event for event in posted if isinstance(event, ev.WorkerExited)]
    assert [(event.worker, event.cause) for event in exited] == [
        ("w0001", "killed"),
        ("w0002", "killed"),
    ]


@pytest.mark.parametrize("why", ["killed", "over"])
def test_a_silent_ray_delays_no_start_and_its_late_workers_are_ended(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The loop stood still until Ray's head had taken in each process."""
    posted: list[ev.Event] = []
    killed: list[Any] = []
    loop_goes_on, has_killed = threading.Event(), threading.Event()
    handle = SimpleNamespace()

    def boot(**_: object) -> Any:
        # Only the loop ends this wait.
        assert loop_goes_on.wait(120.0)
        return handle

    def end(found: Any, *, no_restart: bool) -> None:
        assert no_restart
        assert threading.current_thread() is not threading.main_thread()
        killed.append(found)
        has_killed.set()

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=boot))
    monkeypatch.setattr("ray.remote", lambda _: actor)
    workers = workers_of(_node_with(), posted.append)

    async def play() -> None:
        workers.start("w0001", NODE)
        await asyncio.sleep(0)
        if why == "killed":
            workers.kill("w0001")
        loop_goes_on.set()
        if why == "killed":
            assert await asyncio.to_thread(has_killed.wait, 120.0)
        await workers.close()

    monkeypatch.setattr("ray.kill", end)
    asyncio.run(play())

    assert killed == [handle]
    assert [type(event) for event in posted] == ([ev.WorkerExited] if why == "killed" else [])


#: Ray 2.60's record of an actor's process.
DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n\tpid: 77\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
)
RAISED = (
    "The actor died because of an error raised in its creation task, ray::Worker.__init__() "
    '(pid=77, ip=10.0.0.2)\n  File "x.py", line 1, in <module>\nImportError: no libfoo.so\n'
    "The actor never ran - it was cancelled before it started running."
)
SHORT = f"{DIED} Task was killed due to the node running low on memory.\nMemory used: 31 of 32 GB"


@pytest.mark.parametrize(
    ("told", "known", "cause", "detail"),
    [
        (DIED, Ending("process 77 died of SIGSEGV"), "crash", "process 77 died of SIGSEGV"),
        (DIED, Ending(""), "crash", "process 77 died"),
        (DIED, Ending("process 77 ...", is_out_of_memory=True), "out_of_memory", "process 77 ..."),
        (RAISED, Ending(""), "crash", "process 77 raised at start: ImportError: no libfoo.so"),
        (SHORT, Ending(""), "out_of_memory", "Ray ended process 77: its node was running low on"),
    ],
)
def test_a_death_is_reported_with_the_cause_as_far_as_it_is_known(
    told: str, known: Ending, cause: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own words name three possible causes, and a person would have to look at the node."""

    class DiedError(ActorDiedError):
        def __str__(self) -> str:
            return told

    event, killed = _exit_of(DiedError(), known, monkeypatch)
    assert event.cause == cause
    assert event.detail.startswith(detail)
    assert killed == 0


@pytest.mark.parametrize(
    ("pid", "known", "cause", "detail"),
    [
        (77, Ending("process 77 died of SIGKILL"), "crash", "process 77 died of SIGKILL"),
        (77, Ending("process 77 ...", is_out_of_memory=True), "out_of_memory", "process 77 ..."),
        (77, Ending(""), "crash", "The actor is unavailable"),
        (0, Ending("process 0 died"), "crash", "The actor is unavailable"),
    ],
)
def test_a_death_of_which_ray_knows_too_late_is_asked_of_the_keeper(
    pid: int, known: Ending, cause: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With busy processors a user read "Socket closed", and no shortage of memory was seen."""

    class UnavailableError(ActorUnavailableError):
        def __init__(self) -> None:
            super().__init__("Socket closed", b"0" * 16)

        def __str__(self) -> str:
            return "The actor is unavailable: Socket closed"

    event, killed = _exit_of(UnavailableError(), known, monkeypatch, pid=pid)
    assert event.cause == cause
    assert event.detail.startswith(detail)
    assert killed == 1, "it may live"


def _exit_of(
    error: RayError, known: Ending, monkeypatch: pytest.MonkeyPatch, *, pid: int = 0
) -> tuple[ev.WorkerExited, int]:
    """Return what is posted of a worker at ``error``, and how often it is killed.

    Without a ``pid`` it has not started yet.
    """
    killed: list[Any] = []

    async def hello() -> dict[str, int]:
        if not pid:
            raise error
        return {"pid": pid}

    async def refuse() -> None:
        raise error

    async def ending(asked: int, _: float) -> Ending:
        return known if asked in (pid, 77) else Ending("")

    async def kill(_: str) -> bool:
        return True

    posted: asyncio.Queue[ev.Event] = asyncio.Queue()
    handle = SimpleNamespace(hello=Call(hello), hold=Call(refuse))
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: handle))
    monkeypatch.setattr("ray.remote", lambda _: actor)
    workers = workers_of(_node_with(ending=Call(ending), kill=Call(kill)), posted.put_nowait)

    async def play() -> ev.WorkerExited:
        workers.start("w0001", NODE)
        while not isinstance(event := await asyncio.wait_for(posted.get(), 120.0), ev.WorkerExited):
            pass
        return event

    monkeypatch.setattr("ray.kill", lambda found, **_: killed.append(found))
    return asyncio.run(play()), len(killed)
