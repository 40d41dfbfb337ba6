import pytest

from tests.simulation.rewrite import SCENARIOS
from tests.simulation.scenario import answer


@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.txt")))
def test_the_machine_answers_as_written(name: str) -> None:
    """Each file is one history that went wrong once, or that a reader should know.

    After a change that is meant: ``python -m tests.simulation.rewrite``, and read the diff.
    """
    text = (SCENARIOS / f"{name}.txt").read_text()

    assert answer(text) == text


def test_a_scenario_with_a_mistake_names_its_line() -> None:
    """The files are written by hand."""
    with pytest.raises(ValueError, match="line 2"):
        answer("rules(min_workers=1, max_workers=1, total_steps=9)\n0.0 NodeJoined(nod='a')\n")
    with pytest.raises(ValueError, match="rules"):
        answer("0.0 NodeJoined(node='a')\n")
