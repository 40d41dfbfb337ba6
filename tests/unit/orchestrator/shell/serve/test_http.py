"""The controller's answers to a browser."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from orchestrator.core import Incident, RunStats, transition_records
from orchestrator.core.events import Suspected
from orchestrator.diagnosis import Guilty, Suspicion
from orchestrator.fault_kinds import FaultKind
from orchestrator.report import write_report
from orchestrator.shell.serve import NUM_NODES, Live, StatusPage
from tests.support.histories import calm
from tests.support.live_pages import (
    TOKEN,
    collector,
    live_page,
    outside_address,
    refuse_others,
    require,
)
from tests.support.run_directories import Fault, write_run
from tests.unit.orchestrator.shell.serve.test_metrics import STATUS
from ucp_core.storage import LocalStore
from workers.protocol import WorkerPhase

CRASH = Fault(step=20, kind="crash", guilty=("w0002",), pause_s=0.6, lost_steps=1, workers_after=3)


def _browse(
    live: Live,
    look: Callable[[aiohttp.ClientSession], Awaitable[Any]],
    *,
    host: str = "127.0.0.1",
    peer: str | None = None,
) -> Any:
    """Return what ``look`` does, from the address ``peer``, with ``live`` as its base."""

    async def served() -> Any:
        page = _page(live, host)
        base = await page.start()
        try:
            sender = aiohttp.TCPConnector(local_addr=(peer, 0) if peer else None)
            async with aiohttp.ClientSession(base, connector=sender) as session:
                return await look(session)
        finally:
            await page.stop()

    return asyncio.run(served())


def _page(live: Live, host: str = "127.0.0.1") -> StatusPage:
    async def losses() -> dict[str, Any]:
        return {}

    return StatusPage(
        host=host,
        port=0,
        status=dict,
        losses=losses,
        metrics=collector(lambda: STATUS),
        live=live,
        act=require,
        require=refuse_others,
    )


def test_the_page_is_one_file_and_may_not_be_framed(tmp_path: Path) -> None:
    """A page around it could have a person press its buttons."""

    async def look(session: aiohttp.ClientSession) -> tuple[str, str]:
        async with session.get("/") as answer:
            return answer.headers["Content-Security-Policy"], await answer.text()

    policy, text = _browse(live_page(tmp_path), look)

    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert text.startswith("<!doctype html>")


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    """A page polls every two seconds, and a run may wait for hours; its clock goes on."""
    live, stats = live_page(tmp_path), RunStats()
    other = live_page(tmp_path, stats=RunStats(step=7))

    async def look(session: aiohttp.ClientSession) -> list[Any]:
        found: list[Any] = []
        for tag in ("", live.tag):
            tags = {"If-None-Match": tag or live.tag}
            async with session.get("/page.json", headers=tags) as answer:
                found.append((answer.status, answer.headers["Everstep-At"]))
        await other.document()
        return found

    assert _browse(live, look) == [(200, "100.0"), (304, "100.0")]
    assert other.tag != live.tag
    assert stats.step == 0


def test_an_action_needs_the_token(tmp_path: Path) -> None:
    """Everybody who reaches the page may look; who killed a worker must be known to the run."""

    async def look(session: aiohttp.ClientSession) -> list[tuple[int, str]]:
        found = []
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Bearer {TOKEN}"}):
            async with session.post("/actions/kill", json={}, headers=headers) as answer:
                found.append((answer.status, (await answer.json())["message"]))
        async with session.get("/actions/kill") as answer:
            found.append((answer.status, ""))
        return found

    assert _browse(live_page(tmp_path), look) == [
        (403, "that is not the token of the run"),
        (403, "that is not the token of the run"),
        (200, "done"),
        (405, ""),
    ]


def test_reading_beyond_loopback_needs_the_token(tmp_path: Path) -> None:
    """Loss, configuration and output of scripts are for those who may see the run directory.

    A Prometheus on the machine finds all of its runs, each with a token of its own.
    """

    async def look(session: aiohttp.ClientSession) -> list[tuple[int, ...]]:
        found = []
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
            answers = [
                await session.get(f"/{path}", headers=headers)
                for path in ("", "metrics", "page.json", "report", "log", "status", "losses")
            ]
            found.append(tuple(answer.status for answer in answers))
        return found

    write_run(tmp_path)
    here = outside_address()
    from_here = _browse(live_page(tmp_path), look, host=here)
    from_elsewhere = _browse(live_page(tmp_path), look, host=here, peer="127.0.0.1")

    assert from_here == [(200, 200, *[401] * 5), (200,) * 7]
    assert from_elsewhere == [(200, *[401] * 6), (200,) * 7]


def test_a_name_that_was_made_to_lead_here_is_refused(tmp_path: Path) -> None:
    """A page of another site may give its own name this address, and read what it answers."""

    async def look(session: aiohttp.ClientSession) -> list[int]:
        answers = [
            await session.get("/page.json", headers={"Host": host})
            for host in ("evil.example:80", "localhost:4000", "[::1]:9")
        ]
        return [answer.status for answer in answers]

    assert _browse(live_page(tmp_path), look) == [403, 200, 200]


def test_a_restarted_controller_takes_its_port_again(tmp_path: Path) -> None:
    """A tab that is open looks for it there; a port that another has taken ends no run."""

    async def looked() -> list[int]:
        pages = [_page(live_page(tmp_path)) for _ in range(3)]
        ports = [int((await pages[0].start()).rpartition(":")[2])]
        ports.append(int((await pages[1].start(ports[0])).rpartition(":")[2]))
        await pages[0].stop()
        ports.append(int((await pages[2].start(ports[0])).rpartition(":")[2]))
        for page in pages[1:]:
            await page.stop()
        return ports

    first, other, again = asyncio.run(looked())

    assert again == first
    assert other != first


def test_a_scrape_of_256_workers_leaves_the_loop_of_the_run_alone() -> None:
    """Its text takes tens of milliseconds, in which no fault would be noticed."""
    row = STATUS["workers"][0]
    rows = [{**row, "rank": n, "worker": f"w{n}"} for n in range(256)]
    scraped = collector(lambda: {**STATUS, "workers": rows})
    costs_s = []
    for _ in range(5):
        begun_s = time.thread_time()
        text = scraped.prepare()
        costs_s.append(time.thread_time() - begun_s)

    assert min(costs_s) < 0.005
    assert text().count(b"everstep_worker_step{") == 256


def test_the_log_of_a_rank_is_read_from_the_run_directory(tmp_path: Path) -> None:
    """A person at the page may have no access to the storage."""
    log = tmp_path / "logs/attempt-0002/rank1.log"
    log.parent.mkdir(parents=True)
    log.write_text("loss 3\n")

    async def look(session: aiohttp.ClientSession) -> list[tuple[int, str]]:
        found = []
        for query in ("attempt=2&rank=1", "rank=1", "attempt=1&rank=1", "rank=../1"):
            async with session.get(f"/log?{query}") as answer:
                found.append((answer.status, (await answer.text())[:7]))
        return found

    told = _browse(live_page(tmp_path), look)

    assert told == [(200, "loss 3\n"), (200, "loss 3\n"), (200, ""), (400, "attempt")]


def test_the_report_so_far_is_a_link_of_the_page(tmp_path: Path) -> None:
    """It was a command, for a terminal on a machine that has the run directory."""

    async def look(session: aiohttp.ClientSession) -> list[Any]:
        async with session.get("/report") as answer:
            policy = answer.headers.get("Content-Security-Policy", "")
            return [answer.status, answer.content_type, policy[:18], await answer.text()]

    refused = _browse(live_page(tmp_path), look)
    write_run(tmp_path, finished=False)
    *told, text = _browse(live_page(tmp_path), look)

    assert refused[0] == 503
    assert "holds no run" in refused[3]
    assert told == [200, "text/html", "default-src 'none'"]
    assert text == Path(write_report(str(tmp_path))).read_text()
    assert '"step": 60' in text


def test_the_page_has_loss_incidents_and_workers(tmp_path: Path) -> None:
    """One look must tell what happened, whether anything was lost and what it does now."""
    write_run(tmp_path, faults=(CRASH,))
    crash = Incident(number=1, kind="crash", guilty=("w2",), places=((2, "w2", "00" * 28),))
    member = {"rank": 0, "worker": "w1", "node": "00" * 28, "pid": 5, "state": "training"}
    live = live_page(
        tmp_path,
        stats=RunStats(step=60, incidents=[crash], phase="training"),
        reports={"w1": replace(calm("w1", 0), phase=WorkerPhase.REDUCING)},
        nodes=2,
        described={"phase": "training", "members": [member]},
    )
    for _ in range(70):
        live.note()

    document = json.loads(asyncio.run(live.document()))

    assert len(document["loss"]) == 60
    assert document["incidents"][0]["places"] == [[2, "w2", "00" * 28]]
    assert document["sentence"] == "Trains on 1 worker."
    (worker,) = document["live"]["workers"]
    assert (worker["seconds"], worker["compute_s"]) == ("r" * 60, 0.3)
    assert [node["state"] for node in document["live"]["nodes"]] == ["alive", "alive"]
    assert (document["unit"], document["goal"]) == ("tokens", 60)


def test_busy_machines_are_one_line_on_the_page_as_well(tmp_path: Path) -> None:
    """It named each rank in turn, where terminal and report had one line."""
    slow = [
        Suspicion(
            kind=FaultKind.SLOW_COMPUTE,
            guilty=Guilty(ranks=(rank,)),
            confidence=0.5,
            since_s=60.0 + rank,
            evidence=f"rank {rank} is slow",
            worker=f"w{rank}",
        )
        for rank in range(4)
    ]
    stats = RunStats()
    for one in slow:
        event = Suspected(at_s=one.since_s, attempt=1, suspects=(one,))
        for record in transition_records(event, (), attempt=1):
            stats.add(record)
    rank = {"kind": "slow_compute", "worker": "w3", "evidence": "rank 3 is slow", "since_s": 99.0}
    slow_link = {"kind": "slow_link", "worker": "", "evidence": "a link is slow", "since_s": 99.0}
    live = live_page(tmp_path, stats=stats, described={"suspects": [rank, slow_link]})

    busy, link = json.loads(asyncio.run(live.document()))["live"]["suspects"]

    assert busy["evidence"].startswith("Ranks 0, 1, 2, 3 seemed slow in turn, 4 times in 3 s")
    assert link["evidence"] == "a link is slow"


def test_curves_read_what_is_new_and_take_back_what_is_redone(tmp_path: Path) -> None:
    """The file grows with every step, and may be gigabytes: it is read once, and its end first."""
    path = tmp_path / "metrics/rank0.jsonl"
    path.parent.mkdir()

    def write(attempt: int, *steps: int) -> None:
        with path.open("a") as file:
            for step in steps:
                line = {"step": step, "attempt": attempt, "loss": 10.0 * attempt + step}
                file.write(json.dumps({**line, "tokens": 8, "samples": 8}) + "\n")

    live = live_page(tmp_path)
    curves = live.curves
    write(1, 1, 2, 3)
    with path.open("a") as file:
        file.write('{"step": 4, "attempt"')
    asyncio.run(live.look())
    assert [step for step, _ in curves.loss] == [1.0, 2.0, 3.0]
    with path.open("a") as file:
        file.write(': 1, "loss": 14.0}\n')
    write(2, 3, 4)
    live._looked_s = 0.0
    asyncio.run(live.look())

    assert curves.loss == [(1.0, 11.0), (2.0, 12.0), (3.0, 23.0), (4.0, 24.0)]
    assert curves.tokens_per_step == 0


class _Stalled(LocalStore):
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def sizes(self, path: str) -> dict[str, int]:
        self.goes_on.wait()
        return super().sizes(path)


def test_while_storage_stalls_the_page_is_there_without_its_newest_points(tmp_path: Path) -> None:
    """Then people look, and the run trains on."""
    path = tmp_path / "metrics/rank0.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1, "attempt": 1, "loss": 2.0}\n')
    store = _Stalled()
    live = live_page(tmp_path, store=store)
    curves = live.curves

    async def look() -> tuple[list[Any], list[Any]]:
        await live.look()
        before = list(curves.loss)
        store.goes_on.set()
        while not curves.loss:
            await live.look()
        return before, curves.loss

    assert asyncio.run(look()) == ([], [(1.0, 2.0)])


def test_the_page_of_256_workers_costs_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    """It is asked for every two seconds, by the process that has to notice faults."""
    members = [
        {"rank": n, "worker": f"w{n}", "node": f"{n % 32:02d}" * 28, "pid": n, "state": "training"}
        for n in range(256)
    ]
    incidents = [Incident(number=n, kind="crash", t_detect_s=float(n)) for n in range(1, 101)]
    live = live_page(
        tmp_path,
        stats=RunStats(
            incidents=incidents,
            progress=[(float(n), n) for n in range(1000)],
            sizes=[(float(n), n % 7) for n in range(300)],
        ),
        reports={f"w{n}": calm(f"w{n}", n) for n in range(256)},
        nodes=32,
        described={"phase": "training", "members": members},
    )
    costs = []
    for _ in range(5):
        begun_s = time.process_time()
        live.note()
        live.note()
        live._made_s = float("-inf")
        asyncio.run(live.document())
        costs.append(time.process_time() - begun_s)

    assert min(costs) < 0.02


def test_the_page_of_many_nodes_shows_some_and_says_so(tmp_path: Path) -> None:
    """With a row for each of 80,000 workers it had 16 MB."""
    shown = json.loads(live_page(tmp_path, nodes=3 * NUM_NODES).made())["live"]

    assert len(shown["nodes"]) == NUM_NODES
    assert shown["node_states"] == {"alive": 3 * NUM_NODES}
