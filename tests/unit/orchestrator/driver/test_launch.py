import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.shell.connect import head_returns


@pytest.fixture
def address() -> Iterator[str]:
    """Bound and not listening: no other process can take the port meanwhile."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{closed.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "run: {directory: {here}/run}\ntrain: {steps: 20}\nworkers: {max: 2}\n"),
        ("doctor",),
    ],
)
def test_an_address_where_nothing_answers_is_named_at_once(
    address: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Ray looks for a cluster for minutes; with a mistyped port it looks like a slow start."""
    given = [text.replace("{here}", str(tmp_path)) for text in arguments]

    answer = CliRunner().invoke(app, [*given, "--address", address])

    assert answer.exit_code == 3
    assert f"no Ray cluster answers at {address}" in answer.stderr
    assert not list(tmp_path.iterdir()), "of a run that was refused nothing is left"


def test_a_run_that_is_over_or_whose_cluster_is_gone_cannot_be_stopped(
    address: str, tmp_path: Path
) -> None:
    """Its directory still says where the controller was, for which Ray would look for minutes."""
    contact = {"ray_address": address, "namespace": "everstep-x"}
    (tmp_path / "controller.json").write_text(json.dumps(contact))
    (tmp_path / "token").write_text("0123")
    gone = CliRunner().invoke(app, ["stop", str(tmp_path)])
    (tmp_path / "summary.json").write_text("{}")
    over = CliRunner().invoke(app, ["stop", str(tmp_path)])

    assert (gone.exit_code, over.exit_code) == (3, 2)
    assert f"the controller does not answer at {address}" in gone.stderr
    assert "nothing is training" in gone.stderr
    assert "is over; see `everstep report" in over.stderr


@pytest.mark.parametrize("returns", [False, True])
def test_the_driver_waits_for_a_head_that_comes_back(
    address: str, *, returns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run trains on, so the command must not report that training has stopped."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "4")
    contact = {"ray_address": address, "namespace": "everstep-x", "head_returns": returns}
    (tmp_path / "controller.json").write_text(json.dumps(contact))
    (tmp_path / "token").write_text("0123")

    away = CliRunner().invoke(app, ["stop", str(tmp_path)])

    assert away.exit_code == 3
    assert ("Waiting up to 3 s for it to come back" in away.stderr) == returns
    assert (f"the Ray cluster at {address} is gone" in away.stderr) == returns


def test_a_head_comes_back_whose_state_is_kept_elsewhere() -> None:
    assert not head_returns({"RAY_gcs_storage": "memory"})
    assert head_returns({"RAY_gcs_storage": "rocksdb"})
    assert head_returns({"RAY_REDIS_ADDRESS": "redis:6379"})
