"""A report as a browser shows it."""

from pathlib import Path

import pytest

from orchestrator.report import write_report
from tests.support.chromium import CHROMIUM, Browser
from tests.support.run_directories import Fault, write_run

CRASH = Fault(step=20, kind="crash", guilty=("w0002",), pause_s=0.6, lost_steps=1, workers_after=3)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
def test_a_row_says_that_it_opens_and_has_the_colours_of_its_own_bars(tmp_path: Path) -> None:
    """A key of colours stood above closed rows, and explained bars that were not to be seen."""
    path = write_run(tmp_path / "run", faults=(CRASH,))
    (path / "metrics/validation.jsonl").write_text(
        '{"step": 10, "loss": 1.5, "attempt": 1}\n{"step": 20, "loss": 1.8, "attempt": 1}\n'
    )
    report = write_report(str(path))
    profile = tmp_path / "profile"
    profile.mkdir()

    with Browser(profile) as browser:
        browser.open(f"file://{report}", width=1280)
        browser.await_true("Boolean(document.querySelector('details.incident'))")
        row = "document.querySelector('details.incident')"
        mark = f"getComputedStyle({row}.querySelector('summary > *'), '::before').content"
        shown = "[...document.querySelectorAll('#incidents .key')].filter(x => x.checkVisibility())"
        assert browser.run(f"{shown}.length") == 0
        closed = browser.run(mark)
        browser.run(f"{row}.open = true")
        assert browser.run(f"{shown}.length") == 1
        named = browser.run(f"{shown}[0].textContent")
        tiles = browser.run("document.querySelector('.tiles').textContent")
        browser.screenshot(tmp_path / "1280.png")

    assert "fence" in named
    assert closed.strip('"\N{NO-BREAK SPACE} ') == "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}"
    assert "best 1.5000 at step 10" in tiles
