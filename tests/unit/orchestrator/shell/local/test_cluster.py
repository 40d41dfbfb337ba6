"""Which clusters of simulated nodes the registry knows."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.driver import print_runs
from orchestrator.driver.listing import list_runs, own_heads
from orchestrator.errors import CapacityError
from orchestrator.shell import LocalEntry, kill_local_cluster, local_clusters, own_folder, run_id
from orchestrator.shell.local import is_there
from orchestrator.shell.serve import announce, targets_path

_WAITING = "import signal; signal.pause()"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEntry]:
    """A cluster in a registry of the test's own, whose processes live."""
    monkeypatch.setattr("orchestrator.shell.local.registry.own_folder", lambda: tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = subprocess.Popen([sys.executable, "-c", _WAITING], start_new_session=True)
    made = LocalEntry(
        address="127.0.0.1:1", host_pid=host.pid, starter_pid=7, run_directory="/runs/a"
    )
    folder = tmp_path / "cluster-x"
    folder.mkdir()
    (folder / "cluster.json").write_text(json.dumps(asdict(made)))
    yield made
    host.kill()
    host.wait()


def test_a_cluster_whose_host_answers_is_known_as_it_is(entry: LocalEntry, tmp_path: Path) -> None:
    """The command that started it ends it."""
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "cluster-x/control"))
        control.listen()

        assert local_clusters() == [entry]


def test_a_cluster_of_another_container_is_left_alone(entry: LocalEntry, tmp_path: Path) -> None:
    """Its processes have other numbers here, and its folder was deleted while it lived."""
    there = asdict(entry) | {"host_pid": 2**22 + 1}
    (tmp_path / "cluster-x/cluster.json").write_text(json.dumps(there))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "cluster-x/control"))
        control.listen()

        assert [one.host_pid for one in local_clusters()] == [2**22 + 1]
    assert (tmp_path / "cluster-x").exists()


def test_a_cluster_that_outlived_its_host_is_listed_with_the_way_to_end_it(
    entry: LocalEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was killed leaves Ray's daemons, which hold memory until the next reboot."""
    monkeypatch.setattr("orchestrator.driver.listing.own_heads", set)
    (run,) = list_runs(None)

    assert run["directory"] == "/runs/a"
    assert f"kill -KILL -- -{entry.host_pid}" in run["note"]


def test_a_cluster_of_which_nothing_is_left_is_forgotten(entry: LocalEntry, tmp_path: Path) -> None:
    """Its process id will be that of something else some day."""
    os.kill(entry.host_pid, signal.SIGKILL)
    os.waitpid(entry.host_pid, 0)

    assert local_clusters() == []
    assert not (tmp_path / "cluster-x").exists()


def test_the_cluster_of_a_run_is_ended_by_force_and_no_other(
    entry: LocalEntry, tmp_path: Path
) -> None:
    """Two runs may be on one machine."""
    target = targets_path(run_id("/runs/a"))
    announce(run_id("/runs/a"), run="a", url="http://127.0.0.1:1")
    assert not kill_local_cluster("/runs/b")
    assert [one.host_pid for one in local_clusters()] == [entry.host_pid]
    assert target.exists()

    assert kill_local_cluster("/runs/a")
    assert os.waitpid(entry.host_pid, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "cluster-x").exists()
    assert not target.exists()  # or an alert tells of a controller that is down, for ever


def test_what_is_not_known_of_a_run_is_a_dash(entry: LocalEntry) -> None:
    """A run whose controller does not answer has a row like the others."""
    output = io.StringIO()
    row = {"directory": None, "phase": "no run", "step": None, "workers": None, "standbys": None}
    print_runs([{**row, "since": None, "address": entry.address, "note": ""}], Console(file=output))

    assert output.getvalue().splitlines()[1].split() == [
        "-", "no", "run", "-", "-", "-", "127.0.0.1:1",
    ]  # fmt: skip


def test_a_directory_that_was_deleted_is_not_there_though_its_path_is(tmp_path: Path) -> None:
    """A controller that writes its journal makes the folders that somebody has just deleted."""
    directory = tmp_path / "run"
    directory.mkdir()
    opened = os.open(directory, os.O_RDONLY)
    try:
        assert is_there(opened, str(directory))
        directory.rmdir()
        assert not is_there(opened, str(directory))
        directory.mkdir()
        assert not is_there(opened, str(directory))
    finally:
        os.close(opened)


def test_files_of_simulated_nodes_are_in_a_folder_of_the_user_that_is_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's sockets do not fit below a long TMPDIR, and its own folder is the first user's."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("a" * 40)))
    assert str(own_folder()) == f"{os.sep}tmp/everstep-{os.getuid()}"
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        folder = own_folder()
        assert folder.parent == Path(short)
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could put sockets there, and every command would die of a PermissionError."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr("orchestrator.shell.local.registry._FOLDER_BYTES_MAX", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = os.getuid() + 4711
    monkeypatch.setattr(os, "getuid", lambda: other)
    (tmp_path / f"everstep-{other}").mkdir()

    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        monkeypatch.setattr("orchestrator.shell.local.registry._SHORT", shared)
        Path(shared, f"everstep-{other}").mkdir()
        with pytest.raises(
            CapacityError, match=f"everstep-{other} belongs to another user.*TMPDIR"
        ):
            own_folder()
        assert local_clusters() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of another user")
def test_nodes_of_another_user_are_left_out() -> None:
    """Ray aborts a process that joins them: `everstep list` ended in 160 lines of frames."""
    words = ("/x/raylet", "-c", "sleep 60; :", "--gcs-address=127.0.0.1:{}")
    theirs, mine = (
        subprocess.Popen([*words[:3], words[3].format(port)], executable="/bin/sh", user=user)
        for port, user in ((9, 4711), (10, 0))
    )
    try:
        heads = own_heads()
        assert "127.0.0.1:10" in heads
        assert "127.0.0.1:9" not in heads
    finally:
        for process in (theirs, mine):
            process.kill()
            process.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a network of its own")
def test_a_machine_without_an_ipv4_address_is_refused_at_once() -> None:
    """Ray's head waits three times for 30 s, and says that it waited for a file."""
    program = "from orchestrator.shell import require_loopback; require_loopback()"
    done = subprocess.run(
        ["/usr/bin/unshare", "-n", sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert "CapacityError: simulated nodes need 127.0.0.1" in done.stderr.splitlines()[-1]
