"""Exports, comparisons and extracts go from bucket to bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import save, small_state
from tests.support.commands import ucp
from tests.support.object_servers import s3_server, use_s3
from ucp_core.storage import open_store

pytest.importorskip("moto", reason="moto is not installed: pip install 'everstep[dev]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'everstep[s3]'")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A checkpoint in a bucket of a server that speaks S3."""
    with s3_server(tmp_path / "log") as url:
        use_s3(monkeypatch, url)
        s3fs.S3FileSystem().mkdir("run-bucket")
        store, root = open_store("s3://run-bucket/checkpoints")
        save(store, small_state(), step=7, root=root)
        yield "s3://run-bucket/checkpoints/step-00000007"


def test_every_tool_works_from_bucket_to_bucket(checkpoint: str) -> None:
    """Files whose names begin with a dot, ranges of large files, and a listing for each format."""
    for target, options in (("dcp", []), ("huggingface", ["--slots", "weight"]), ("universal", [])):
        there = f"s3://run-bucket/{target}"
        done = ucp("export", checkpoint, there, "--format", target)
        assert done.returncode == 0, done.stderr
        again = ucp("export", checkpoint, there, "--format", target)
        assert again.returncode == 1
        compared = ucp("diff", checkpoint, there, "--read-all", *options)
        assert "0 differ" in compared.stdout, compared

    part = "s3://run-bucket/part.safetensors"
    done = ucp("extract", "s3://run-bucket/dcp", "wte", "--box", "2:5", "--out", part)
    assert done.returncode == 0, done.stderr
    assert ucp("inspect", part).returncode == 0
