"""The report of a run directory: what its document says, and that the page is one file."""

import json
import re
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import JournalCorruptError, RunNotFoundError
from orchestrator.report import RunRecord, live_page, log_tail, read_run, thin, write_report
from orchestrator.report.html import compare_ends, report_document
from tests.support.run_directories import Fault, write_run
from ucp_core.storage import LocalStore

CRASH = Fault(step=20, kind="crash", guilty=("w0002",), pause_s=0.6, lost_steps=1, workers_after=3)
NODE = Fault(
    step=40, kind="node_loss", guilty=("w0001",), pause_s=2.4, lost_steps=0, workers_after=2
)


def test_a_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    """A report is mailed, archived and opened on a plane: one remote font breaks the page."""
    page = _page(write_run(tmp_path, faults=(CRASH, NODE)))

    assert not re.search(r"(?:src|href)\s*=\s*\"(?!data:,\")|url\(|@import", page)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    # Only the live page asks, and only the server that it comes from.
    asked = re.findall(r"fetch\([\"`](\w+)", page)
    assert sorted(asked) == ["actions", "log", "page"]


def test_a_report_is_the_live_page_with_the_run_inside(tmp_path: Path) -> None:
    """Two templates would soon tell two stories."""
    page = _page(write_run(tmp_path, faults=(CRASH,)))
    inside = re.search(r'id="data">(.*?)</script>', page)
    assert inside is not None

    assert page.replace(inside[1], "") == live_page()
    assert json.loads(inside[1])["name"] == tmp_path.name


def test_the_cost_of_incidents_is_their_sum(tmp_path: Path) -> None:
    """A page said 0.00 dollars above a list of 0.0015, 0.0018 and 0.0014."""
    path = write_run(tmp_path, faults=(CRASH, NODE), price=3600.0)
    for number, cost in ((1, 0.0015), (2, 0.0018)):
        _change(path / f"incidents/{number:04d}/incident.json", cost_usd=cost)

    document = _document(path)

    assert document["cost"]["incidents_usd"] == pytest.approx(0.0033)
    # From the grant on, at a dollar a second.
    assert document["cost"]["usd"] == pytest.approx(document["wall_s"] - 4.0)


def test_samples_are_not_called_tokens(tmp_path: Path) -> None:
    """A script that returns only its loss counts samples: the cost of a token is unknown."""
    path = write_run(tmp_path, price=4.0)
    assert _document(path)["unit"] == "tokens"
    metrics = path / "metrics/rank0.jsonl"
    metrics.write_text(metrics.read_text().replace('"tokens": 4096', '"tokens": 32'))
    document = _document(path)

    assert document["unit"] == "samples"
    assert document["units_per_s"] == pytest.approx(32 * document["steps_per_s"])
    assert document["cost"]["usd_per_million_tokens"] is None


def test_workers_and_throughput_are_told_over_time(tmp_path: Path) -> None:
    """A run that trains half of its time on half of its workers looks well in every average."""
    document = _document(write_run(tmp_path, faults=(CRASH, NODE)))

    assert [num for _, num in document["sizes"]] == [4, 0, 3, 0, 2, 0]
    rates = [per_s for _, per_s in document["throughput"]]
    assert (rates[0], rates[-1]) == (16384.0, pytest.approx(8192.0))
    assert rates[1] < 12288.0, "of three workers, and the pause counts"


def test_validation_is_there_once_for_each_step_as_it_was_last_taken(tmp_path: Path) -> None:
    """An evaluation that an attempt repeats is appended again."""
    path = write_run(tmp_path)
    lines = [(10, 1, 3.0), (20, 1, 2.5), (20, 2, 2.4), (10, 1, 9.0), (30, 2, None)]
    (path / "metrics/validation.jsonl").write_text(
        "".join(f"{json.dumps({'step': s, 'attempt': a, 'loss': v})}\n" for s, a, v in lines)
    )

    assert _document(path)["validation"] == [(10.0, 3.0), (20.0, 2.4)]


def test_the_dead_have_their_last_lines_in_the_report(tmp_path: Path) -> None:
    """The line before the end is what a person looks for first."""
    path = write_run(tmp_path, faults=(CRASH,))
    _change(path / "incidents/0001/incident.json", attempt=1, places=[[2, "w0002", "n2"]])
    for rank, text in ((0, "step 60\n"), (2, "step 20\nCUDA error: unknown\n")):
        log = path / f"logs/attempt-0001/rank{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
    inside = re.search(r'id="data">(.*?)</script>', _page(path))
    assert inside is not None

    logs = json.loads(inside[1])["logs"]
    assert logs["1/2"].endswith("CUDA error: unknown\n")
    assert logs["last"] == "step 60\n"


def test_the_tail_of_a_log_spans_the_pieces_of_an_object_store(tmp_path: Path) -> None:
    """Such a store rewrites a file to append to it, so a log is several objects."""
    folder = tmp_path / "logs/attempt-0002"
    folder.mkdir(parents=True)
    for number, text in ((9, "nine\n"), (10, "ten\n"), (11, "eleven\n")):
        (folder / f"rank1-{number:04d}.log").write_text(text)
    (folder / "rank11.log").write_text("another rank\n")
    (tmp_path / "logs/attempt-0003").mkdir()

    def tail(size_bytes: int) -> str:
        path = str(tmp_path)
        return log_tail(LocalStore(), path, attempt=0, rank=1, size_bytes=size_bytes)

    assert tail(100) == "nine\nten\neleven\n"
    assert tail(9) == "n\neleven\n"
    assert log_tail(LocalStore(), str(tmp_path), attempt=3, rank=1) == ""


def _page(path: Path) -> str:
    return Path(write_report(str(path))).read_text(encoding="utf-8")


def _document(path: Path) -> dict[str, Any]:
    return report_document(RunRecord(str(path)))


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_run_with_equal_digests_is_said_to_have_the_same_weights(tmp_path: Path) -> None:
    """The one sentence that people look for; it must come from the digest, not from the losses."""
    write_run(tmp_path / "undisturbed")
    write_run(tmp_path / "disturbed", faults=(CRASH,))

    path = write_report(str(tmp_path / "disturbed"), compare=str(tmp_path / "undisturbed"))

    assert "Same weights, bit for bit" in Path(path).read_text(encoding="utf-8")


def test_equal_losses_do_not_hide_different_weights(tmp_path: Path) -> None:
    """Losses that print alike are no proof: the digest decides."""
    same = RunRecord(str(write_run(tmp_path / "a")))
    other = RunRecord(str(write_run(tmp_path / "b", digest="00" * 32)))

    assert compare_ends(same, other).verdict == "close"


def test_an_unfinished_run_gets_no_verdict(tmp_path: Path) -> None:
    """Two missing digests are equal as values."""
    a = RunRecord(str(write_run(tmp_path / "a", finished=False)))
    b = RunRecord(str(write_run(tmp_path / "b", finished=False)))

    assert compare_ends(a, b).verdict == "unknown"


def test_runs_of_different_length_are_not_compared(tmp_path: Path) -> None:
    """A run that stopped early can have any loss, also a lower one."""
    a = RunRecord(str(write_run(tmp_path / "a", steps=30)))
    b = RunRecord(str(write_run(tmp_path / "b", steps=60)))

    assert compare_ends(a, b).verdict == "different"


def test_a_step_that_was_redone_is_there_once_as_it_was_last_taken(tmp_path: Path) -> None:
    """Metrics are appended, so step 20 is written by attempt 1 and again by attempt 2."""
    run = read_run(str(write_run(tmp_path, faults=(CRASH,))))

    assert [record.step for record in run.steps] == list(range(1, 61))
    assert run.steps[19].attempt == 2


def test_phases_of_an_incident_add_up_to_its_recovery(tmp_path: Path) -> None:
    """Bars are drawn from phases and the table from instants: they must tell the same time."""
    run = read_run(str(write_run(tmp_path, faults=(CRASH, NODE))))

    for incident in run.incidents:
        assert sum(incident.phases_s.values()) == pytest.approx(incident.recovery_s)


def test_recovery_counts_from_detection_where_the_fault_has_no_instant(tmp_path: Path) -> None:
    """Only injected faults say when they happened; real ones are first seen when detected."""
    write_run(tmp_path, faults=(CRASH,))
    path = tmp_path / "incidents" / "0001" / "incident.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["t_fault_s"] = None
    path.write_text(json.dumps(document), encoding="utf-8")

    incident = read_run(str(tmp_path)).incidents[0]

    assert incident.detect_s is None
    assert incident.recovery_s == pytest.approx(0.92 * CRASH.pause_s)
    assert sum(incident.phases_s.values()) == pytest.approx(incident.recovery_s)


def test_a_planned_change_yields_and_fences_no_worker(tmp_path: Path) -> None:
    """Both end with the last member out; the one is a fault and the other a finished step."""
    growth = Fault(step=20, kind="growth", guilty=(), pause_s=1.0, lost_steps=0, workers_after=4)
    incident = read_run(str(write_run(tmp_path, faults=(growth,)))).incidents[0]

    assert "yield" in incident.phases_s
    assert "fence" not in incident.phases_s
    assert incident.who == "\N{EN DASH}"


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    """The reader may look while the run writes, and a killed controller leaves such a line."""
    write_run(tmp_path)
    whole = len(read_run(str(tmp_path)).journal)
    with (tmp_path / "journal" / "000001.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"at_s": 1')

    assert len(read_run(str(tmp_path)).journal) == whole


def test_a_damaged_line_in_the_middle_of_a_journal_is_named(tmp_path: Path) -> None:
    """Leaving it out silently would show a history that did not happen."""
    write_run(tmp_path)
    path = tmp_path / "journal" / "000001.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2][:-3]
    path.write_text("\n".join(lines), encoding="utf-8")

    with pytest.raises(JournalCorruptError, match=r"000001\.jsonl:3"):
        read_run(str(tmp_path))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """An empty page for a mistyped path would look like a run that did nothing."""
    with pytest.raises(RunNotFoundError, match="holds no run"):
        write_report(str(tmp_path))


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    """Reports are asked for while a run goes on; nothing may divide by a missing number."""
    tmp_path.joinpath("config.yaml").write_text("run:\n  name: new\n", encoding="utf-8")

    inside = re.search(r'id="data">(.*?)</script>', _page(tmp_path))
    assert inside is not None

    assert json.loads(inside[1])["loss"] == []


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    """Evidence quotes errors of user code, which may hold anything, markup too."""
    write_run(tmp_path, faults=(CRASH,))
    path = tmp_path / "incidents" / "0001" / "incident.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["evidence"] = document["kind"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(document), encoding="utf-8")

    assert "<script>alert" not in _page(tmp_path)
    assert _document(tmp_path)["incidents"][0]["evidence"] == "<script>alert(1)</script>"


def test_a_version_that_was_not_loaded_is_reported_without_blame(tmp_path: Path) -> None:
    """Hundreds of buffers may be damaged at once; the page has room for some."""
    write_run(tmp_path, faults=(CRASH,))
    path = tmp_path / "incidents" / "0001" / "incident.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"kind": "unloadable", "guilty": [], "skipped": [f"part {n}" for n in range(9)]}
    path.write_text(json.dumps(document), encoding="utf-8")
    (incident,) = _document(tmp_path)["incidents"]

    assert incident["skipped"] == ("part 0", "part 1", "part 2", "part 3")
    assert incident["num_skipped"] == 9
    assert read_run(str(tmp_path)).incidents[0].who == "\N{EN DASH}"


def test_an_incident_without_proof_is_undecided(tmp_path: Path) -> None:
    """An empty cell would read as a fault of the table."""
    hang = Fault(step=20, kind="hang", guilty=(), pause_s=1.0, lost_steps=0, workers_after=4)
    write_run(tmp_path, faults=(hang,))

    assert read_run(str(tmp_path)).incidents[0].who == "undecided"
    assert _document(tmp_path)["incidents"][0]["who"] == "undecided"


def test_thinning_keeps_a_spike_of_one_step() -> None:
    """Taking every n-th point would lose exactly what a loss curve is looked at for."""
    points = [(float(x), 9.0 if x == 7_777 else 1.0) for x in range(10_000)]

    kept = thin(points, 100)

    assert (7_777.0, 9.0) in kept
    assert len(kept) <= 200
    assert kept == sorted(kept)


def test_a_loss_that_is_not_a_number_hides_no_other() -> None:
    """Each stretch of many points shows its lowest and highest, and with NaN nothing is either."""
    losses = [nan if step % 5 == 0 else 2.0 + step % 3 for step in range(20_000)]
    losses[12_345 + 1] = 40.0
    points = [(float(step), loss) for step, loss in enumerate(losses)]

    assert thin(points) == thin([point for point in points if not isnan(point[1])])
    assert 40.0 in {loss for _, loss in thin(points)}


def test_the_facts_of_a_stopped_run_have_its_last_losses(tmp_path: Path) -> None:
    """It has no result of a last step, and its tiles had the numbers that its facts lacked."""
    path = write_run(tmp_path)
    _change(path / "summary.json", outcome="stopped", final_loss=None, validation_loss=None)
    last = json.loads((path / "metrics/rank0.jsonl").read_text().splitlines()[-1])
    (path / "metrics/validation.jsonl").write_text('{"step": 50, "loss": 2.5, "attempt": 1}\n')

    facts = dict(_document(path)["facts"])

    assert facts["final training loss"] == f"{last['loss']:.9f}"
    assert facts["validation loss"] == "2.500000000"
    assert facts["weights digest"] != ""
