import os
import stat
from pathlib import Path

import pytest

from orchestrator.driver.run import Run
from orchestrator.errors import TokenError
from orchestrator.shell.storage import run_token
from ucp_core.storage import open_store


def test_a_run_has_one_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    """A restarted controller and the next claimant ask again, and the user's umask may be wide."""
    url = str(tmp_path / "run")
    before = os.umask(0)
    try:
        made = run_token(*open_store(url))
    finally:
        os.umask(before)

    assert len(made) == 32
    assert run_token(*open_store(url)) == Run(url).token() == made
    assert stat.S_IMODE(Path(url, "token").stat().st_mode) == 0o600
    assert [path.name for path in Path(url).iterdir()] == ["token"]


def test_a_bucket_keeps_the_token_too() -> None:
    """There is no mode: who may read the bucket may change the run."""
    store = open_store("memory://token/run")

    assert run_token(*store) == run_token(*store)


def test_a_token_that_cannot_be_read_is_asked_for(tmp_path: Path) -> None:
    """Commands of other users find the directory, not the token in it."""
    with pytest.raises(TokenError, match="--token or EVERSTEP_TOKEN"):
        Run(str(tmp_path)).token()
    assert Run(str(tmp_path)).token("given") == "given"
