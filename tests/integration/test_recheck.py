"""Silent data corruption, on real workers: one flips a bit, and all know which."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import finish, newest, of_script, reset, result
from tests.support.trainers import Run
from workers.protocol import Raised
from workers.settings import Settings

SCRIPT = str(Path(__file__).parents[1] / "support/train_corrupt.py")


def corrupt(*arguments: str, recheck: int = 3, **train: Any) -> Settings:
    chosen = {"steps": 9, "global_batch": 16, "micro_batch": 2, "deterministic": True, **train}
    return of_script(SCRIPT, *arguments, keep=2, recheck=recheck, **chosen)


@pytest.mark.parametrize("how", ["matmul", "bucket", "weight"])
def test_a_flipped_bit_is_found_at_the_next_check_on_the_right_rank(run: Run, how: str) -> None:
    """The mean gradient would take it to all ranks, and nothing would show it afterwards.

    The version of the last check before is left, however few are kept: the run goes back to it.
    """
    for left in run.train(corrupt(f"{how}:4:1:5:22"), num_workers=3):
        outcome = left.outcome
        assert isinstance(outcome, Raised), outcome
        assert (outcome.step, outcome.ranks, outcome.sound_step) == (6, (1,), 2), outcome.error
        assert outcome.error.startswith("CorruptError: step 6: ")
    run.lineage = (*run.lineage, (2, 2))
    assert newest(run)[0] == 2


def test_checks_change_no_bit_and_convict_no_rank(run: Run) -> None:
    """They compute with gradients that are dropped, for any number of workers: 5 have 8 parts."""
    digests = set()
    for recheck, num_workers in ((0, 1), (1, 2), (1, 3), (4, 5)):
        finish(run, corrupt(recheck=recheck, steps=12), num_workers=num_workers)
        digests.add(result(run)["weights_digest"])
        reset(run)

    assert len(digests) == 1


def test_neither_of_two_workers_is_blamed_where_only_a_third_could_tell(run: Run) -> None:
    """One of them is wrong, the same each time."""
    (left, _) = run.train(corrupt("matmul:4:1:5:22"), num_workers=2)

    assert isinstance(left.outcome, Raised)
    assert left.outcome.ranks == (0, 1)
    assert "with one more worker it is" in left.outcome.error


def test_kernels_whose_results_vary_convict_no_rank(run: Run) -> None:
    """A healthy machine would lose its node for a kernel that adds in any order."""
    finish(run, corrupt("varies:1:0:0:0"), num_workers=3)
