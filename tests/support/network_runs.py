"""Runs on a cluster of machines, begun by ``everstep run`` and judged by what they write."""

import json
import operator
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tests.support import metadata_server, train_paced
from tests.support.forking import run_script
from tests.support.metadata_server import AWS_ACTION, say
from tests.support.network_cluster import HEAD, NetworkCluster

T = TypeVar("T")

_LOOK_S = 0.1
_METADATA_PORT = "8169"
#: A run starts, or is whole again, within this: Ray notices some losses after a minute.
_ACT_S_MAX = 240.0


def digest_alone(folder: Path, steps: int) -> str:
    """Return what the weights of the same training in one process are after so many steps."""
    run_script(Path(train_paced.__file__), folder, "0.0", str(steps))
    return str(json.loads((folder / "run/result.json").read_text())["weights_digest"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effects of a fault on a run, in seconds since the fault."""

    detected_s: float | None  #: Until the attempt was fenced; None for a change that was planned.
    resumed_s: float  #: Until the beginning of the first step of a later attempt.
    step_s: float  #: Until the end of the first step of a later attempt.
    lost_steps: int  #: Completed steps that were redone.
    named: tuple[int, ...]  #: The machines that were held responsible.
    kinds: tuple[str, ...]  #: Kinds of the incidents.
    evidence: str  #: Evidence of the last of them.


@dataclass
class _Lines:
    """The JSON lines of the files in a folder, read as they are written."""

    folder: Path
    found: list[dict[str, Any]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> list[dict[str, Any]]:
        """Return all lines so far."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.found += [json.loads(line) for line in whole.splitlines()]
        return self.found


class NetworkRun:
    """One run whose directory all machines share.

    Args:
        cluster: Where it is begun.
        directory: Directory of the run, which may be there already.
        pace_s: How long a step takes with four workers.
        has_metadata: Whether the machines have a metadata service; ``announce`` speaks for it.
        settings: Further ones, as on the command line.
        on: The machine on which the command runs that begins it.
        as_job: Whether that command is ``ray job submit``. Ray brings no file along that
            ``.gitignore`` names, so a run of ``mine.yaml`` is refused before.
    """

    def __init__(
        self,
        cluster: NetworkCluster,
        directory: Path,
        *settings: str,
        pace_s: float = 0.2,
        has_metadata: bool = False,
        on: int = HEAD,
        as_job: bool = False,
    ) -> None:
        self.cluster = cluster
        self.directory = directory
        self._metrics = _Lines(directory / "metrics")
        self._journal = _Lines(directory / "journal")
        self._log = directory.with_suffix(".log")
        words = [
            f"run.directory={directory}", f"run.script={train_paced.__file__}",
            f"run.arguments=['{pace_s}']", "workers.min=2", "workers.max=4",
            "workers.standby_per_node=0", "train.steps=1000000", "train.schedule=constant",
            f"notices.cloud={'aws' if has_metadata else 'none'}",
            f"notices.endpoint=http://{cluster.host(HEAD)}:{_METADATA_PORT}",
            *settings,
        ]  # fmt: skip
        command = ["everstep", "run", "local/small", *words]
        if as_job:
            (project := directory.with_suffix(".project")).mkdir(parents=True)
            for name, text in ((".gitignore", "mine.yaml\n"), ("mine.yaml", "run: {}\n")):
                (project / name).write_text(text)
            submit = ["ray", "job", "submit", "--address", cluster.jobs]
            words = ["sh", "-c", f"everstep run mine.yaml; {shlex.join(command)}"]
            command = [*submit, "--working-dir", str(project), "--", *words]
        else:
            command += ["--address", cluster.address]
        self._said = directory.with_suffix(".metadata")
        if has_metadata:
            place = [str(self._said), cluster.host(HEAD), _METADATA_PORT]
            cluster.start(HEAD, [sys.executable, metadata_server.__file__, *place], self._log)
        self.driver = cluster.start(on, command, self._log)

    def announce(self, machine: int, taken_s: float | None) -> None:
        """Have a machine's metadata service say when it is taken; None takes that back."""
        said = None
        if taken_s is not None:
            when = datetime.fromtimestamp(taken_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            said = json.dumps({"action": "terminate", "time": when})
        say(self._said, AWS_ACTION, said, self.cluster.host(machine))

    def said(self) -> str:
        """Return what the command printed that begins the run."""
        return self._log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics so far, in the order in which they were written."""
        return self._metrics.look()

    def journal(self) -> list[dict[str, Any]]:
        """Return the records of the journal so far."""
        return self._journal.look()

    def summary(self) -> dict[str, Any]:
        """Return the run's summary, empty before it is over."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait(self, what: str, found: Callable[[], T | None], timeout_s: float = _ACT_S_MAX) -> T:
        """Return what ``found`` returns once that is not None."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            # Ids of nodes that live briefly are noted too.
            self.cluster.nodes()
            answer = found()
            if answer is not None:
                return answer
            if self.summary():
                break
            time.sleep(_LOOK_S)
        raise TimeoutError(f"not seen: {what}; {self._what_happened()}")

    def settle(self, workers: int = 4, steps: int = 5, *, or_more: bool = False) -> dict[str, Any]:
        """Wait until ``workers`` have trained together for ``steps``; return the last line."""
        enough = operator.ge if or_more else operator.eq

        def last() -> dict[str, Any] | None:
            same = self.lines()[-steps:]
            if len(same) < steps or not all(enough(one["num_workers"], workers) for one in same):
                return None
            return same[-1] if same[-1]["attempt"] == same[0]["attempt"] else None

        return self.wait(f"{steps} steps of {workers} workers", last)

    def nodes(self) -> list[str]:
        """Return Ray's id of the node of each rank of the newest attempt."""
        started = [record for record in self.journal() if record["kind"] == "StartAttempt"]
        return [node for node, workers, _ in started[-1]["placed"] for _ in workers]

    def ranks(self) -> list[int]:
        """Return the machine of each rank of the newest attempt."""
        nodes = self.cluster.nodes()
        return [nodes[node] for node in self.nodes()]

    def outcome(self, fault_s: float, attempt: int, timeout_s: float = _ACT_S_MAX) -> Outcome:
        """Wait for the first step of an attempt after ``attempt``; return what came of a fault.

        Args:
            fault_s: When it was made, as ``time.time()``.
            attempt: That trained then.
            timeout_s: How long to wait.
        """
        line = self.first(lambda one: one["attempt"] > attempt, timeout_s)
        records = [record for record in self.journal() if record["wall_time"] > fault_s]
        fenced = [r["wall_time"] for r in records if r["kind"] == "FenceAttempt"]
        reports = [r for r in records if r["kind"] == "ReportIncident"]
        old = max(one["step"] for one in self.lines() if one["attempt"] <= attempt)
        return Outcome(
            detected_s=round(min(fenced) - fault_s, 2) if fenced else None,
            resumed_s=round(line["wall_time"] - line["step_s"] - fault_s, 2),
            step_s=round(line["wall_time"] - fault_s, 2),
            lost_steps=old - line["step"] + 1,
            named=self.machines_of(w for report in reports for w in report["guilty"]),
            kinds=tuple(report["incident"] for report in reports),
            evidence=reports[-1]["evidence"] if reports else "",
        )

    def first(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> Any:
        """Wait for the first line of metrics that meets ``condition``; return it."""
        return self.wait(
            "such a step", lambda: next((x for x in self.lines() if condition(x)), None), timeout_s
        )

    def whole_again(self, since_s: float, workers: int = 4, timeout_s: float = _ACT_S_MAX) -> float:
        """Wait until ``workers`` have made a step after ``since_s``; return how long that took."""
        line = self.first(
            lambda x: x["wall_time"] > since_s and x["num_workers"] == workers, timeout_s
        )
        return round(float(line["wall_time"]) - since_s, 1)

    def machines_of(self, workers: Any) -> tuple[int, ...]:
        """Return the machines that ``workers`` were on."""
        nodes = self.cluster.nodes()
        at = {r["worker"]: r["node"] for r in self.journal() if r["kind"] == "WorkerReady"}
        return tuple(sorted({nodes[at[worker]] for worker in workers if worker in at}))

    def finish(self, timeout_s: float = _ACT_S_MAX) -> dict[str, Any]:
        """Wait for the end of the run; return its summary."""
        deadline_s = time.monotonic() + timeout_s
        while not self.summary() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self.summary()

    def stop(self) -> dict[str, Any]:
        """Stop the run as a user does; return its summary."""
        self.cluster.run(HEAD, ["everstep", "stop", str(self.directory)], timeout_s=120)
        return self.finish()

    def _what_happened(self) -> str:
        steps = [(x["attempt"], x["step"], x["num_workers"]) for x in self.lines()[-3:]]
        kinds = [json.dumps(record)[:300] for record in self.journal()[-12:]]
        last = f"the command said: {self.said()[-2000:]}"
        return "\n".join([f"last steps {steps}", *kinds, last])
