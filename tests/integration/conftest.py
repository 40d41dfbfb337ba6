"""Shared by tests that train for real; each has a run of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, demo_config
from tests.support.attempts import write_texts
from tests.support.chromium import Browser
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


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser with nothing open."""
    profile = tmp_path / "profile"
    profile.mkdir()
    with Browser(profile) as opened:
        yield opened
