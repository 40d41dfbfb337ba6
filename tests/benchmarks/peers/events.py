"""Records the events of all arms' processes: JSON lines, in one file per process.

Every line has ``time`` (wall clock), ``pid``, ``node`` and ``event``:

=============  ======================================================================
``start``      the process begins to train behind ``step``, as one of ``world`` in ``group``
``samples``    it computes these ``samples`` for ``step`` of ``group``
``committed``  the weights have the update of ``step`` of ``group``, in which ``world`` shared
``weights``    these are the ``weights`` behind ``step`` of ``group``
``end``        it has done all steps
=============  ======================================================================

The injector adds lines with node "outside": ``run``, ``launch``, ``fault``, ``harmed`` once all
of it has come, ``helped`` if the job did not go on by itself, and ``over``.
Needs Python's own library only.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

#: In the job's directory: the number of the last step, once that is decided.
LAST: Final = "last_step"
#: One line.
Event: TypeAlias = dict[str, Any]


class Log:
    """The file of this process, in the folder that the injector names."""

    def __init__(self) -> None:
        #: Where the job may store checkpoints.
        self.directory = Path(os.environ["PEERS_DIRECTORY"])
        self._node, self._pid = os.environ["PEERS_NODE"], os.getpid()
        path = self.directory / "events" / f"{self._node}-{self._pid}.jsonl"
        self._file = path.open("a", buffering=1)
        self._group: dict[str, Any] = {}

    def start(self, *, step: int, rank: int, world: int, group: str) -> None:
        """Put on record that this process trains from now on."""
        self._group = {"group": group, "world": world, "rank": rank}
        self._write("start", step=step)

    def samples(self, step: int, samples: Iterable[int]) -> None:
        """Put on record what this process computes for a step."""
        self._write("samples", step=step, samples=[int(one) for one in samples])

    def committed(self, step: int, loss: float) -> None:
        """Put on record that a step is in the weights."""
        self._write("committed", step=step, loss=round(loss, 6))

    def weights(self, step: int, weights: dict[str, Any]) -> None:
        """Put on record, by one rank, what ``trainer.probe`` returned."""
        if self._group["rank"] == 0:
            self._write("weights", step=step, weights=weights)

    def is_over(self, step: int) -> bool:
        """Return whether ``step`` is the last one, and put that on record.

        The injector names a step that is far enough ahead for all processes to learn of it.
        """
        try:
            is_over = step >= int((self.directory / LAST).read_text())
        except FileNotFoundError:
            return False
        if is_over:
            self._write("end", step=step)
        return is_over

    def _write(self, event: str, **more: Any) -> None:
        line = {"time": time.time(), "pid": self._pid, "node": self._node, "event": event}
        self._file.write(json.dumps({**line, **self._group, **more}) + "\n")


def read(folder: Path) -> list[Event]:
    """Return the lines of all processes so far by time; one that is being written is left out."""
    found: list[Event] = []
    for path in folder.glob("*.jsonl"):
        text = path.read_text()
        found += map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return sorted(found, key=lambda line: float(line["time"]))


class Follower:
    """Reads the lines of a folder as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._lines: list[Event] = []

    def lines(self, since_s: float = 0.0) -> list[Event]:
        """Return all lines behind ``since_s`` so far, in no order; only what is new is read."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._lines += map(json.loads, whole.splitlines())
        return [line for line in self._lines if line["time"] > since_s]


class Outside:
    """The injector's own lines."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "outside.jsonl").open("a", buffering=1)

    def write(self, event: str, **more: Any) -> None:
        """Put on record what comes from outside of the job."""
        line = {"time": time.time(), "pid": os.getpid(), "node": "outside", "event": event}
        self._file.write(json.dumps({**line, **more}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
