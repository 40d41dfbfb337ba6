"""``python -m tests.simulation.rewrite``: write the machine's answers into the scenarios again."""

from pathlib import Path

from tests.simulation.scenario import answer

SCENARIOS = Path(__file__).parent / "scenarios"

if __name__ == "__main__":
    for path in sorted(SCENARIOS.glob("*.txt")):
        path.write_text(answer(path.read_text()))
