"""Workers that read other samples than others, or than before, are refused before they train."""

from pathlib import Path

import pytest

from tests.support.attempts import of_script
from tests.support.trainers import Run
from workers.protocol import Completed, Outcome, Raised

SCRIPT = Path(__file__).parents[1] / "support/train_samples.py"


def trained(
    directory: Path, *arguments: str, steps: int = 3, num_workers: int = 2, behind: int = 0
) -> Outcome:
    """Run the script in new processes, behind a step of the first attempt; return rank 0's end."""
    other = str(directory / "other")
    settings = of_script(SCRIPT, *arguments, other, steps=steps, global_batch=16, micro_batch=2)
    with Run(directory, lineage=((1, 0),) if behind else ()) as run:
        resume = (behind, 1 if behind else 0)
        return run.train(settings, num_workers=num_workers, resume=resume)[0].outcome


@pytest.mark.parametrize("how", ["index", "loader"])
def test_workers_with_other_orders_are_refused_by_name(how: str, tmp_path: Path) -> None:
    """188 of 256 samples were seen in an epoch, and the run ended well."""
    found = trained(tmp_path, how, "order")

    assert isinstance(found, Raised)
    assert found.step == 1
    assert "the workers have different training data" in found.error
    named = "for the indices" if how == "index" else "sample 0 of the data is"
    assert named in found.error
    assert " on rank 0 (node " in found.error
    assert " on rank 1 (node " in found.error
    assert "sort it" in found.error


@pytest.mark.parametrize("how", ["index", "loader"])
@pytest.mark.parametrize("wrong", ["nothing", "chance"])
def test_rounding_and_chance_convict_no_machine(how: str, wrong: str, tmp_path: Path) -> None:
    """Nodes may have other processors; and what is not the same twice says nothing of files."""
    assert isinstance(trained(tmp_path, how, wrong), Completed)
    again = trained(tmp_path, how, wrong, steps=6, num_workers=3, behind=3)
    assert isinstance(again, Completed)
    assert again.step == 6


@pytest.mark.parametrize(("how", "step"), [("index", 4), ("loader", 10)])
def test_data_that_differs_later_is_found_now_and_then(how: str, step: int, tmp_path: Path) -> None:
    """The first step alone was compared."""
    found = trained(tmp_path, how, "later", steps=12)

    assert isinstance(found, Raised)
    assert found.step == step
    assert found.error.startswith("DataDiffersError: the workers have different training data")


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("index", "what the model gets for the indices 0, 85 is"),
        ("loader", "sample 0 of the data is"),
    ],
)
def test_other_content_of_the_same_length_after_a_resume_is_refused(
    how: str, named: str, tmp_path: Path
) -> None:
    """The length was all that was compared."""
    assert isinstance(trained(tmp_path, how, "content", num_workers=1), Completed)
    (tmp_path / "other").touch()
    found = trained(tmp_path, how, "content", steps=6, behind=3)

    assert isinstance(found, Raised)
    assert f"the data changed since the checkpoint of step 3: {named}" in found.error
    assert "run.init_from" in found.error
    assert "digest=" in found.error
    (tmp_path / "other").unlink()
    assert isinstance(trained(tmp_path, how, "content", steps=6, behind=3), Completed)


def test_inputs_that_change_with_the_steps_are_no_other_data_after_a_resume(
    tmp_path: Path,
) -> None:
    """A script may lengthen its sequences: a fault behind that must not end the run."""
    assert isinstance(trained(tmp_path, "index", "curriculum", steps=5), Completed)
    again = trained(tmp_path, "index", "curriculum", steps=8, behind=5)
    assert isinstance(again, Completed)
