"""Take the pictures of README, of a real demo: ``python -m tests.support.pictures``."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.chromium import Browser

IMAGES = Path(__file__).parents[2] / "dashboards/images"
WIDTH, HEIGHT = 1266, 1440
#: The run grows back after two faults: its page then shows all three incidents.
INCIDENTS = 3


def main() -> None:
    """Run ``everstep demo``, and write the page of the disturbed run and its report."""
    everstep = str(Path(sys.executable).with_name("everstep"))
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        profile = Path(folder, "profile")
        profile.mkdir()
        run = Path(folder, "runs/demo/disturbed")
        with Browser(profile) as browser, subprocess.Popen([everstep, "demo"], cwd=folder) as demo:
            while demo.poll() is None and not (run / "controller.json").exists():
                time.sleep(0.5)
            contact = json.loads((run / "controller.json").read_text(encoding="utf-8"))
            browser.open(contact["url"], width=WIDTH)
            incidents = "document.querySelectorAll('[data-incident]').length"
            while demo.poll() is None and browser.run(incidents) < INCIDENTS:
                time.sleep(0.5)
            # The workers that came last have a past to show.
            browser.await_true("run.live.workers.every(each => each.seconds.length >= 8)")
            browser.screenshot(IMAGES / "live_page.png", size=(WIDTH, HEIGHT))
            assert demo.wait() == 0
            browser.open(f"file://{run}/report.html", width=WIDTH)
            browser.await_true("document.querySelector('svg') !== null")
            browser.screenshot(IMAGES / "report.png", size=(WIDTH, HEIGHT))


if __name__ == "__main__":
    main()
