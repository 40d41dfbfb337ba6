import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import orchestrator
from orchestrator.core.events import RunResumed
from orchestrator.shell.storage import compaction as compaction_file
from orchestrator.shell.storage.compaction import SPACING_BYTES, CompactionFile
from orchestrator.shell.storage.incarnation import Incarnation
from tests.support.journals import Journaled, config_at
from ucp_core.storage import open_store

ORCHESTRATOR = Path(orchestrator.__file__).parent


@pytest.fixture
def run(tmp_path: Path) -> Journaled:
    """A run with a crash or two and a compacted journal that ends in its second segment."""
    run = Journaled(config_at(tmp_path), fault_every=20)
    run.is_compacting = False
    run.grow(60)
    run = Journaled(run.config, fault_every=20)
    run.is_compacting = False
    run.grow(120)
    run.compact()
    run.grow(200)
    return run


def _same(one: Incarnation, other: Incarnation) -> bool:
    """Compare all but the clocks; equal tables may have another order, by which the run goes."""
    names = ("number", "seq", "state", "stats", "journal_bytes")
    return all(repr(getattr(one, name)) == repr(getattr(other, name)) for name in names)


def _whole(run: Journaled) -> Incarnation:
    Path(run.path, "compacted.json").unlink()
    return run.begin()


def test_an_incarnation_begins_alike_from_the_compacted_and_from_the_whole_journal(
    run: Journaled,
) -> None:
    """State, numbers and place in the journal: a controller has nothing else."""
    begun = run.begin()
    whole = _whole(run)

    assert begun.compacted_bytes > 0 == whole.compacted_bytes
    assert _same(begun, whole)
    assert repr((begun.state, begun.stats)) == repr((run.state, run.stats))
    assert len(begun.stats.incidents) > begun.num_incidents_written > 0


def test_later_lives_and_torn_lines_are_behind_it(run: Journaled) -> None:
    """A controller may die while it appends, and again before it has compacted the journal."""
    segment = Path(run.path, "journal", "000002.jsonl")
    segment.write_bytes(segment.read_bytes() + b'{"v":1,"se')
    later = Journaled(run.config)
    later.is_compacting = False
    later.grow(240)
    begun = later.begin()

    assert begun.compacted_bytes > 0
    assert repr(begun.state) == repr(later.state)
    assert _same(begun, _whole(later))


def _edit(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "compacted.json"
        body = json.loads(path.read_bytes().split(b"\n")[1])
        change(body)
        text = json.dumps(body).encode()
        head = {"v": 2, "bytes": len(text), "crc32": crc32(text)}
        path.write_bytes(json.dumps(head).encode() + b"\n" + text + b"\n")

    return edit


def _cut_compacted(directory: Path) -> None:
    path = directory / "compacted.json"
    path.write_bytes(path.read_bytes()[:-200])


def _make_it_a_directory(directory: Path) -> None:
    (directory / "compacted.json").unlink()
    (directory / "compacted.json").mkdir()


def _drop_newest_segment(directory: Path) -> None:
    (directory / "journal" / "000002.jsonl").unlink()


def _cut_journal(directory: Path) -> None:
    path = directory / "journal" / "000002.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:20]))


def _lengthen_older_segment(directory: Path) -> None:
    path = directory / "journal" / "000001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"v":1,"se')


def _change_its_line(directory: Path) -> None:
    """Let the journal be one with as many bytes that was written at another time."""
    path = directory / "journal" / "000002.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"wall_time":17', b'"wall_time":16'))


HARM = {
    "compacted journal cut": _cut_compacted,
    "compacted journal unreadable": _make_it_a_directory,
    "newest segment gone": _drop_newest_segment,
    "segment cut": _cut_journal,
    "older segment longer": _lengthen_older_segment,
    "another journal": _change_its_line,
    "another basis": _edit(lambda body: body.update(basis="older")),
    "part missing": _edit(lambda body: body["folded"].pop("stats")),
    "field missing": _edit(lambda body: body["folded"]["state"].pop("attempt")),
    "field of another type": _edit(lambda body: body["folded"]["state"].update(step="8")),
    "records missing": _edit(lambda body: body["folded"].update(seq=100)),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=list(HARM))
def test_what_cannot_be_relied_on_is_not_used(
    harm: Callable[[Path], None],
    run: Journaled,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong state would start workers twice; folding everything only takes longer."""
    monkeypatch.setattr(compaction_file, "SPACING_BYTES", 1)
    harm(Path(run.path))
    with caplog.at_level(logging.WARNING):
        begun = run.begin()

    assert begun.compacted_bytes == 0
    (told,) = caplog.messages
    assert told.startswith("the compacted journal is not used")
    monkeypatch.undo()
    if Path(run.path, "compacted.json").is_dir():
        Path(run.path, "compacted.json").rmdir()
    else:
        Path(run.path, "compacted.json").unlink()
    assert _same(begun, run.begin())


def test_settings_of_now_fold_what_was_decided_since_then(run: Journaled) -> None:
    """A run that is resumed with other settings keeps its numbers and no decision."""
    config = config_at(Path(run.path), "workers.max=2")
    again = Journaled(config, claim=2)
    again.is_compacting = False
    again.grow(300)
    begun = again.begin()

    assert begun.compacted_bytes == 0, "the journal compacted under the settings of then was used"
    assert repr((begun.state, begun.stats)) == repr((again.state, again.stats))
    again.compact()
    assert again.begin().compacted_bytes == begun.journal_bytes
    assert [each.kind for each in begun.stats.incidents].count("resume") == 1


def test_a_run_resumes_from_its_compacted_journal(run: Journaled) -> None:
    """Numbers of attempts, workers and reservations go on; old settings say what they are."""
    run.compact()
    run.claim = 2
    begun = run.begin()
    first = begun.first
    assert isinstance(first, RunResumed)
    assert begun.compacted_bytes == 0, (
        "what was marked under the settings of then spares it nothing"
    )
    Path(run.path, "compacted.json").unlink()
    whole = run.begin().first
    assert isinstance(whole, RunResumed)

    trained = tuple(one for one in run.state.lineage if one[0] <= run.state.trained)
    assert first.lineage == whole.lineage == trained
    assert (first.next_worker, first.why) == (whole.next_worker, whole.why)


def test_there_is_one_compacted_journal_and_the_journal_is_whole(run: Journaled) -> None:
    """A week of them would be larger than the journal, and readers of it take all that is there."""
    run.compact()

    assert [path.name for path in Path(run.path).glob("*compact*")] == ["compacted.json"]
    names = sorted(path.name for path in Path(run.path, "journal").iterdir())
    assert names == ["000001.jsonl", "000002.jsonl"]


def test_a_compacted_journal_that_cannot_be_written_costs_nothing(
    run: Journaled, caplog: pytest.LogCaptureFixture
) -> None:
    """It only spares time, so a run must not end for it."""
    _make_it_a_directory(Path(run.path))
    with caplog.at_level(logging.WARNING):
        run.compact()

    (told,) = caplog.messages
    assert told.startswith("the compacted journal is not written: ")


def test_it_is_written_when_the_journal_has_grown_and_nothing_is_going_on(tmp_path: Path) -> None:
    """Each one costs milliseconds, in which faults would wait."""
    run = Journaled(config_at(tmp_path))
    run.is_compacting = False
    run.grow(30)
    file = CompactionFile(*open_store(run.path), rules=run.rules, compacted_bytes=1000)

    assert not file.is_due(1000 + SPACING_BYTES - 1, is_quiet=True)
    assert file.is_due(1000 + SPACING_BYTES, is_quiet=True)
    assert not file.is_due(1000 + SPACING_BYTES, is_quiet=False)
    assert file.is_due(1000 + 8 * SPACING_BYTES, is_quiet=False)
    document = file.prepare(run.journal, run.state, run.stats)
    grown = run.journal.journal_bytes + SPACING_BYTES
    assert not file.is_due(grown, is_quiet=True), "two would be written at once"
    asyncio.run(file.write(document))
    assert file.is_due(grown, is_quiet=True)
    assert not file.is_due(grown - 1, is_quiet=True)


def test_a_change_of_any_module_that_decides_makes_the_compacted_journal_useless() -> None:
    """Modules moved, and a change in them was not noticed until the next full fold."""
    files = compaction_file.deciding_files()
    rooms = {path.relative_to(ORCHESTRATOR).parts[0].removesuffix(".py") for path in files}
    imported = {
        name
        for path in files
        for name in re.findall(r"^\s*from orchestrator\.(\w+)", path.read_text(), re.MULTILINE)
    }

    assert imported - {"errors"} <= rooms
    whole = {path for room in rooms for path in (ORCHESTRATOR / room).rglob("*.py")}
    assert whole <= set(files)
