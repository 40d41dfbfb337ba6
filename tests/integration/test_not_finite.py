"""Updates that are not finite, on real workers: one rank has the number, and all decide alike."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import finish, lines, newest, of_script, reset, result
from tests.support.trainers import Run
from ucp_core.layout import ParallelLayout
from ucp_core.native import newest_finite
from ucp_core.storage import LocalStore
from workers.protocol import Completed, Raised
from workers.settings import NotFiniteSettings, Settings

SCRIPT = str(Path(__file__).parents[1] / "support/train_told.py")


def spoiled(*arguments: str, deterministic: bool = True, **chosen: Any) -> Settings:
    return of_script(
        SCRIPT, *arguments, steps=8, global_batch=8, micro_batch=2, deterministic=deterministic,
        warmup_steps=2, not_finite=NotFiniteSettings(**chosen),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["nan", "gradient"])
def test_any_number_of_workers_leaves_out_the_same_updates(run: Run, how: str) -> None:
    """One of them has the micro-batch. With 5 workers one has none at all.

    The one that has it, and all others, keep weights and optimizer as they were.
    """
    chosen = spoiled("1:inf", f"3-4:{how}")
    seen = set()
    for num_workers in (1, 2, 3, 5):
        finish(run, chosen, num_workers=num_workers)
        skipped = [line["step"] for line in lines(run) if line.get("skipped")]
        numbers = [(line["loss"], line["grad_norm"]) for line in lines(run)]
        seen.add((result(run)["weights_digest"], str(skipped), str(numbers)))
        reset(run)

    assert len(seen) == 1
    assert "[1, 3, 4]" in str(seen)


def test_so_do_the_stages_of_a_pipeline(run: Run) -> None:
    """Only the last one has a loss."""
    layout = ParallelLayout(dp_shard=2, pp=2)
    finish(run, spoiled("3:nan", deterministic=False), num_workers=4, layout=layout)
    found = [(line["step"], line["loss"] is None) for line in lines(run) if line.get("skipped")]

    assert found == [(3, True)]
    assert all(line["loss"] for line in lines(run)[3:])


SHARDED = ParallelLayout(dp_shard=3)
CUT = ParallelLayout(dp_shard=2, tp=2)
STAGES = ParallelLayout(dp_shard=2, pp=2)
COPIES = ParallelLayout(dp_replicate=2, dp_shard=2)


def test_micro_batch_and_ranks_are_named_that_had_it_first(run: Run) -> None:
    """Sums spread it to all ranks, a pipeline to its other stages, within the same step.

    Micro-batch 2 of 4 has it. Data that is not finite shows in what the first stage makes of it, a
    loss and its gradient on the last one.
    """
    loss, gradient = "the loss of micro-batch 2 of 4", "with a finite loss, of micro-batch 2 of 4"
    among = "with a finite loss, among micro-batches 1, 2 of 4"
    cases = (
        (SHARDED, "nan", (1,), loss),
        (SHARDED, "gradient", (1,), gradient),
        (CUT, "data", (0, 1), loss),
        (CUT, "gradient", (0, 1), among),
        (STAGES, "data", (0,), loss),
        (STAGES, "nan", (2,), loss),
        (STAGES, "gradient", (2,), among),
        (COPIES, "nan", (1,), loss),
        (COPIES, "gradient", (1,), gradient),
    )
    for layout, how, ranks, named in cases:
        one_order = layout in (SHARDED, CUT)
        chosen = spoiled(f"2:{how}", deterministic=one_order, action="stop")
        for left in run.train(chosen, num_workers=layout.world_size, layout=layout):
            assert isinstance(left.outcome, Raised)
            assert (left.outcome.step, left.outcome.ranks) == (2, ranks), left.outcome.error
            assert named in left.outcome.error
            place = " (positions 10 to 11 of the data order)"
            assert (place in left.outcome.error) == (named != among)
        reset(run)


def test_an_update_that_a_scaler_leaves_out_is_no_fault(run: Run) -> None:
    """It tries a smaller scale; a loss that is not finite is named all the same."""
    finish(run, spoiled("scaler", "2-3:gradient", action="stop"), num_workers=2)
    reset(run)

    (left, _) = run.train(spoiled("scaler", "2:nan", action="stop"), num_workers=2)

    assert isinstance(left.outcome, Raised)
    assert left.outcome.ranks == (0,)


def test_a_flipped_bit_of_a_copy_is_named_before_it_is_saved(run: Run) -> None:
    """With three copies the odd one is known; of two, one is wrong. Step 2 is the last version."""
    for layout, ranks, told in (
        (ParallelLayout(dp_replicate=3), (1,), "those of rank 1"),
        (COPIES, (1, 3), "rank 1, 3, of which one is wrong"),
    ):
        chosen = spoiled("3:flip:1", deterministic=False)

        for left in run.train(chosen, num_workers=layout.world_size, layout=layout):
            assert isinstance(left.outcome, Raised)
            assert (left.outcome.step, left.outcome.ranks) == (3, ranks), left.outcome.error
            assert f"copies of the weights differ, {told}: layers.0.weight. " in left.outcome.error
        assert newest(run)[0] == 2
        reset(run)


def test_a_row_of_them_goes_on_in_the_attempt_after_a_death(run: Run) -> None:
    """Otherwise a run whose workers die in it would restart its count, and never end."""
    chosen = spoiled("4-8:nan")
    members = run.begin(chosen, num_workers=3)
    lefts = [trainer.left().outcome for trainer in members]
    again = [left.outcome for left in run.train(chosen, num_workers=2, resume=(4, 1))]

    for outcome in (*lefts, *again):
        assert isinstance(outcome, Raised)
        assert (
            "NotFiniteError: step 6 is not finite: the loss of micro-batch 2 of 4" in outcome.error
        )
        assert "The last finite step is 3 " in outcome.error
    assert newest(run) == (5, 2)


def test_weights_that_an_update_of_finite_numbers_broke_are_found_out(run: Run) -> None:
    """Step 4 says nothing; its weights are NaN. Step 3 is the newest finite one."""
    lefts = run.train(spoiled("4:weights"), num_workers=2)

    for left in lefts:
        assert isinstance(left.outcome, Raised)
        assert "step 7 is not finite: " in left.outcome.error
        assert "run.resume_from=finite" in left.outcome.error
    checkpoints = f"{run.directory}/checkpoints"
    assert newest_finite(LocalStore(), checkpoints, lineage=run.lineage) == (6, 3)
    # Back to it, as the controller would go.
    run.lineage = (*run.lineage, (2, 3))
    outcomes = [left.outcome for left in run.train(spoiled(), num_workers=2, resume=(3, 1))]
    assert outcomes == [Completed(attempt=3, step=8)] * 2
