"""Which files are records, and what is refused; what real hangs are told as."""

import json
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.core import Incident
from orchestrator.diagnosis import Guilty, Suspicion, Verdict
from orchestrator.diagnosis.verdicts import Alternative
from orchestrator.driver import diagnose_paths
from orchestrator.errors import ConfigError
from orchestrator.fault_kinds import FaultKind
from tests.arch.tree import ROOT
from workers.telemetry import FINISHED, RecordRing
from workers.telemetry import ring as ring_module

DUMPS = ROOT / "tests" / "fixtures" / "fr_dumps"


@pytest.mark.parametrize(
    ("hang", "kind", "ranks"),
    [
        ("gpu_error_1st", FaultKind.DEVICE_STUCK, (12, 14)),
        ("lock_gil_2nd", FaultKind.ABSENT, (10, 15)),
    ],
)
def test_dumps_of_real_hangs_name_the_ranks_that_were_struck(
    hang: str, kind: FaultKind, ranks: tuple[int, ...]
) -> None:
    """``fault_injection.log`` beside the dumps has the truth."""
    (verdict,) = diagnose_paths([str(DUMPS / hang)])

    assert (verdict.kind, verdict.guilty.ranks) == (kind, ranks)
    assert f"Fault ranks: {list(ranks)}" in (DUMPS / hang / "fault_injection.log").read_text()


def test_a_missing_dump_is_reported_and_its_rank_is_not_named(tmp_path: Path) -> None:
    for path in (DUMPS / "lock_gil_2nd").glob("_dump_*"):
        if path.name not in {"_dump_10", "_dump_15"}:
            (tmp_path / path.name).write_bytes(path.read_bytes())

    (verdict,) = diagnose_paths([str(tmp_path)])

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.UNDECIDED, ())
    assert "rank 10: no record of it; rank 15: no record of it" in verdict.evidence


def test_a_dump_that_is_cut_short_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    """A kill leaves one, and nothing of the fifteen others was told."""
    for path in (DUMPS / "lock_gil_2nd").glob("_dump_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    cut = tmp_path / "_dump_5"
    cut.write_bytes(cut.read_bytes()[:2000])

    found, left_out = diagnose_paths([str(tmp_path)])

    assert (found.kind, found.guilty.ranks) == (FaultKind.ABSENT, (10, 15))
    assert (left_out.kind, left_out.guilty) == (FaultKind.UNDECIDED, Guilty())
    assert left_out.evidence.startswith(f"{cut} is truncated and skipped")

    cut = tmp_path / "_dump_15"
    cut.write_bytes(cut.read_bytes()[:-20])
    found, *left = diagnose_paths([str(tmp_path)])

    assert 15 not in found.guilty.ranks
    assert len(left) == 2


def ring(path: Path, rank: int, calls: int, *, waits: bool) -> RecordRing:
    """Write the ring of a rank that made ``calls``, of which the last is not over if it waits."""
    path.parent.mkdir(exist_ok=True)
    writer = RecordRing(path, attempt=3, num_ranks=2)
    writer.assign(rank)
    group = writer.group("world", (0, 1))
    for seq in range(1, calls + 1):
        _, number = writer.enter(group, "all_reduce", 64)
        if waits and seq == calls:
            writer.wait(group, seq)
        else:
            writer.leave(group, seq, number, FINISHED)
    return writer


def test_rings_of_ours_name_who_did_not_come(tmp_path: Path) -> None:
    """Rank 0 made more calls than a ring keeps; rank 1 has begun one ahead, and waits in none."""
    ring(tmp_path / "a.ring", 0, 5000, waits=True)
    idle = ring(tmp_path / "b.ring", 1, 4999, waits=False)
    idle.enter(idle.group("ahead", (0, 1)), "all_gather", 64)
    (tmp_path / "incident.json").write_text("{}")

    (verdict,) = diagnose_paths([str(tmp_path)])

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.ABSENT, (1,))


def test_rings_of_devices_name_the_one_that_stands_still(tmp_path: Path) -> None:
    """Both processes have called all that they wait for."""
    for rank in range(2):
        writer = RecordRing(tmp_path / f"{rank}.ring", attempt=3, num_ranks=2)
        writer.assign(rank, on_device=True)
        world = writer.group("world", (0, 1))
        (first, number), *_ = [
            writer.enter(world, "all_reduce", 64, on_device=True) for _ in range(3)
        ]
        for seq in (1, 2) if rank == 0 else (1,):
            writer.reach(world, seq)
        writer.leave(world, first, number, FINISHED)

    (verdict,) = diagnose_paths([str(tmp_path)])

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.DEVICE_STUCK, (1,))
    assert "Rank 1 did not reach all_reduce number 2 of world" in verdict.evidence
    assert "Rank 1 has a device that is 2 calls behind its process" in verdict.evidence


def test_rings_are_drawn_and_written_as_dumps_that_say_the_same(tmp_path: Path) -> None:
    ring(tmp_path / "rings" / "a.ring", 0, 3, waits=True)
    ring(tmp_path / "rings" / "b.ring", 1, 2, waits=False)
    drawn, dumps = tmp_path / "trace.json", tmp_path / "dumps"

    told = CliRunner().invoke(
        app,
        ["diagnose", str(tmp_path / "rings"), "--trace", str(drawn), "--flight-recorder",
         str(dumps)],
    )  # fmt: skip

    assert told.exit_code == 0
    events = json.loads(drawn.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 5
    assert [event["pid"] for event in events if event["name"] == "absent"] == [0, 2]
    assert "absent: rank 1." in CliRunner().invoke(app, ["diagnose", str(dumps)]).stdout


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    ring(tmp_path / "a.ring", 0, 3, waits=True)

    result = CliRunner().invoke(
        app, ["diagnose", str(tmp_path / "a.ring"), "--trace", str(tmp_path / "a.ring" / "b")]
    )

    assert result.exit_code != 0
    assert "cannot be written" in result.stderr


def test_a_ring_whose_groups_did_not_fit_does_not_make_its_rank_guilty(tmp_path: Path) -> None:
    ring(tmp_path / "a.ring", 0, 2, waits=True)
    full = ring(tmp_path / "b.ring", 1, 1, waits=False)
    while full.group("more", (0, 1)) >= 0:
        pass

    (verdict,) = diagnose_paths([str(tmp_path)])

    assert verdict.kind is FaultKind.UNDECIDED
    assert "did not fit its ring" in verdict.evidence


class Clock:
    """The monotonic clock of a rank, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(ring_module, "time", self)

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


def work(
    folder: Path,
    clock: Clock,
    rank: int,
    *,
    slow: float = 1.0,
    waits_s: float = 0.0,
    data_s: float = 0.001,
    steps: int = 8,
    attempt: int = 3,
) -> tuple[RecordRing, int]:
    """Write the ring of one of four ranks that has done some steps of two micro-batches."""
    writer = RecordRing(folder / f"{rank}.ring", attempt=attempt, num_ranks=4)
    writer.assign(rank)
    writer.locate((rank, 0, 0), f"n{rank}")
    group = writer.group("world", (0, 1, 2, 3))
    clock.now_s = 100.0
    for step in range(1, steps + 1):
        for micro_batch in (0, 1):
            writer.span("data", step=step, micro_batch=micro_batch)
            clock.now_s += data_s
            # Called ahead, so that its times overlap with computing.
            seq, number = writer.enter(group, "all_gather", 64, 1)
            clock.now_s += 1e-5
            writer.span("forward", step=step, micro_batch=micro_batch)
            clock.now_s += 0.01 * slow + waits_s + 1e-5 * (step * rank % 3)
            writer.leave(group, seq, number, FINISHED, round(waits_s * 1e9))
            writer.span("backward", step=step, micro_batch=micro_batch)
            clock.now_s += 0.02 * slow
        writer.span("optimizer", step=step)
        writer.span("")
    return writer, group


@pytest.mark.parametrize(
    ("how", "kind"),
    [({"slow": 1.5}, FaultKind.SLOW_COMPUTE), ({"data_s": 0.05}, FaultKind.SLOW_DATA), ({}, None)],
)
def test_rings_name_who_is_slow_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, float], kind: FaultKind | None
) -> None:
    """Rank 1 takes as long, because it waits for others."""
    clock = Clock(monkeypatch)
    for rank in range(4):
        given = how if rank == 2 else {"waits_s": 0.05} if rank == 1 else {}
        work(tmp_path, clock, rank, **given)  # type: ignore[arg-type]

    found = [(one.kind, one.guilty.ranks, one.guilty.nodes) for one in _of(tmp_path)]

    assert found == ([(kind, (2,), ("n2",))] if kind is not None else [])


def test_rings_of_devices_name_the_slow_one_by_what_passes_took_the_device(tmp_path: Path) -> None:
    """Its host is as quick as the others', and the passes with calls say nothing."""
    for rank in range(4):
        writer = RecordRing(tmp_path / f"{rank}.ring", attempt=3, num_ranks=4)
        writer.assign(rank, on_device=True)
        writer.locate((rank, 0, 0), f"n{rank}")
        for step in range(1, 9):
            for micro_batch, op in ((0, "forward"), (0, "backward"), (1, "forward")):
                number = writer.span(op, step=step, micro_batch=micro_batch)
                writer.span("")
                if (micro_batch, op) != (0, "forward"):
                    took_s = 0.02 * (1.5 if rank == 2 else 1.0) + 1e-4 * (step * rank % 3)
                    writer.measured(number, took_s)
            writer.span("optimizer", step=step)
            writer.span("")

    (verdict,) = _of(tmp_path)

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.SLOW_COMPUTE, (2,))


def test_a_rank_that_waits_within_its_own_work_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in backward for what it called before; rank 3 reads data since, and comes late."""
    clock = Clock(monkeypatch)
    for rank in range(4):
        writer, group = work(tmp_path, clock, rank)
        if rank == 3:
            writer.span("data", step=9)
            continue
        seq, _ = writer.enter(group, "all_reduce", 64, 1)
        clock.now_s += 1e-5
        writer.span("backward", step=9)
        writer.wait(group, seq)

    (verdict,) = _of(tmp_path)

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.SLOW_DATA, (3,))
    assert "rank 3 has been in data" in verdict.evidence.lower()


def test_a_call_that_was_left_out_long_ago_is_seen_by_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is overwritten, and the calls since are equal, so nothing hangs."""
    clock = Clock(monkeypatch)
    for rank in range(4):
        writer, group = work(tmp_path, clock, rank, steps=1)
        # Rank 1 leaves a reduce_scatter out, and makes up for it by another call in the end.
        writer.enter(group, "reduce_scatter" if rank != 1 else "all_gather", 64, 1)
        for _ in range(5000):
            seq, number = writer.enter(group, "all_gather", 64, 1)
            writer.leave(group, seq, number, FINISHED)

    (verdict,) = _of(tmp_path)

    assert (verdict.kind, verdict.guilty.ranks) == (FaultKind.DESYNC, (1,))


def test_the_ring_of_an_older_attempt_says_nothing_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls have the same numbers; the worker of rank 1 is another one by now."""
    clock = Clock(monkeypatch)
    writer, group = work(tmp_path, clock, 1, attempt=2)
    writer.enter(group, "broadcast", 999, 1)
    (tmp_path / "1.ring").rename(tmp_path / "dead.ring")
    for rank in range(4):
        work(tmp_path, clock, rank)

    assert _of(tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == 5


def _of(folder: Path) -> tuple[Verdict, ...]:
    return diagnose_paths([str(folder)])


@pytest.mark.parametrize(
    ("value", "named"),
    [(Path("x"), "pathlib"), ({"a": [print]}, "print"), (OrderedDict, "Ordered")],
)
def test_a_dump_that_names_a_class_is_refused_by_its_name(
    tmp_path: Path, value: object, named: str
) -> None:
    file = tmp_path / "_dump_0"
    file.write_bytes(pickle.dumps({"entries": value}))

    result = CliRunner().invoke(app, ["diagnose", str(file)])

    assert result.exit_code != 0
    assert named in result.stderr
    assert "_dump_0" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.txt", "hello", "not a record of a run"),
        ("a.jsonl", '{"rank": 0}\n', "line 1: not an operation"),
        ("b.jsonl", "\n[1]\n", "line 2: not an operation"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError, match=why):
        diagnose_paths([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="does not exist"):
        diagnose_paths([str(tmp_path / "nothing")])


def _row(rank: int, op: str, seq: int, **known: object) -> dict[str, object]:
    row = {"rank": rank, "op": op, "seq": seq, "comm": "pp", "comm_ranks": [0, 1], "t_enter": seq}
    return {**row, "t_exit": seq + 0.5, **known}


def test_the_command_tells_machines_and_people_the_same(tmp_path: Path) -> None:
    """Both directions of the pair are numbered together, so the ends' numbers differ."""
    rows = [
        _row(0, "send", 1), _row(0, "isend", 2), _row(0, "recv", 3, t_exit=None),
        _row(1, "recv", 1), _row(1, "send", 2, t_exit=None), _row(1, "recv", 3),
    ]  # fmt: skip
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    told = CliRunner().invoke(app, ["diagnose", str(file), "--json"]).stdout
    shown = CliRunner().invoke(app, ["diagnose", str(file)]).stdout

    (verdict,) = json.loads(told)["verdicts"]
    assert verdict["kind"] == "link_dead"
    assert verdict["guilty"] == {"ranks": [], "nodes": [], "links": [[1, 0]]}
    assert set(verdict) == {
        "kind", "guilty", "confidence", "since_s", "evidence", "alternatives",
    }  # fmt: skip
    assert "link_dead: the link from rank 1 to rank 0." in shown


def test_links_that_were_suspected_are_told_from_the_incident(tmp_path: Path) -> None:
    """Keepers timed them, so no record of the ranks shows it."""
    one = Suspicion(
        kind=FaultKind.SLOW_LINK, guilty=Guilty(links=((2, 1),)), confidence=0.6, since_s=9.5,
        evidence="Keepers sent slowly.", times=2.0,
        alternatives=(Alternative(FaultKind.SLOW_SENDER, Guilty.of([2], (), ["n2"])),),
    )  # fmt: skip
    slow = replace(one, kind=FaultKind.SLOW_COMPUTE)
    found = Incident(number=1, kind="move", suspects=(one, slow))
    (tmp_path / "incident.json").write_text(json.dumps(found.to_json()))

    assert diagnose_paths([str(tmp_path)]) == (one,)


@pytest.mark.parametrize("kind", [FaultKind.NOT_FINITE, FaultKind.DIVERGED])
def test_the_incident_says_what_the_run_found_out(tmp_path: Path, kind: FaultKind) -> None:
    """No record of operations shows numbers."""
    found = Incident(
        number=1, kind=kind, verdict=kind, evidence="step 2: rank 1", places=((1, "w0001", "a"),)
    )
    (tmp_path / "0001").mkdir()
    (tmp_path / "0001" / "incident.json").write_text(json.dumps(found.to_json()))

    (verdict,) = diagnose_paths([str(tmp_path)])

    assert (verdict.kind, verdict.guilty) == (kind, Guilty.of([1], (), ["a"]))
    assert "step 2: rank 1" in verdict.evidence


@pytest.mark.parametrize(
    ("kind", "verdict", "confidence"), [("crash", FaultKind.DEAD, 1.0), ("node_loss", "", 0.5)]
)
def test_a_death_comes_from_its_incident_and_not_from_what_it_cut_short(
    tmp_path: Path, kind: str, verdict: str, confidence: float
) -> None:
    """The records end while a healthy rank computes, which others wait for."""
    found = Incident(
        number=1, kind=kind, verdict=verdict, evidence="SIGKILL", places=((2, "w0003", "a"),)
    )
    (tmp_path / "incident.json").write_text(json.dumps(found.to_json()))
    rows = [_row(0, "all_reduce", 1, t_exit=None), _row(1, "all_reduce", 0)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    (told,) = diagnose_paths([str(tmp_path)])

    assert (told.kind, told.guilty) == (FaultKind.DEAD, Guilty.of([2], (), ["a"]))
    assert (told.confidence, told.evidence) == (confidence, "SIGKILL")


@pytest.mark.parametrize(
    ("kind", "verdict", "told"),
    [
        ("hang", "frozen", [(FaultKind.FROZEN, (0, 3))]),
        # The second fault of the same instant.
        ("crash", "dead", [(FaultKind.DEAD, (1,)), (FaultKind.FROZEN, (0, 3))]),
    ],
)
def test_the_incident_has_what_the_kernel_said_of_the_members(
    tmp_path: Path, kind: str, verdict: str, told: list[tuple[FaultKind, tuple[int, ...]]]
) -> None:
    """Two ranks were stopped at once. Records name the one that others waited for."""
    found = Incident(kind=kind, verdict=verdict, evidence="1", places=((1, "w0002", "a"),))
    (tmp_path / "incident.json").write_text(json.dumps(found.to_json()))
    workers = [{"rank": rank, "os_state": state} for rank, state in enumerate("TRST")]
    (tmp_path / "reports.json").write_text(json.dumps({"groups": {}, "workers": workers}))
    rows = [_row(0, "all_reduce", 1, t_exit=None), _row(1, "all_reduce", 0)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    verdicts = diagnose_paths([str(tmp_path)])

    assert [(one.kind, one.guilty.ranks) for one in verdicts] == told
    assert "rank 0, rank 3 is stopped by a signal" in verdicts[-1].evidence


def _spans(begin_s: float) -> list[dict[str, object]]:
    """Return forwards of five steps of two ranks; each step begins ``begin_s`` after the last."""
    return [
        _row(rank, "forward", 0, comm=None, step=n, t_enter=n * begin_s, t_exit=n * begin_s + 1.0)
        for rank in (0, 1)
        for n in range(1, 6)
    ]


def test_steps_that_lie_on_each_other_are_not_judged_in_silence(tmp_path: Path) -> None:
    """Times that begin at 0 in each step say nothing of who was slow, and one was found all the
    same."""
    file = tmp_path / "trace.jsonl"
    for begin_s, num in ((1.0, 0), (0.0, 1)):
        file.write_text("".join(json.dumps(row) + "\n" for row in _spans(begin_s)))

        verdicts = diagnose_paths([str(file)])

        assert len(verdicts) == num
    assert verdicts[0].kind is FaultKind.UNDECIDED
    assert verdicts[0].evidence.startswith("The times of steps overlap: rank 0 begins forward")


def test_a_last_line_that_was_cut_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    """The process was killed while it wrote it."""
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in _spans(1.0))[:-20])

    (verdict,) = diagnose_paths([str(file)])

    assert verdict.evidence.startswith(f"{file} is truncated")
    assert verdict.evidence.endswith("its last line, 10, is not JSON")


def test_nothing_to_blame_is_said(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(_row(r, "all_reduce", 1)) + "\n" for r in (0, 1)))

    result = CliRunner().invoke(app, ["diagnose", str(file)])

    assert (result.exit_code, result.stdout) == (0, "Nothing is at fault.\n")
    assert json.loads(CliRunner().invoke(app, ["diagnose", str(file), "--json"]).stdout) == {
        "verdicts": []
    }
