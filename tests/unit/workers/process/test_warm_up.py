"""What a worker does before it says that it is ready."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.process.warm_up import import_for

LAZY = """
import importlib


def __getattr__(name):
    return importlib.import_module(f"heavy_package.{name}")
"""


def test_what_a_script_imports_is_there_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own modules are not: they may look at arguments that they do not have yet."""
    packages = tmp_path / "site-packages"
    (packages / "heavy_package").mkdir(parents=True)
    (packages / "heavy_package/__init__.py").write_text(LAZY)
    (packages / "heavy_package/model.py").write_text("")
    (packages / "broken_package.py").write_text("raise RuntimeError")
    (tmp_path / "own_module.py").write_text("raise SystemExit(2)")
    script = tmp_path / "train.py"
    script.write_text(
        "import broken_package, own_module, no_such_package\n"
        "from . import nothing\n"
        "from heavy_package import model, no_such_name\n"
    )
    for folder in (packages, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    import_for(str(script))

    assert "heavy_package.model" in sys.modules
    assert "own_module" not in sys.modules


@pytest.mark.parametrize("text", [None, "def train(:", "\0"])
def test_a_script_that_cannot_be_read_is_left_to_the_attempt(
    tmp_path: Path, text: str | None
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)

    import_for(str(script))
