"""Shared by tests that train for real; each has a run of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, demo_config
from tests.support.attempts import write_texts
from tests.support.chromium import Browser
from tests.support.object_servers import Proxy, proxied, s3_server
from tests.support.trainers import Run
from workers.settings import DataSettings


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return the demo's configuration with changes, in a directory of the test's own."""

    def make(name: str = "run", **overrides: object) -> RunConfig:
        settings = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        return demo_config(str(tmp_path / name), settings)

    return make


@pytest.fixture
def text(tmp_path: Path) -> DataSettings:
    """Return a few files to train on."""
    return write_texts(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a run of worker processes without Ray."""
    directory = tmp_path / "run"
    directory.mkdir()
    with Run(directory) as opened:
        yield opened


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server with S3's protocol is."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def begin_proxy(s3_url: str) -> Iterator[Callable[[], Proxy]]:
    """Return what puts a proxy before that server."""
    with proxied(s3_url) as begin:
        yield begin


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser with nothing open."""
    profile = tmp_path / "profile"
    profile.mkdir()
    with Browser(profile) as opened:
        yield opened
