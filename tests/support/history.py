"""Judge a run from what it wrote: one line of history, every sample once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import RunConfig


@dataclass(frozen=True, slots=True)
class History:
    """The metric lines of a run in the order in which they were written."""

    lines: tuple[dict[str, Any], ...]

    def committed(self) -> list[dict[str, Any]]:
        """Return the line of each step that counts.

        The last one, as earlier ones were redone; but what an attempt writes after a later one
        wrote does not count: a process that was taken for dead may wake up.
        """
        by_step: dict[int, dict[str, Any]] = {}
        attempt = 0
        for line in self.lines:
            if line["attempt"] >= attempt:
                attempt = line["attempt"]
                by_step[line["step"]] = line
        return [by_step[step] for step in sorted(by_step)]

    def check_exactly_once(self, config: RunConfig) -> None:
        """Assert that steps form one line without a fork and no sample is lost or doubled."""
        attempts = [line["attempt"] for line in self.lines]
        assert attempts == sorted(attempts), "an older attempt wrote after a newer one"
        committed = self.committed()
        assert [line["step"] for line in committed] == list(range(1, config.train.steps + 1))
        batch = config.train.global_batch
        for line in committed:
            first = (line["step"] - 1) * batch
            assert (line["order_start"], line["order_stop"]) == (first, first + batch), line
            assert line["samples"] == batch, line


def read_history(directory: str) -> History:
    """Return the history in the run directory ``directory``."""
    text = (Path(directory) / "metrics/rank0.jsonl").read_text()
    # A worker that is killed while it writes leaves half a line.
    whole = (line for line in text.splitlines() if line.endswith("}"))
    return History(tuple(json.loads(line) for line in whole))
