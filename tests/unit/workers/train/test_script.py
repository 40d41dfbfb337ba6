"""Finding the training function of a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest

from workers.train.script import load_task
from workers.train.session import Session

SCRIPT = """
import argparse

from workers.api import run

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=7)
width = parser.parse_args().width


def train(session):
    session.append((width, parser.parse_args().width))


run(train)
"""


def test_a_script_that_reads_its_arguments_gets_none_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own command line is Ray's; argparse refuses it with exit code 2."""
    script = tmp_path / "my train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["worker.py", "--node-ip-address=10.0.0.1"])
    monkeypatch.setattr(sys, "path", list(sys.path))

    task = load_task(str(script))

    called: list[tuple[int, int]] = []
    task(cast("Session", called))

    assert called == [(7, 7)]
    assert sys.argv == [str(script)]
