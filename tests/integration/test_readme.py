"""The example of the README is code, so it is run: both sides of the diff, and its settings."""

import re
from pathlib import Path

import pytest

from orchestrator.config import load
from orchestrator.driver import init_config
from tests.arch.tree import ROOT
from tests.support.forking import run_script

README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(language: str) -> list[str]:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block of {language}"
    return found.group(1).splitlines()


def _side(sign: str) -> str:
    """Return the file before ("-") or after ("+") the change."""
    lines = _block("diff")
    return "\n".join(line[1:] for line in lines if line[:1] in {" ", sign, ""}) + "\n"


@pytest.mark.parametrize("sign", ["-", "+"], ids=["plain torch", "everstep"])
def test_both_sides_of_the_diff_run(tmp_path: Path, sign: str) -> None:
    """A reader pastes it; a renamed method would greet him with a traceback."""
    script = tmp_path / "train.py"
    script.write_text(_side(sign))

    run_script(script, tmp_path)

    if sign == "+":
        assert len((tmp_path / "runs/mine/metrics/rank0.jsonl").read_text().splitlines()) == 200


def test_the_configuration_that_is_written_for_it_has_its_settings(tmp_path: Path) -> None:
    """`everstep init train.py` takes over the numbers in the call of `run`."""
    script = tmp_path / "train.py"
    script.write_text(_side("+"))

    settings = load(init_config(str(script), str(tmp_path / "everstep.yaml"))["config"], [])

    assert settings.run.script.endswith("train.py")
    assert settings.run.directory.endswith("runs/mine")
    assert f"steps={settings.train.steps}, global_batch={settings.train.global_batch}" in README
