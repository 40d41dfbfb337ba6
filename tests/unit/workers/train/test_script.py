"""Finding the training function of a script."""

import sys
from pathlib import Path
from typing import cast

import pytest

from ucp_core.storage import MemoryStore
from workers.errors import TaskError
from workers.train import Session
from workers.train.finished import FinishedRun
from workers.train.script import finish_script, load_task

SCRIPT = """
import argparse

from everstep import run

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=7)
width = parser.parse_args().width


def train(session):
    session.append((width, parser.parse_args().width))


run(train)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", ["worker.py", "--node-ip-address=10.0.0.1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "my train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(("arguments", "width"), [((), 7), (("--width", "512"), 512)])
def test_a_script_gets_its_own_arguments_and_none_of_its_process(
    script: str, arguments: tuple[str, ...], width: int
) -> None:
    """A worker's own command line is Ray's; argparse refuses it with exit code 2."""
    task, _ = load_task(script, arguments)

    called: list[tuple[int, int]] = []
    task(cast("Session", called))

    assert called == [(width, width)]
    assert sys.argv == [script, *arguments]


def test_annotations_of_a_script_are_what_they_are_alone(script: str) -> None:
    """Parsers of arguments, and dataclasses, read types from them; here they would be text."""
    Path(script).write_text("from everstep import run\ndef train(session: int): pass\nrun(train)\n")

    assert load_task(script)[0].__annotations__ == {"session": int}


def test_a_script_that_refuses_its_arguments_fails_by_name(script: str) -> None:
    """An exit in the training thread would else look like a process that was killed."""
    with pytest.raises(TaskError, match=r"exited with 2 .* \(run.arguments\): --witdh 512"):
        load_task(script, ("--witdh", "512"))


def test_classes_of_a_script_pickle(script: str) -> None:
    """Processes that load data get them that way, and so does whatever a script caches."""
    Path(script).write_text(
        "import pickle\n"
        "from everstep import run\n"
        "class Config: width = 7\n"
        "def train(session): session.append(pickle.loads(pickle.dumps(Config())).width)\n"
        "run(train)\n"
    )
    called: list[int] = []

    load_task(script)[0](cast("Session", called))

    assert called == [7]


def test_a_script_that_fails_leaves_the_process_as_it_was(script: str) -> None:
    """The next one to be loaded may be another file."""
    Path(script).write_text("raise KeyError\n")
    before = sys.modules["__main__"]

    with pytest.raises(KeyError):
        load_task(script)

    assert sys.modules["__main__"] is before


CALL = "from everstep import run\ndef train(session): pass\n"


@pytest.mark.parametrize(
    ("code", "goes_on"),
    [
        ("run(train)", False),
        ("if __name__ == '__main__':\n    run(train)", False),
        ("def main():\n    return run(train)\nmain()", False),
        ("def main():\n    run(train)\n    print('done')\nmain()", True),
        ("def main():\n    run(train)\nmain()\nprint('done')", True),
        ("for _ in range(1):\n    run(train)", True),
    ],
)
def test_whether_code_follows_the_call_is_known(script: str, code: str, *, goes_on: bool) -> None:
    """If none does, rank 0 need not run the script a second time."""
    Path(script).write_text(CALL + code)

    assert load_task(script)[1] == goes_on


def test_what_is_behind_runs_when_the_run_is_complete(script: str, tmp_path: Path) -> None:
    Path(script).write_text(
        f"{CALL}from pathlib import Path\nrun(train)\n"
        f"with Path({str(tmp_path / 'seen')!r}).open('a') as file: file.write('once')\n"
    )
    load_task(script)
    assert not (tmp_path / "seen").exists()

    finish_script(script, (), FinishedRun(MemoryStore(), "run"))

    assert (tmp_path / "seen").read_text() == "once"
    Path(script).write_text(f"{CALL}run(train)\nraise SystemExit(3)")
    with pytest.raises(TaskError, match=r"exited with 3 after everstep.run"):
        finish_script(script, (), FinishedRun(MemoryStore(), "run"))
