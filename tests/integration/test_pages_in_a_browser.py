"""The pages in a browser, of runs that no cluster runs."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import RunStats
from orchestrator.driver.pages import RunIndex, run_cards
from orchestrator.report import write_report
from orchestrator.shell.serve import Live, StatusPage
from tests.support.chromium import CHROMIUM, Browser
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

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
CRASH = Fault(step=20, kind="crash", guilty=("w0002",), pause_s=0.6, lost_steps=1, workers_after=3)
#: The place of a chart's point, of 0 to 1 from left to right, for an event of the pointer.
_POINTER = """((kind, at) => {
  const chart = document.querySelector(".chart > svg"), box = chart.getBoundingClientRect();
  chart.setPointerCapture = () => {};
  chart.dispatchEvent(new PointerEvent(kind, {pointerType: "mouse", bubbles: true,
    clientX: box.left + at * box.width, clientY: box.top + box.height / 2}));
})"""


class _Served:
    """A page that a thread serves, and that may be ended and come again."""

    def __init__(self, directory: Path, host: str) -> None:
        self._directory, self._host = directory, host
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._page: StatusPage | None = None

    def start(self, *, step: int = 0, last_port: int = 0, live: Live | None = None) -> str:
        """Serve a run that has done so many steps; return the page's address."""
        page = self._page = StatusPage(
            host=self._host,
            port=0,
            status=dict,
            losses=self._losses,
            metrics=collector(),
            live=live or live_page(self._directory, stats=RunStats(step=step, phase="training")),
            act=require,
            require=refuse_others,
        )
        return asyncio.run_coroutine_threadsafe(page.start(last_port), self._loop).result(30)

    def stand_still(self) -> threading.Event:
        """Accept and answer nothing until the event that is returned is set."""
        go_on = threading.Event()
        self._loop.call_soon_threadsafe(go_on.wait, 300.0)
        return go_on

    def stop(self) -> None:
        """Stop serving."""
        assert self._page is not None
        asyncio.run_coroutine_threadsafe(self._page.stop(), self._loop).result(30)

    async def _losses(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., _Served]:
    """Return what serves a run's page at an address of this machine."""
    write_run(tmp_path)
    return lambda host="127.0.0.1": _Served(tmp_path, host)


def test_a_chart_tells_its_values_and_lets_a_person_look_closer(
    tmp_path: Path, browser: Browser
) -> None:
    """A loss that begins at 4.3 makes a flat line of everything behind it."""
    write_run(tmp_path, steps=400, faults=(CRASH,), device_bytes=3.0 * 2**30)
    write_report(str(tmp_path))
    browser.open(f"file://{tmp_path}/report.html", width=1280)
    browser.await_true("document.querySelectorAll('#charts svg path.curve').length >= 6")

    browser.run(f"{_POINTER}('pointermove', 0.5)")
    told = browser.run("document.querySelector('.readout').textContent")
    assert told.startswith("step ")
    assert "training 1." in told
    for kind, at in (("pointerdown", 0.5), ("pointermove", 0.8), ("pointerup", 0.8)):
        browser.run(f"{_POINTER}({kind!r}, {at})")
    assert browser.run("views['Loss by step'].from") > 100
    browser.click(".chart button")
    assert browser.run("views['Loss by step'].log") is True
    browser.run("document.querySelector('.chart > svg').ondblclick()")
    assert browser.run("views['Loss by step'].from") is None
    titles = browser.run("[...document.querySelectorAll('#charts h3')].map(e => e.firstChild.data)")
    further = ["Learning rate", "Gradient norm", "Step time, s"]
    assert titles[4:] == [*further, "Memory of the fullest device, GiB"]
    assert browser.run("run.curves['Memory of the fullest device, GiB'][0]") == [1.0, 3.0]


def test_a_tab_finds_a_controller_that_was_restarted(
    serve: Callable[..., _Served], browser: Browser
) -> None:
    """It came back at another port, where no open tab looked for it."""
    served = serve()
    first = served.start(step=7)
    browser.open(first)
    browser.await_true("document.title.includes('7/60')")

    served.stop()
    browser.await_true("document.body.style.opacity === '0.55'")
    again = served.start(step=9, last_port=int(first.rpartition(":")[2]))

    assert again == first
    browser.await_true("document.title.includes('9/60')")
    served.stop()


def test_a_tab_says_that_a_controller_stands_still(
    serve: Callable[..., _Served], browser: Browser
) -> None:
    """A stopped process accepts requests, and its last numbers would look like its present ones."""
    served = serve()
    browser.open(served.start(step=7))
    browser.await_true("document.title.includes('7/60')")

    go_on = served.stand_still()
    browser.await_true("document.body.style.opacity === '0.55'")
    assert "does not answer now" in browser.run("document.getElementById('since').textContent")
    go_on.set()

    browser.await_true("document.body.style.opacity === '1'")
    served.stop()


def test_a_page_for_others_asks_for_the_token_before_it_shows_anything(
    serve: Callable[..., _Served], browser: Browser
) -> None:
    """Loss, configuration and output of scripts were open to all who reach the port."""
    served = serve(outside_address())
    browser.open(served.start(step=7))
    browser.await_true("Boolean(document.getElementById('key'))")
    assert "7/60" not in browser.run("document.title")

    browser.run(f"document.getElementById('key').value = {TOKEN!r}")
    browser.click("form button")

    browser.await_true("document.title.includes('7/60')")
    # The browser follows a link without the token.
    browser.run(
        "URL.createObjectURL = blob => { blob.text().then(text => { window.got = text; });"
        " return '#'; }"
    )
    browser.click("#actions a")
    browser.await_true(
        "window.got?.startsWith('<!doctype html>') && got.includes('weights digest')"
    )
    browser.click("#actions code + button")
    assert browser.run("getSelection().toString()").startswith("everstep export ")
    assert browser.run("document.querySelector('#actions code + button').textContent") == "copied"
    served.stop()


def test_the_list_of_runs_fits_a_phone_and_lays_two_runs_over_one_another(
    tmp_path: Path, browser: Browser
) -> None:
    """Words broke letter by letter, and two runs could not be compared."""
    for name in ("a-run-with-a-long-name-of-several-words", "other"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, faults=(CRASH,))
    index, is_seen = RunIndex(0), threading.Event()
    row = {"directory": str(tmp_path / "other"), "address": "10.0.0.1:6379", "page": None}
    assert len(run_cards([row], {})) == 2

    def end() -> None:
        if is_seen.wait(60):
            raise KeyboardInterrupt

    def shown() -> None:
        with pytest.raises(KeyboardInterrupt):
            index.serve(lambda: [row], pause=end)

    thread = threading.Thread(target=shown)
    thread.start()
    browser.open(index.address, width=390)
    browser.await_true("document.querySelectorAll('.run').length === 2")
    for number in (0, 1):
        browser.run(f"document.querySelectorAll('.run input')[{number}].click()")
    browser.await_true("document.querySelectorAll('#charts svg path.curve').length === 2")
    assert browser.run("document.documentElement.scrollWidth") == 390
    browser.screenshot(tmp_path / "list.png")
    is_seen.set()
    thread.join()


def test_256_workers_and_10_000_steps_are_drawn_at_once(tmp_path: Path, browser: Browser) -> None:
    """It draws every two seconds, and a person wants to scroll meanwhile."""
    write_run(tmp_path, steps=10_000)
    node = "{:02d}".format
    members = [
        {
            "rank": n,
            "worker": f"w{n}",
            "node": node(n % 32) * 28,
            "pid": n,
            "state": "training",
        }
        for n in range(256)
    ]
    live = live_page(
        tmp_path,
        stats=RunStats(step=10_000, phase="training", progress=[(float(n), n) for n in range(900)]),
        reports={f"w{n}": calm(f"w{n}", n) for n in range(256)},
        nodes=32,
        described={"phase": "training", "members": members},
    )
    for _ in range(60):
        live.note()
    served = _Served(tmp_path, "127.0.0.1")
    browser.open(served.start(live=live))
    browser.await_true("document.querySelectorAll('.worker .strip').length === 256")
    browser.await_true("run.loss.length > 700")
    drawn = "(() => { drawn = {}; const begun = performance.now(); draw(); "
    costs_ms = [
        browser.run(f"{drawn} document.body.offsetHeight; return performance.now() - begun; }})()")
        for _ in range(5)
    ]
    served.stop()

    assert min(costs_ms) < 500.0, costs_ms
