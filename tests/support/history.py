"""Judge a run from what it wrote: one line of history, every sample once."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.core.state import worker_name
from orchestrator.report import read_run
from ucp_core.storage import join, open_store, read_appended
from workers.protocol import METRICS

#: Once so many snapshots were skipped the next is taken, though peers lack the one before.
_SKIPPED_MIN = 8


@dataclass(frozen=True, slots=True)
class History:
    """The metric lines of a run in the order in which they were written."""

    lines: tuple[dict[str, Any], ...]

    def committed(self) -> list[dict[str, Any]]:
        """Return the line of each step that counts.

        The last one, as earlier ones were redone, or lost if the run was stopped before that; but
        what an attempt writes after a later one wrote does not count: a process that was taken
        for dead may wake up.
        """
        by_step: dict[int, dict[str, Any]] = {}
        attempt = 0
        for line in self.lines:
            if line["attempt"] > attempt:
                by_step = {step: one for step, one in by_step.items() if step < line["step"]}
            if line["attempt"] >= attempt:
                attempt = line["attempt"]
                by_step[line["step"]] = line
        return [by_step[step] for step in sorted(by_step)]

    def check_exactly_once(self, config: RunConfig, num_steps: int | None = None) -> None:
        """Assert that steps form one line without a fork and no sample is lost or doubled.

        ``num_steps`` is where the run was stopped, if it was.
        """
        attempts = [line["attempt"] for line in self.lines]
        assert attempts == sorted(attempts), f"an older attempt wrote after a newer one: {attempts}"
        committed = self.committed()
        assert [line["step"] for line in committed] == list(
            range(1, (num_steps or config.train.steps) + 1)
        )
        batch = config.train.global_batch
        for line in committed:
            first = (line["step"] - 1) * batch
            assert (line["order_start"], line["order_stop"]) == (first, first + batch), line
            assert line["samples"] == batch, line

    def num_redone(self, attempt: int) -> int:
        """Return how many steps of ``attempt`` have another line of a later one."""
        done = max((line["step"] for line in self.lines if line["attempt"] == attempt), default=0)
        first = next((line["step"] for line in self.lines if line["attempt"] > attempt), done + 1)
        return max(done - first + 1, 0)

    def protected_step(self, attempt: int, *, from_node_loss: bool) -> int:
        """Return the step that ``attempt`` could have lost nothing before; 0 if it is not told.

        Ranks take a snapshot once all of them have the one before; and once their peers have it
        too, or so many were skipped that they wait for those no longer.
        """
        lines = [line for line in self.lines if line["attempt"] == attempt]
        taken = [number for number, line in enumerate(lines) if line["snapshot"] == "taken"]
        whole = [
            lines[one]["step"]
            for one, other in itertools.pairwise(taken)
            if not from_node_loss or other - one <= _SKIPPED_MIN
        ]
        return max(whole, default=0)


def read_history(directory: str) -> History:
    """Return the history in the run directory ``directory``."""
    store, path = open_store(directory)
    text = read_appended(store, join(path, METRICS)).decode()
    # A worker that is killed while it writes leaves half a line.
    # In an object store, who resumes writes lines again that may be there.
    whole = dict.fromkeys(line for line in text.splitlines() if line.endswith("}"))
    return History(tuple(json.loads(line) for line in whole))


def check_lost_steps(
    directory: str, incident: Mapping[str, Any], *, from_node_loss: bool = True
) -> None:
    """Assert that an incident counts all steps that were redone, and that none was protected.

    Args:
        directory: Directory of the run.
        incident: The incident in its summary; it left the process of rank 0 alive.
        from_node_loss: Whether memory of a node was lost, and not just a trainer.
    """
    history, attempt = read_history(directory), incident["attempt"]
    num_redone = history.num_redone(attempt)
    after = next((line["step"] for line in history.lines if line["attempt"] > attempt), None)
    protected_step = history.protected_step(attempt, from_node_loss=from_node_loss)
    assert after is None or after > protected_step, incident
    # Rank 0 may have been killed, as it did not leave in time: then it is uncertain.
    if _first_rank_left(directory, attempt):
        assert incident["lost_steps"] >= num_redone, incident


def _first_rank_left(directory: str, attempt: int) -> bool:
    """Return whether rank 0 of ``attempt`` left; False if a fault came before the first start."""
    records = [each for each in read_run(directory).journal if each["attempt"] == attempt]
    starts = [each for each in records if each["kind"] == "StartAttempt"]
    first = {worker_name(each["placed"][0][1][0]) for each in starts}
    left = [each for each in records if each["kind"] in ("WorkerLeft", "WorkerRaised")]
    return any(first & {each["worker"], *each.get("others", ())} for each in left)
