from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from math import isnan
from pathlib import Path

import pytest

from orchestrator.errors import JournalCorruptError, RunNotFoundError
from orchestrator.report import write_report
from orchestrator.report.charts import Band, Series, chart, thin, ticks
from orchestrator.report.html import compare_ends, seconds
from orchestrator.run_directory import read_run
from tests.support.run_directories import Fault, write_run

CRASH = Fault(step=20, kind="crash", guilty=("w0002",), pause_s=0.6, lost_steps=1, workers_after=3)
NODE = Fault(step=40, kind="node", guilty=("n1",), pause_s=2.4, lost_steps=0, workers_after=2)


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    """A report is mailed, archived and opened on a plane: one remote font breaks the page."""
    write_run(tmp_path / "disturbed", faults=(CRASH, NODE))

    page = Path(write_report(str(tmp_path / "disturbed"))).read_text(encoding="utf-8")

    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|https?:", page)


def test_the_page_closes_every_element_it_opens(tmp_path: Path) -> None:
    """A template and drawn parts are put together; browsers hide a slip, printers do not."""
    write_run(tmp_path / "undisturbed")
    write_run(tmp_path / "disturbed", faults=(CRASH, NODE))

    path = write_report(str(tmp_path / "disturbed"), compare=str(tmp_path / "undisturbed"))

    assert _unbalanced(Path(path).read_text(encoding="utf-8")) == []


def test_a_run_with_equal_digests_is_said_to_have_the_same_weights(tmp_path: Path) -> None:
    """The one sentence that people look for; it must come from the digest, not from the losses."""
    write_run(tmp_path / "undisturbed")
    write_run(tmp_path / "disturbed", faults=(CRASH,))

    path = write_report(str(tmp_path / "disturbed"), compare=str(tmp_path / "undisturbed"))

    assert "Same weights, bit for bit" in Path(path).read_text(encoding="utf-8")


def test_what_the_run_and_each_incident_cost_is_told_where_prices_are_known(tmp_path: Path) -> None:
    """The one who pays asks what a million tokens cost, and what the faults did."""
    path = write_run(tmp_path / "run", faults=(CRASH, NODE))
    assert "cost" not in Path(write_report(str(path))).read_text(encoding="utf-8")
    _change(path / "summary.json", cost_usd=12.5)
    _change(path / "incidents/0001/incident.json", cost_usd=0.25)

    page = Path(write_report(str(path))).read_text(encoding="utf-8")

    tokens = sum(record.tokens for record in read_run(str(path)).steps)
    assert "12.50 $" in page
    assert f"{1e6 * 12.5 / tokens:.4g} per million tokens" in page
    assert page.count("0.2500") == 2


def _change(path: Path, **values: float) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_equal_losses_do_not_hide_different_weights(tmp_path: Path) -> None:
    """Losses that print alike are no proof: the digest decides."""
    same = read_run(str(write_run(tmp_path / "a")))
    other = read_run(str(write_run(tmp_path / "b", digest="00" * 32)))

    assert compare_ends(same, other).verdict == "close"


def test_an_unfinished_run_gets_no_verdict(tmp_path: Path) -> None:
    """Two missing digests are equal as values."""
    a = read_run(str(write_run(tmp_path / "a", finished=False)))
    b = read_run(str(write_run(tmp_path / "b", finished=False)))

    assert compare_ends(a, b).verdict == "unknown"


def test_runs_of_different_length_are_not_compared(tmp_path: Path) -> None:
    """A run that stopped early can have any loss, also a lower one."""
    a = read_run(str(write_run(tmp_path / "a", steps=30)))
    b = read_run(str(write_run(tmp_path / "b", steps=60)))

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


def test_a_planned_change_yields_and_fences_nobody(tmp_path: Path) -> None:
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

    page = Path(write_report(str(tmp_path))).read_text(encoding="utf-8")

    assert "Nothing was recorded yet." in page


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    """Evidence quotes errors of user code, which may hold anything, markup too."""
    write_run(tmp_path, faults=(CRASH,))
    path = tmp_path / "incidents" / "0001" / "incident.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["evidence"] = document["kind"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(document), encoding="utf-8")

    assert "<script>alert" not in Path(write_report(str(tmp_path))).read_text(encoding="utf-8")


def test_what_was_not_loaded_is_told_and_blames_nobody(tmp_path: Path) -> None:
    """Hundreds of buffers may be damaged at once; the page has room for some."""
    write_run(tmp_path, faults=(CRASH,))
    path = tmp_path / "incidents" / "0001" / "incident.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"kind": "unloadable", "guilty": [], "skipped": [f"part {n}" for n in range(9)]}
    path.write_text(json.dumps(document), encoding="utf-8")
    page = Path(write_report(str(tmp_path))).read_text(encoding="utf-8")

    assert page.count("not loaded: part") == 4
    assert "and 5 more like these" in page
    assert read_run(str(tmp_path)).incidents[0].who == "\N{EN DASH}"


def test_undecided_is_said_when_nobody_was_proven_guilty(tmp_path: Path) -> None:
    """An empty cell would read as a fault of the table."""
    hang = Fault(step=20, kind="hang", guilty=(), pause_s=1.0, lost_steps=0, workers_after=4)
    write_run(tmp_path, faults=(hang,))

    assert read_run(str(tmp_path)).incidents[0].who == "undecided"
    assert "undecided" in Path(write_report(str(tmp_path))).read_text(encoding="utf-8")


def test_thinning_keeps_a_spike_of_one_step() -> None:
    """Taking every n-th point would lose exactly what a loss curve is looked at for."""
    points = [(float(x), 9.0 if x == 7_777 else 1.0) for x in range(10_000)]

    kept = thin(points, 100)

    assert (7_777.0, 9.0) in kept
    assert len(kept) <= 200
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 60.0, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]),
        (1.7, 5.3, [2.0, 3.0, 4.0, 5.0]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    """Ticks at 1.7, 2.3, 2.9 cannot be read off."""
    assert ticks(low, high) == pytest.approx(expected)


def test_a_loss_that_is_not_a_number_does_not_break_the_picture() -> None:
    """One NaN in a path makes a browser drop the whole curve."""
    points = ((1.0, 3.0), (2.0, float("nan")), (3.0, 2.0))

    drawn = chart([Series(label="run", css="over", points=points)], x_label="step", y_label="loss")

    assert "nan" not in drawn.lower()


def test_a_loss_that_is_not_a_number_hides_no_other() -> None:
    """Each stretch of many points shows its lowest and highest, and with NaN nothing is either."""
    losses = [float("nan") if step % 5 == 0 else 2.0 + step % 3 for step in range(20_000)]
    losses[12_345 + 1] = 40.0
    points = tuple((float(step), loss) for step, loss in enumerate(losses))
    finite = tuple(point for point in points if not isnan(point[1]))

    drawn, wanted = (
        chart([Series(label="run", css="over", points=each)], x_label="step", y_label="loss")
        for each in (points, finite)
    )

    assert drawn == wanted


def test_labels_of_incidents_do_not_overlap() -> None:
    """Ten incidents within a second would be a black bar; those without a label keep a title."""
    series = [Series(label="run", css="over", points=((0.0, 3.0), (1000.0, 2.0)))]
    begins = (100.0, 101.0, 102.0, 103.0, 500.0)
    bands = [
        Band(begin=begin, end=begin, label=f"#{number}", title=f"incident {number}")
        for number, begin in enumerate(begins, 8)
    ]

    drawn = chart(series, x_label="step", y_label="loss", bands=bands)

    found = re.findall(r'<text class="mid" x="([\d.]+)" y="([\d.]+)">#(\d+)<', drawn)
    assert [number for _, _, number in found] == ["8", "9", "12"]
    assert len({y for _, y, _ in found[:2]}) == 2
    assert drawn.count("<title>incident") == 5


def test_ninety_incidents_can_be_read(tmp_path: Path) -> None:
    """Numbers lay on numbers above the plots, and nobody found the one hang among 60 crashes."""
    page = _ninety_incidents(tmp_path)

    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        bands = "".join(re.findall(r'<g class="band">.*?</g>', svg, flags=re.DOTALL))
        labels = re.findall(r'<text class="\w+" x="([\d.]+)" y="[\d.]+">(\d+)<', bands)
        edges = [float(x) - 3.25 * len(text) for x, text in labels]
        assert 5 < len(labels) < 45
        assert all(right - left > 6.5 * 4 for left, right in itertools.pairwise(edges))
    assert '<option value="hang">hang (30)</option>' in page
    assert page.count('data-kind="crash"') == 60


def test_the_time_of_detection_has_a_column_only_where_it_is_known(tmp_path: Path) -> None:
    """In a real run nobody says when the fault happened, and the column was empty."""
    page = _ninety_incidents(tmp_path)
    assert "detected in" in page
    for path in tmp_path.glob("incidents/*/incident.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**document, "t_fault_s": None}), encoding="utf-8")

    assert "detected in" not in Path(write_report(str(tmp_path))).read_text(encoding="utf-8")


def _ninety_incidents(directory: Path) -> str:
    faults = [
        Fault(
            step=20 + 10 * number,
            kind="hang" if number % 3 == 0 else "crash",
            guilty=(f"w{number:04d}",),
            pause_s=0.4 + 0.1 * (number % 7),
            lost_steps=number % 2,
            workers_after=4 - number % 2,
        )
        for number in range(90)
    ]
    write_run(directory, steps=1000, faults=faults)
    return Path(write_report(str(directory))).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "\u2013"), (0.0312, "31 ms"), (2.345, "2.3 s"), (185.0, "3 min 5 s")]
)
def test_durations_are_written_for_people(value: float | None, text: str) -> None:
    """0.03124999 s is no measurement, and 185 s is nobody's unit."""
    assert seconds(value) == text


def _unbalanced(page: str) -> list[str]:
    void = {"meta", "path", "rect", "br"}
    stack: list[str] = []
    faults: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - signature
            if tag not in void:
                stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in void:
                return
            if not stack or stack.pop() != tag:
                faults.append(f"</{tag}> closes nothing")

    Checker().feed(page)
    return [*faults, *stack]
