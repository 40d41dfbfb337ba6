"""Where pages are, and the index of all runs."""

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.driver import open_page
from orchestrator.driver.pages import RunIndex, run_cards
from orchestrator.errors import CapacityError, RunNotFoundError
from orchestrator.report import CONFIG, CONTACT
from tests.support.run_directories import write_run

ROW = {
    "directory": "runs/a",
    "phase": "training",
    "step": 7,
    "workers": 2,
    "address": "10.0.0.1:6379",
    "note": "",
}


def _run_at(directory: Path, url: str) -> Path:
    contact = {"url": url, "ray_address": "10.9.8.7:6379", "node": "n", "namespace": "x"}
    (directory / CONTACT).write_text(json.dumps(contact))
    text = f"run: {{directory: {directory}}}\nworkers: {{max: 4}}\n"
    (directory / CONFIG).write_text(text)
    return directory


def test_the_page_of_a_job_on_a_cluster_is_reached_through_its_head(tmp_path: Path) -> None:
    """The controller of a `ray job` listens where no browser of the user's is."""
    found = open_page(str(_run_at(tmp_path, "http://127.0.0.1:4711")))

    assert found["page"] == "http://127.0.0.1:4711/"
    assert found["tunnel"].startswith("ssh -N -L 4711:127.0.0.1:4711 10.9.8.7 ")
    assert "port-forward POD 4711:4711" in found["kubernetes"]
    assert found["token"] == f"{tmp_path}/token"


def test_an_address_that_does_not_answer_comes_with_the_tunnel(tmp_path: Path) -> None:
    """Somebody at home sees the address of a network that he is not in."""
    with pytest.raises(CapacityError, match=r"ssh -N -L 9:192\.0\.2\.1:9 10\.9\.8\.7"):
        open_page(str(_run_at(tmp_path, "http://192.0.2.1:9")))
    with pytest.raises(RunNotFoundError):
        open_page(str(tmp_path / "nowhere"))


def test_a_browser_opens_the_page_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command named open printed an address; a browser in a terminal would hide all else."""
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    status = {"directory": str(tmp_path / "run")}
    with _serving(status) as url:
        run = str(_run_at(tmp_path / "run", url))
        printed = CliRunner().invoke(app, ["open", run, "--print"])
        assert not opened.exists()
        shown = CliRunner().invoke(app, ["open", run])
        monkeypatch.delenv("BROWSER")
        CliRunner().invoke(app, ["open", run])

    assert opened.read_text() == f"{url}/\n"
    assert printed.stdout == shown.stdout
    assert f"page: {url}/\n" in shown.stdout


@contextmanager
def _serving(status: object) -> Iterator[str]:
    """Answer as a controller does that is asked for its status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(status).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_list_shows_runs_that_are_over_too(tmp_path: Path) -> None:
    """A person compares today's run with yesterday's, which no cluster still knows."""
    for name in ("alive", "over"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, finished=name == "over")
    row = {**ROW, "directory": str(tmp_path / "alive"), "page": "http://127.0.0.1:1/"}

    alive, over = run_cards([row], {})

    assert (alive["page"], alive["step"], len(alive["loss"])) == ("http://127.0.0.1:1/", 60, 60)
    assert (over["name"], over["outcome"], over["page"]) == ("over", "completed", None)


def test_a_port_that_is_taken_is_one_line() -> None:
    """It was 40 lines of Python."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        told = CliRunner().invoke(app, ["list", "--serve", "--port", port])

    assert told.exit_code != 0
    assert f"port {port} cannot be used for the list" in told.stderr
    assert "Traceback" not in told.stderr


def test_the_index_is_served_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs come and go."""
    monkeypatch.chdir(tmp_path)
    looks, index = iter([[], [ROW]]), RunIndex(0)
    seen: list[str] = []

    def pause() -> None:
        with urllib.request.urlopen(f"{index.address}page.json", timeout=5) as answer:  # noqa: S310
            seen.append(answer.read().decode())
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.serve(lambda: next(looks), pause=pause)

    assert ["runs/a" in text for text in seen] == [False, True]
