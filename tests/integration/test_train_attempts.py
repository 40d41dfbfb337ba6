"""Real training processes over gloo, attempt by attempt, as the orchestrator drives them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.attempts import (
    finish,
    lines,
    newest,
    of_script,
    reset,
    result,
    settings,
    times_of,
    wait_for_steps,
)
from tests.support.snapshots import eventually
from tests.support.trainers import Run
from workers.protocol import Completed, Fenced, PeerLost, Raised, Unloadable, Yielded
from workers.settings import DataSettings
from workers.telemetry import RingReader

SUPPORT = Path(__file__).parents[1] / "support"


def test_a_run_that_starts_from_a_checkpoint_is_the_same_with_any_number_of_workers(
    run: Run, text: DataSettings, tmp_path: Path
) -> None:
    """Each rank reads its own boxes of it, and the state of the optimizer, too."""
    finish(run, settings(text, deterministic=True, steps=3), num_workers=2)
    trained = result(run)["weights_digest"]
    source = tmp_path / "source"
    shutil.copytree(run.directory / "checkpoints/step-00000003", source)
    digests = []
    for num_workers in (1, 3):
        reset(run)
        chosen = settings(text, deterministic=True, steps=2)
        start = replace(chosen.run, init_from=str(source), init_state="all")
        chosen = replace(chosen, run=start)
        finish(run, chosen, num_workers=num_workers)
        digests.append(result(run)["weights_digest"])

    assert digests[0] == digests[1] != trained


def test_growing_and_shrinking_in_mid_run_changes_no_bit_in_deterministic_mode(
    run: Run, text: DataSettings
) -> None:
    """Sums over ranks are reordered by the number of ranks, unless their order is fixed.

    The state goes through storage and other shards twice on the way.
    """

    def numbers() -> tuple[object, ...]:
        told = [(line["step"], line["loss"], line["grad_norm"]) for line in lines(run)]
        return result(run)["weights_digest"], result(run)["validation_loss"], told

    chosen = settings(text, deterministic=True)
    finish(run, chosen, num_workers=2)
    undisturbed = numbers()
    reset(run)
    for num_workers in (4, 3):
        # The last rank leaves after one step and takes the others with it.
        resume = newest(run) if run.lineage[1:] else (0, 0)
        members = run.begin(chosen, num_workers=num_workers, resume=resume)
        members[-1].yield_at_boundary(len(run.lineage))
        outcomes = [trainer.left().outcome for trainer in members]
        assert all(isinstance(outcome, Yielded) for outcome in outcomes)
    finish(run, chosen, num_workers=5, resume=newest(run))

    assert numbers() == undisturbed


def test_survivors_of_a_killed_worker_leave_and_lose_no_sample(
    run: Run, text: DataSettings
) -> None:
    """A rank that is not the dead one's neighbour would wait for its whole timeout."""
    members = run.begin(settings(text, steps=400), num_workers=4)
    wait_for_steps(run, 3)
    members[1].process.kill()
    members[1].process.join()
    survivors = [run.trainers[at] for at in (0, 2, 3)]
    for trainer in survivors:
        trainer.fence(1)
    outcomes = [trainer.left().outcome for trainer in survivors]
    assert all(isinstance(outcome, Fenced | PeerLost) for outcome in outcomes)
    resumed = newest(run)

    chosen = settings(text, steps=resumed[0] + 3)
    left = run.train(chosen, num_workers=3, members=(0, 2, 3), resume=resumed)

    assert [one.outcome for one in left] == [Completed(attempt=2, step=resumed[0] + 3)] * 3
    history = {line["step"]: (line["order_start"], line["order_stop"]) for line in lines(run)}
    assert sorted(history) == list(range(1, resumed[0] + 4))
    assert [history[step] for step in sorted(history)] == [
        (16 * step, 16 * step + 16) for step in range(resumed[0] + 3)
    ]


def test_a_fenced_worker_writes_nothing_more(run: Run, text: DataSettings) -> None:
    """Its last state may still be on its way to storage when the fence comes."""
    members = run.begin(settings(text, steps=100_000), num_workers=2)
    wait_for_steps(run, 3)
    for trainer in members:
        trainer.fence(1)
    outcomes = [trainer.left().outcome for trainer in members]
    # The second may hear that the first has left before it hears of its own fence.
    assert [type(outcome) for outcome in outcomes] in ([Fenced, Fenced], [Fenced, PeerLost])
    resumed = newest(run)
    written = times_of(run, "a0001-*")

    finish(run, settings(text, steps=resumed[0] + 2), num_workers=2, resume=resumed)

    assert resumed[0] <= max(outcome.step for outcome in outcomes)
    assert newest(run) == (resumed[0] + 2, 2)
    assert times_of(run, "a0001-*") == written


def test_a_damaged_checkpoint_is_loaded_by_no_rank_and_told_by_who_needs_it(
    run: Run, text: DataSettings
) -> None:
    """Only the rank that needs the damaged bytes sees the damage."""
    finish(run, settings(text, steps=3), num_workers=2)
    file = next((run.directory / "checkpoints/step-00000003").glob("*-r00001.bin"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)

    outcomes = [one.outcome for one in run.train(settings(text), num_workers=2, resume=(3, 1))]

    assert [type(outcome) for outcome in outcomes] == [Unloadable] * 2
    by_rank = [outcome.found for outcome in outcomes if isinstance(outcome, Unloadable)]
    assert [found.damaged for found in by_rank] == [(), ((3, 1, "", "", 0, 0),)]
    assert by_rank[1].reasons[0].startswith("step-00000003: ChecksumMismatchError")
    finish(run, settings(text, steps=4), num_workers=2, resume=(2, 1))
    steps = [line["step"] for line in lines(run) if line["attempt"] == 3]
    assert steps == [3, 4]


@pytest.mark.parametrize("how", ["peer dies", "fence"])
def test_damage_is_reported_though_the_attempt_ends_before_all_have_loaded(
    run: Run, text: DataSettings, how: str
) -> None:
    """Else the next attempts would meet it again, for ever."""
    finish(run, settings(text, steps=3), num_workers=2)
    folder = run.directory / "checkpoints/step-00000003"
    _, other = sorted(folder.glob("*.bin"))
    content = bytearray(other.read_bytes())
    content[100] ^= 1
    other.write_bytes(content)
    members = run.begin(settings(text), num_workers=2, resume=(3, 1))
    # It has loaded once it asks who has. Rank 0 may have, or not. If both were quick, the attempt
    # is over, and its group is in the ring no more.
    ring = run.directory / "w0001.ring"
    assert eventually(lambda: _has_called(ring, attempt=2) or members[1].has_left())
    if how == "fence":
        members[1].fence(2)
    else:
        members[0].process.kill()
    left = members[1].left().outcome

    assert isinstance(left, Unloadable), left
    assert left.found.damaged == ((3, 1, "", "", 0, 0),)


def _has_called(ring: Path, *, attempt: int) -> bool:
    found, groups, _ = RingReader(ring).look()
    return found == attempt and any(group.entered_seq for group in groups)


def test_an_attempt_that_resumes_from_the_last_step_still_ends_the_run(
    run: Run, text: DataSettings
) -> None:
    """All workers can die between the last commit and the end; no step is left to commit then."""
    finish(run, settings(text), num_workers=2)
    before = result(run)
    (run.directory / "result.json").unlink()

    finish(run, settings(text), num_workers=3, resume=(6, 1))

    assert {**result(run), "attempt": 1} == pytest.approx(before)


def test_an_exception_of_the_script_begins_with_its_frames(run: Run) -> None:
    """The user must see the script's own line first, not the loop around it."""
    told = SUPPORT / "train_told.py"
    chosen = of_script(told, "2:divide:1", steps=5, global_batch=4, micro_batch=2, warmup_steps=0)
    members = run.begin(chosen, num_workers=2)
    raised = members[1].left().outcome
    members[0].fence(1)
    other = members[0].left().outcome

    assert isinstance(raised, Raised)
    assert raised.step == 3
    assert raised.error == "ZeroDivisionError: float division by zero"
    frames = [line for line in raised.traceback.splitlines() if line.startswith("  File")]
    assert [frame.rsplit(" ", 1)[1] for frame in frames] == ["train", "do"]
    assert isinstance(other, Fenced | PeerLost)


@pytest.mark.parametrize(
    ("script", "line", "said"),
    [
        ("raise SystemExit(4)\n", "raise SystemExit(4)", "exited with 4 before it called"),
        ("pass\n", "", "ended without calling everstep.run"),
    ],
    ids=["exits", "ends"],
)
def test_a_script_that_never_begins_to_train_gets_an_error_without_our_frames(
    run: Run, script: str, line: str, said: str
) -> None:
    """It has hundreds of lines to look for the mistake in already."""
    path = run.directory / "train.py"
    path.write_text(script)
    (left,) = run.train(of_script(path), num_workers=1)
    raised = left.outcome

    assert isinstance(raised, Raised)
    assert f"{path} {said}" in raised.error
    frames = re.findall(r'  File "(.*)", line \d+, in .*\n    (.*)', raised.traceback)
    assert frames == ([(str(path), line)] if line else [])
    assert raised.traceback.strip()


def test_twenty_attempts_leave_nothing_behind(run: Run, text: DataSettings) -> None:
    """DTensor's caches and reference cycles hold process groups, and those threads and sockets."""
    held = []
    for number in range(20):
        left = run.train(settings(text, steps=1), num_workers=2 - number % 2)[0]
        assert isinstance(left.outcome, Completed), left.outcome
        if number >= 3:
            held.append((left.num_fds, left.num_threads))

    assert max(held)[0] <= held[0][0] + 2
    assert max(threads for _, threads in held) <= held[0][1] + 2


def test_bf16_computes_beside_fp32_masters(run: Run, text: DataSettings) -> None:
    """The masters would stop moving if updates were rounded to bfloat16."""
    finish(run, settings(text, precision="bf16"), num_workers=2)
    half = [line["loss"] for line in lines(run)]
    reset(run)
    finish(run, settings(text), num_workers=2)
    full = [line["loss"] for line in lines(run)]

    assert half != full
    assert half == pytest.approx(full, abs=0.02)


def test_a_run_refuses_to_go_on_with_other_data(run: Run, text: DataSettings) -> None:
    """Another order would lose samples and show others twice, and nothing else would tell."""
    finish(run, settings(text, steps=1), num_workers=1)

    (left,) = run.train(settings(replace(text, seed=1), steps=2), num_workers=1, resume=(1, 1))

    assert isinstance(left.outcome, Raised)
    assert "Samples would be lost or seen twice" in left.outcome.error


def test_workers_with_different_data_are_refused_by_name_before_step_1(run: Run) -> None:
    """Each would take its own order: samples are lost, and the curve looks like any other."""
    path = run.directory / "train.py"
    path.write_text(
        "import torch\n"
        "from everstep import DataLoader, run\n"
        "def train(session):\n"
        "    model = session.model(lambda: torch.nn.Linear(1, 1))\n"
        "    session.optimizer(lambda named: torch.optim.SGD(named.values()))\n"
        "    data = DataLoader([torch.ones(1)] * (16 + session.rank))\n"
        "    for step in session.steps(data):\n"
        "        raise ValueError('a step has begun')\n"
        "run(train)\n"
    )
    chosen = of_script(path, steps=2, global_batch=4, micro_batch=2, warmup_steps=0)

    ends = run.train(chosen, num_workers=2)

    for rank, end in enumerate(ends):
        assert isinstance(end.outcome, Raised), end.outcome
        assert f"data: num_samples (rank {rank} has {16 + rank}); give" in end.outcome.error
