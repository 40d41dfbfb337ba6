"""The comparison with peers: its figures from lines, and the targets of its faults."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.peers.events import Event, Follower
from tests.benchmarks.peers.injector import FAULTS, Victims
from tests.benchmarks.peers.processes import arms
from tests.benchmarks.peers.progress import first_after, whole_steps
from tests.benchmarks.peers.table import (
    GLOBAL_BATCH,
    PROBE_EVERY,
    as_text,
    count_lines,
    fault_rows,
    seen,
    step_rows,
)
from tests.benchmarks.peers.trainer import GLOBAL_BATCH as TRAINED
from tests.benchmarks.peers.trainer import NUM_SAMPLES, order
from tests.benchmarks.peers.trainer import PROBE_EVERY as PROBED

WORLD = 4
MEMBERS = [(10, "n0"), (11, "n0"), (12, "n1"), (13, "n1")]


def step_lines(
    step: int, at_s: float, *, group: str = "a", world: int = WORLD, ranks: Any = range(WORLD),
    share: dict[int, list[int]] | None = None,
) -> list[Event]:  # fmt: skip
    """Return the lines of a step that each rank ends a millisecond behind the one before."""
    found = []
    for rank in ranks:
        which = {"pid": 10 + rank, "node": f"n{rank // 2}", "group": group, "world": world}
        samples = order(step)[rank::world] if share is None else share[rank]
        line = {**which, "step": step, "rank": rank}
        found.append({**line, "event": "samples", "time": at_s - 0.05, "samples": samples})
        found.append({**line, "event": "committed", "time": at_s + rank / 1000, "loss": 1.0})
    return found


def job_lines(fault: str, steps: list[Event], *more: Event, arm: str = "peer") -> list[Event]:
    told = {"event": "run", "time": 0.0, "arm": arm, "version": "1.2", "fault": fault}
    return [told, {"event": "launch", "time": 0.0}, *steps, *more]


def weights(step: int, at_s: float, values: list[float], digest: str) -> Event:
    probed = {"digest": digest, "probed": values}
    return {"event": "weights", "time": at_s, "step": step, "weights": probed}


def over(at_s: float, code: int | None = 0) -> list[Event]:
    return [{"event": "end", "time": at_s}, {"event": "over", "time": at_s, "exit_code": code}]


def undisturbed(last: int = 40, arm: str = "peer") -> list[Event]:
    steps = list(itertools.chain(*(step_lines(n, float(n)) for n in range(1, last + 1))))
    return job_lines("none", steps, weights(20, 20.5, [1.0, -2.0], "x"), *over(last + 1.0), arm=arm)


def restarted(fault_s: float = 25.5, again_from: int = 21) -> list[Event]:
    """Return a job that lost rank 1 after step 25, and began again behind a checkpoint."""
    before = list(itertools.chain(*(step_lines(n, float(n)) for n in range(1, 26))))
    # Survivors end the step under way.
    trailing = step_lines(26, fault_s + 0.4, ranks=(0, 2, 3))
    after = [
        step_lines(n, fault_s + 7 + n - again_from, group="b", world=2, ranks=(0, 1))
        for n in range(again_from, 41)
    ]
    fault = {"event": "fault", "time": fault_s, "at_s": fault_s, "fault": "kill", "step": 25}
    lines = [*before, *trailing, *itertools.chain(*after)]
    return job_lines("kill", lines, fault, *over(70.0))


def row(*jobs: list[Event]) -> dict[str, Any]:
    (only,) = fault_rows([seen(job) for job in jobs])
    return only


def test_a_recovery_ends_with_a_step_that_all_of_a_group_did_behind_the_fault() -> None:
    """Steps that survivors still end, and a line that one of them wrote late, are no recovery."""
    (cost,) = seen(restarted()).costs
    assert cost.seconds == pytest.approx(7.001)
    assert (cost.lost_steps, cost.workers) == (5, 2)
    late = step_lines(5, 99.9995)
    assert first_after(whole_steps(late), 100.0) is None


def test_what_is_done_until_all_of_a_fault_has_come_is_no_recovery() -> None:
    """A job that is stopped in order ends its step first, and starts again much later."""
    harmed = {"event": "harmed", "time": 26.5}
    lines = [*restarted(again_from=27), *step_lines(26, 26.0), harmed]
    (cost,) = seen(lines).costs
    assert cost.seconds == pytest.approx(7.001)
    assert cost.lost_steps == 0


def test_steps_done_twice_are_lost_steps_and_no_doubled_samples() -> None:
    """Their first updates went with the state that was given up."""
    found = row(undisturbed(), restarted())
    assert (found["steps_lost"], found["samples_lost"], found["samples_doubled"]) == (5, 0, 0)
    assert found["n"] == found["ended"] == 1


def test_samples_that_no_step_had_or_two_had_are_counted_from_the_order() -> None:
    """A tool that says it lost nothing may have left out the share of a worker."""
    lines = restarted()
    short = [x for x in lines if not (x["event"] == "samples" and x["step"] == 30 and x["rank"])]
    assert row(undisturbed(), short)["samples_lost"] == GLOBAL_BATCH // 2
    twice = {0: order(29)[:8], 1: order(30)[8:]}
    again = [x for x in lines if x.get("step") != 30]
    again += step_lines(30, 41.5, group="b", world=2, ranks=(0, 1), share=twice)
    found = row(undisturbed(), again)
    assert (found["samples_lost"], found["samples_doubled"]) == (8, 8)
    # Behind the end of the undisturbed job there is the size of the batch to go by.
    found = row(undisturbed(last=25), again)
    assert (found["samples_lost"], found["samples_doubled"]) == (0, 8)


def test_weights_are_compared_at_the_last_step_that_both_put_on_record() -> None:
    same = [*restarted(), weights(20, 20.2, [1.0, -2.0], "x")]
    assert row(undisturbed(), same)["weights_off"] == 0.0
    off = [*restarted(), weights(20, 20.2, [1.0, -2.1], "y"), weights(40, 60.0, [9.0, 9.0], "z")]
    assert row(undisturbed(), off)["weights_off"] == pytest.approx(0.05)
    assert row(undisturbed(), restarted())["weights_off"] == "?"
    assert row(restarted())["samples_lost"] == "?"


def test_a_job_that_was_helped_did_not_survive_and_did_not_end_by_itself() -> None:
    """The steps that it did behind the help would pass for a slow recovery."""
    helped = [*restarted(), {"event": "helped", "time": 30.0, "fault": "kill"}]
    found = row(undisturbed(), helped)
    assert (found["n"], found["not_survived"], found["ended"], found["p50_s"]) == (1, 1, 0, None)
    crashed = [*restarted()[:-2], *over(70.0, code=1)]
    assert row(undisturbed(), crashed)["ended"] == 0


def test_step_times_are_over_those_of_bare_and_leave_out_probed_steps() -> None:
    """A whole copy of the weights is gathered behind a step that is put on record."""
    slow = undisturbed(arm="bare", last=PROBE_EVERY + 10)
    for line in slow:
        late = 5.0 if line.get("step", 0) > PROBE_EVERY else 0.0
        line["time"] = line["time"] / 2 + late
    rows = step_rows([seen(slow), seen(undisturbed())], {"peer": 33})
    bare, peer = rows
    assert bare["step_p99_ms"] == pytest.approx(500.0)
    assert (peer["over_bare_p50"], peer["lines"], bare["lines"]) == (2.0, 33, None)
    assert "| peer | 1.2 |" in as_text(rows)


def test_victims_are_on_each_node_alike_and_the_same_for_a_seed() -> None:
    """A peer that avoids a node on which more workers fail would look slow for our choice."""
    chosen = [Victims(3) for _ in range(2)]
    first, second = ([one.worker(MEMBERS) for _ in range(6)] for one in chosen)
    assert first == second
    assert Counter(node for _, node in first) == {"n0": 3, "n1": 3}
    assert {Victims(seed).worker(MEMBERS)[0] for seed in range(20)} == {10, 11, 12, 13}
    victims = Victims(0)
    pid, node = victims.worker(MEMBERS)
    assert victims.worker(MEMBERS, but=pid)[1] != node
    assert [Victims(0).node(), victims.node()] == ["n0", "n0"]


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    """The files are read while their writers train, and while one is killed in mid-line."""
    path, line = tmp_path / "n0-1.jsonl", json.dumps({"time": 1.0, "event": "start"}) + "\n"
    path.write_text(line + line[:9])
    follower = Follower(tmp_path)
    assert len(follower.lines()) == 1
    path.write_text(line + line)
    assert len(follower.lines()) == 2
    assert follower.lines(since_s=1.0) == []


def test_lines_of_code_are_those_with_code() -> None:
    script = (
        '"""Doc.\n\nMore."""\n\n# Why.\nimport os\n\n\ndef f():\n    """Doc."""\n    return (\n'
    )
    assert count_lines(script + '        os.name,\n        "text",\n    )\n') == 6


def test_every_arm_has_a_script_and_faults_that_there_are() -> None:
    """A mistyped variant would be found in the middle of a run of hours."""
    every = arms()
    assert {"bare", "torchrun", "torchft-tuned", "ray_train-tuned", "nvrx"} <= every.keys()
    for arm in every.values():
        assert arm.about
        assert arm.node
        assert arm.skipped or arm.script.is_file()
        assert set(arm.faults) <= FAULTS.keys()
    assert every["torchft-tuned"].head != every["torchft"].head
    assert (GLOBAL_BATCH, PROBE_EVERY) == (TRAINED, PROBED)


def test_the_order_has_each_sample_once() -> None:
    """Else samples that come twice would not be those of a peer."""
    num_steps = NUM_SAMPLES // GLOBAL_BATCH
    assert len({one for step in range(1, num_steps + 1) for one in order(step)}) == NUM_SAMPLES
