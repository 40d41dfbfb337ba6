"""The live page in a browser, of a real run on simulated nodes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.driver.launch import Launched
from tests.support.chromium import CHROMIUM, Browser
from tests.support.reach import PACED
from tests.support.run_command import wait

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]


def _kinds(run: Launched) -> list[tuple[str, str]]:
    """Return the kind of each event in the journal, and what it is about."""
    files = sorted(Path(run.url, "journal").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(one["kind"], str(one.get("target", one.get("node", "")))) for one in records]


def _workers(run: Launched) -> dict[int, str]:
    status = run.status() or {"workers": []}
    rows = [row for row in status["workers"] if row["state"] == "training"]
    return {row["rank"]: row["worker"] for row in rows}


@pytest.mark.chaos
def test_a_person_sees_the_run_and_kills_with_the_token_alone(
    begin_endless: Callable[..., Launched], browser: Browser, tmp_path: Path
) -> None:
    """The page shows a fault while it happens, and makes none without the token."""
    run = begin_endless(workers__standby_per_node=0, checkpoint__every_steps=10_000, **PACED)
    wait(lambda: len(_workers(run)) == 4, "four workers train")
    first = _workers(run)
    browser.open(run.contact()["url"])

    browser.await_true("document.querySelectorAll('.worker .strip').length === 4")
    browser.await_true("document.querySelectorAll('#charts svg path.curve').length >= 3")
    assert "Trains on 4 workers" in browser.run("document.querySelector('.says').textContent")
    browser.click("#log button")
    browser.await_true("!document.getElementById('lines').hidden")

    victim = f"[data-kill='{first[3]}']"
    browser.click(victim)
    assert (
        browser.run("document.getElementById('told').textContent") == "Type the run's token first."
    )
    assert not browser.run("document.getElementById('ask').open")
    _type(browser, "token", "another")
    browser.click(victim)
    browser.click("#ask button[value=yes]")
    browser.await_true("document.getElementById('told').textContent.includes('not the token')")
    assert _workers(run) == first
    assert "FaultInjected" not in [kind for kind, _ in _kinds(run)]

    _type(browser, "token", run.token())
    browser.click(victim)
    browser.click("#ask button[value=no]")
    browser.click(victim)
    browser.click("#ask button[value=yes]")
    browser.await_true(
        "document.querySelector('[data-incident=\"1\"]')?.textContent.includes('back in')"
    )
    assert ("FaultInjected", first[3]) in _kinds(run)
    told = browser.run("document.querySelector('[data-incident=\"1\"]').textContent")
    assert "crash" in told
    assert first[3] in told
    assert "SIGKILL" in told
    browser.run("document.querySelector('[data-incident=\"1\"]').open = true")
    browser.screenshot(tmp_path / "1600.png")


@pytest.mark.chaos
def test_each_action_is_an_event_in_the_journal_and_the_end_has_a_report(
    begin_endless: Callable[..., Launched], nodes: Any, browser: Browser, tmp_path: Path
) -> None:
    """A run that did something for a person has to say so, or its history cannot be told."""
    run = begin_endless(workers__standby_per_node=0, checkpoint__every_steps=10_000, **PACED)
    wait(lambda: len(_workers(run)) == 4, "four workers train")
    browser.open(run.contact()["url"])
    _type(browser, "token", run.token())

    _save_and_resize(run, browser)
    _lose_a_node(run, browser, nodes.nodes()[-1])
    nodes.kill_node(nodes.nodes()[-1])
    _leave_a_node(run, browser, nodes.add_node())
    browser.open(run.contact()["url"], width=390, is_dark=True)
    browser.await_true("document.querySelectorAll('.worker .strip').length === 2")
    assert browser.run("document.documentElement.scrollWidth") == 390
    browser.screenshot(tmp_path / "390.png")

    step = int(browser.run("run.step")) + 15
    _type(browser, "at", str(step))
    browser.click("#stop")
    browser.click("#ask button[value=yes]")
    wait(lambda: run.summary() is not None, "it is over")
    summary = run.summary() or {}
    assert summary["outcome"] == "stopped"
    assert step <= summary["steps"] < step + 15
    browser.open(f"file://{summary['report']}")
    browser.await_true("document.querySelectorAll('[data-incident]').length >= 3")


def _save_and_resize(run: Launched, browser: Browser) -> None:
    browser.await_true("run.safe[0][1].startsWith('step')")
    browser.click("#save")
    wait(lambda: ("SaveRequested", "") in _kinds(run), "it is asked to save")
    wait(lambda: bool(run.saves()), "a step is in storage")
    for num in (2, 4):
        _type(browser, "num", str(num))
        browser.click("#workers")
        wait(lambda: len(_workers(run)) == num, f"{num} workers train")  # noqa: B023  at once
        rows = (run.status() or {"workers": []})["workers"]
        assert len({row["node"] for row in rows}) == 2, "also two workers protect each other"
    assert [kind for kind, _ in _kinds(run)].count("WorkersSet") == 2


def _lose_a_node(run: Launched, browser: Browser, node: str) -> None:
    browser.click(f"[data-kill-node='{node}']")
    browser.click("#ask button[value=yes]")
    browser.await_true("document.querySelector('.node.lost') !== null")
    assert ("FaultInjected", node) in _kinds(run)
    wait(lambda: len(_workers(run)) == 2, "it trains without the node")


def _leave_a_node(run: Launched, browser: Browser, node: str) -> None:
    wait(lambda: len(_workers(run)) == 4, "it has grown onto the new node")
    browser.click(f"[data-drain='{node}']")
    browser.click("#ask button[value=yes]")
    wait(lambda: ("NodeDraining", node) in _kinds(run), "it is asked to leave a node")
    wait(lambda: len(_workers(run)) == 2, "it has left the node")


def _type(browser: Browser, field: str, text: str) -> None:
    element = f"document.getElementById({field!r})"
    browser.await_true(f"Boolean({element})")
    browser.run(f"{element}.value = {text!r}; {element}.oninput?.({{target: {element}}})")
