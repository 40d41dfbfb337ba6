"""The table of phases, as ``orchestrator/DESIGN.md`` shows it.

Write it there with ``python -m tests.support.phase_table``.
"""

import inspect
from pathlib import Path

from orchestrator.core.phase_table import TABLE
from orchestrator.core.state import EDGES, TERMINAL, Phase

DESIGN = Path(__file__).parents[2] / "orchestrator" / "DESIGN.md"
BEGIN, END = "<!-- phase table -->\n", "<!-- end of the phase table -->\n"

_COLUMNS = [phase for phase in Phase if phase not in TERMINAL]


def markdown() -> str:
    """Return the table, what follows each phase, and the first line of each handler."""
    lines = [
        "| | " + " | ".join(phase.upper() for phase in _COLUMNS) + " |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    handlers = {}
    for kind, row in TABLE.items():
        cells = []
        for phase in _COLUMNS:
            handler = row.get(phase)
            cells.append("" if handler is None else handler.__name__)
            if handler is not None:
                handlers[handler.__name__] = handler
        lines.append(f"| `{kind.__name__}` | " + " | ".join(_merged(cells)) + " |")
    lines += ["", "The successors of each phase:", ""]
    for phase in _COLUMNS:
        after = ", ".join(other.upper() for other in Phase if other in EDGES[phase])
        lines.append(f"- {phase.upper()}: {after}")
    lines += ["", "The work of each handler:", ""]
    for name, handler in sorted(handlers.items()):
        first = (inspect.getdoc(handler) or "").partition("\n\n")[0].replace("\n", " ")
        room = handler.__module__.rpartition(".")[2]
        lines.append(f"- `{room}.{name}`: {first}")
    return "\n".join(lines) + "\n"


def _merged(cells: list[str]) -> list[str]:
    """Return the cells with one mark where all phases have the same handler."""
    if len(set(cells)) == 1:
        return [cells[0], *['"'] * (len(cells) - 1)]
    return cells


def written() -> str:
    """Return the part of the document that shows the table."""
    return DESIGN.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = DESIGN.read_text(encoding="utf-8").partition(BEGIN)
    DESIGN.write_text(before + BEGIN + markdown() + END + rest.partition(END)[2], encoding="utf-8")
