import json
import shutil
from pathlib import Path

import pytest

from orchestrator.core import events as ev
from orchestrator.core.events import RunResumed
from orchestrator.driver import replay_run
from orchestrator.report import read_run
from tests.support.checkpoints import save, save_not_finite, small_state
from tests.support.journals import Journaled, config_at
from ucp_core.errors import SupersededError
from ucp_core.storage import LocalStore


def _tear(run: Journaled, number: int) -> None:
    """Let an incarnation have died in the middle of its first line."""
    Path(run.path, "journal").mkdir(exist_ok=True)
    Path(run.path, "journal", f"{number:06d}.jsonl").write_bytes(b'{"v":1,"se')


def test_a_run_whose_first_line_was_cut_starts_with_the_next(
    tmp_path: Path,
) -> None:
    """Its actions come after its line, so it has done nothing: there is a run to begin."""
    config = config_at(tmp_path)
    run = Journaled(config)
    _tear(run, 1)

    again = Journaled(config)
    assert again.number == 2
    again.grow(60)

    assert again.state.attempt.step > 0
    assert replay_run(run.path)["same_decisions"]


def test_a_resume_of_which_half_a_line_is_left_is_done_again(tmp_path: Path) -> None:
    """The journal before it is of a run that is over, and would only be found over once more."""
    run = Journaled(config_at(tmp_path))
    run.grow(60)
    resumed = config_at(tmp_path, "workers.max=3")
    run.config, run.claim = resumed, 2
    run.begin()
    _tear(run, 2)
    begun = run.begin()

    assert isinstance(begun.first, RunResumed)
    assert begun.first.lineage == run.state.lineage
    again = Journaled(resumed, claim=2)
    again.grow(120)
    assert isinstance(again.begin().first, ev.ControllerStarted), "it is not resumed twice"
    assert replay_run(run.path)["same_decisions"]


def _save(run: Path, *, step: int, attempt: int, manifest: bool = True) -> None:
    """Leave what a script that ran alone leaves."""
    save(LocalStore(), small_state(), step=step, attempt=attempt, root=f"{run}/checkpoints")
    if not manifest:
        (run / f"checkpoints/step-{step:08d}/manifest.json").unlink()


def _resumed(run: Path, *, number: int) -> tuple[int, int]:
    """Return the attempt and the step in storage with which an incarnation resumed the run."""
    text = sorted((run / "journal").iterdir())[number].read_text()
    first = json.loads(text.partition("\n")[0])
    assert first["kind"] == "RunResumed"
    return first["attempt"], first["stored"]


def test_checkpoints_without_a_journal_are_resumed_from(tmp_path: Path) -> None:
    """It began with attempt 1 at step 0, and took the files of another attempt 1 for its own."""
    _save(tmp_path, step=20, attempt=1)
    _save(tmp_path, step=30, attempt=3)
    _save(tmp_path, step=40, attempt=4, manifest=False)

    run = Journaled(config_at(tmp_path))
    run.grow(60)

    assert _resumed(tmp_path, number=0) == (4, 30)
    assert run.state.lineage[0][0] == 5
    assert isinstance(run.begin().first, ev.ControllerStarted), "it is resumed once"
    assert replay_run(str(tmp_path))["same_decisions"]


@pytest.mark.parametrize(("step", "stored"), [(20, 20), (10, 0)], ids=["later", "first save"])
def test_data_without_manifest_and_journal_is_what_a_run_may_not_fall_behind(
    tmp_path: Path, step: int, stored: int
) -> None:
    """But the first save of all may have been cut off, and left nothing to lose."""
    _save(tmp_path, step=step, attempt=2, manifest=False)

    Journaled(config_at(tmp_path))

    assert _resumed(tmp_path, number=0) == (2, stored)


def test_a_resumed_run_numbers_its_attempts_behind_those_of_a_script_alone(tmp_path: Path) -> None:
    """It went on in the directory while the run was stopped."""
    run = Journaled(config_at(tmp_path))
    run.grow(60)
    known = run.state.attempt.number
    _save(tmp_path, step=90, attempt=known + 2)

    Journaled(config_at(tmp_path), claim=2)

    assert _resumed(tmp_path, number=1)[0] == known + 2


def test_a_bug_report_is_the_journal_and_the_settings_of_each_resume(tmp_path: Path) -> None:
    """As CONTRIBUTING says: the rest of a run directory may be large or private."""
    run = Journaled(config_at(tmp_path / "run"))
    run.grow(60)
    Journaled(config_at(tmp_path / "run", "workers.max=3"), claim=2).grow(120)
    for name in ("journal", "settings"):
        shutil.copytree(Path(run.path, name), tmp_path / "report" / name)

    answer = replay_run(str(tmp_path / "report"))

    assert answer == replay_run(run.path)
    assert answer["records"] >= 120


def test_a_claim_that_was_superseded_begins_no_incarnation(tmp_path: Path) -> None:
    """Ray restarts the controller of an unreachable cluster: the run is elsewhere."""
    older = Journaled(config_at(tmp_path))
    older.grow(60)
    newer = Journaled(config_at(tmp_path), claim=2)
    newer.grow(120)
    journal = sorted(path.name for path in Path(newer.path, "journal").iterdir())

    with pytest.raises(SupersededError, match="claim 2 was made"):
        older.begin()

    assert isinstance(newer.begin().first, ev.ControllerStarted)
    assert sorted(path.name for path in Path(newer.path, "journal").iterdir()) == journal


@pytest.mark.parametrize("claim", [1, 2], ids=["restart", "resume"])
@pytest.mark.parametrize("is_compacting", [True, False])
def test_records_of_a_superseded_controller_do_not_count(
    tmp_path: Path, *, claim: int, is_compacting: bool
) -> None:
    """It looks every few seconds who owns the directory, and decides on until then."""
    older = Journaled(config_at(tmp_path), fault_every=50)
    older.is_compacting = is_compacting
    older.grow(300)
    newer = Journaled(config_at(tmp_path), claim=claim, fault_every=50)
    newer.grow(newer.seq + 1)
    older.grow(older.seq + 8)
    newer.grow(newer.seq + 200)
    if is_compacting:
        older.compact()

    again = Journaled(config_at(tmp_path), claim=claim, fault_every=50)
    assert again.seq > newer.seq > older.seq
    assert again.state.attempt.number == newer.state.attempt.number
    again.grow(again.seq + 20)
    assert Journaled(config_at(tmp_path), claim=3).state.lineage[:-1] == again.state.lineage
    assert replay_run(str(tmp_path))["same_decisions"]
    numbers = [record["seq"] for record in read_run(str(tmp_path)).journal]
    assert numbers == sorted(set(numbers))


def test_a_resume_can_go_back_to_the_newest_finite_version(tmp_path: Path) -> None:
    """Newer ones no longer count, as if an attempt had resumed there."""
    run = Journaled(config_at(tmp_path))
    run.grow(60)
    store, root = LocalStore(), f"{run.path}/checkpoints"
    for step in (10, 20):
        save(store, small_state(), step=step, root=root)
    save_not_finite(store, small_state(), step=30, sound_step=19, root=root)
    run.config, run.claim = config_at(tmp_path, "run.resume_from=finite"), 2
    first = run.begin().first

    assert isinstance(first, RunResumed)
    number = run.state.attempt.number + 1
    assert (first.attempt, first.stored) == (number, 10)
    assert first.lineage == (*run.state.lineage, (number, 10))
