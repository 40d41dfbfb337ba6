"""Read a run directory: journal, metrics, incidents, summary.

It may be read during the run: a missing file counts as empty, and an incomplete last line is
skipped. ``orchestrator.shell`` writes these files.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import isfinite, nan
from typing import Any, Self, TypeAlias

from orchestrator.core import Incident, RunStats, without_late_lines
from orchestrator.errors import JournalCorruptError, RunNotFoundError
from ucp_core.errors import StorageError
from ucp_core.storage import (
    Store,
    appended_sizes,
    join,
    open_store,
    read_all_appended,
    read_appended,
)
from workers.protocol import LOGS, METRICS, VALIDATION, VALUES

#: The run's resolved settings at its last start or resume.
CONFIG = "config.yaml"
#: The settings of each start and resume, under the number of the controller's incarnation.
SETTINGS = "settings"
#: A request must carry the content of this file to change the run.
TOKEN = "token"  # noqa: S105  the name of its file
#: How to reach the controller; each incarnation writes it.
CONTACT = "controller.json"
#: The journal folded up to some record, so that a restarted controller reads only the rest.
COMPACTED = "compacted.json"
#: The journal: a segment for each incarnation of the controller, a line of JSON for each record.
JOURNAL = "journal"
#: For TensorBoard, Weights & Biases and MLflow: the last step and the service's id of the run.
LOGGERS = "loggers.json"
#: Written last: if it exists, the run is over.
SUMMARY = "summary.json"
#: Pattern of a log's name, such as ``rank1.log``, or ``rank1-3.log`` for the third piece if storage
#: cannot append.
_LOG = "rank{rank}(?:-(\\d+))?\\.log"
#: Size of the parts in which a file of metrics is read.
_PART_BYTES = 8 << 20
#: More points are not visible: about two per pixel column.
POINTS_MAX = 800
#: Points of further curves, and the largest number of curves of a script's own numbers.
_FURTHER_MAX, _OWN_MAX = 300, 12
#: The numbers of a step's line that a page draws, by key: the title of the chart, and the unit.
_OF_STEP = {
    "loss": ("", 1.0),
    "lr": ("Learning rate", 1.0),
    "grad_norm": ("Gradient norm", 1.0),
    "step_s": ("Step time, s", 1.0),
    "device_bytes": ("Memory of the fullest device, GiB", 2.0**30),
}

#: ``(x, y)`` in the units of the axes.
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step, as rank 0 wrote it."""

    step: int  #: Optimizer step, from 1.
    attempt: int  #: The attempt that computed it.
    loss: float  #: Mean over the tokens of the global batch; nan if it was not a number.
    grad_norm: float  #: Before clipping; nan if it was not a number.
    learning_rate: float
    tokens: int  #: Tokens that carry loss.
    samples: int
    first_sample: int  #: Index of its first sample in the order of all samples.
    step_s: float  #: Duration.
    num_workers: int  #: Workers that computed it.
    layout: str  #: Their layout, for people.


def thin(points: Iterable[Point], count_max: int = POINTS_MAX) -> list[Point]:
    """Return at most about ``count_max`` points, which ascend in x; keep the extremes.

    A stride would hide the spike of a single step, which readers of a loss curve look for. Numbers
    that are not finite are dropped, because JSON has none.
    """
    finite = [point for point in points if isfinite(point[1])]
    if len(finite) <= count_max:
        return finite
    begin, width = finite[0][0], 2.0 * (finite[-1][0] - finite[0][0]) / count_max
    kept: list[Point] = []
    for _, bucket in groupby(finite, key=lambda point: int((point[0] - begin) / width)):
        stretch = list(bucket)
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


class Curve:
    """Numbers by step, from lines of metrics; ``last`` is the last line that was added.

    If a step was redone, its last line counts. Points are thinned to as many as are visible.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, dict[int, float]] = {}
        self._attempt = 0
        self.last: Mapping[str, Any] = {}

    def add(self, text: str) -> None:
        """Add whole lines."""
        for attempt, step, document in _counted(text, self._attempt):
            if attempt > self._attempt:
                self._attempt = attempt
                for name, known in self._by_name.items():
                    self._by_name[name] = {n: number for n, number in known.items() if n < step}
            values = document.get("values") or document
            for name in _OF_STEP if values is document else values:
                if name in values:
                    self._by_name.setdefault(name, {})[step] = _number(values, name)
            self.last = document

        for name, known in self._by_name.items():
            if len(known) > 2 * POINTS_MAX:
                self._by_name[name] = {int(n): number for n, number in thin(self.points(name))}

    def names(self) -> list[str]:
        """Return the names of all numbers, in order."""
        return sorted(self._by_name)

    def points(self, name: str = "loss") -> list[Point]:
        """Return ``(step, number)`` in order."""
        known = self._by_name.get(name, {})
        return [(float(step), known[step]) for step in sorted(known)]


class Curves:
    """Losses and further numbers of a run by step, from its growing files of lines.

    ``begin`` is the byte of each file to begin at; a negative one counts from its end.

    Attributes:
        loss: Training loss, with as many points as are visible.
        validation: Validation loss, likewise.
        further: The run's other numbers and the script's own ones, by title.
        last: The last line of a step.
    """

    def __init__(self, store: Store, path: str, begin: int = 0) -> None:
        self._curves = {
            Tail(store, join(path, name), begin): Curve() for name in (METRICS, VALIDATION, VALUES)
        }
        self.loss: list[Point] = []
        self.validation: list[Point] = []
        self.further: dict[str, list[Point]] = {}
        self.last: Mapping[str, Any] = {}

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of the last step; 0 if the script counts only samples."""
        tokens = int(self.last.get("tokens") or 0)
        return 0 if tokens == self.last.get("samples") else tokens

    def read(self) -> Self:
        """Read what is new, from any thread: other threads see all of it or none."""
        for tail, curve in self._curves.items():
            for lines in tail.new():
                curve.add(lines)
        training, validation, values = self._curves.values()
        found = {
            title: [(step, number / unit) for step, number in training.points(name)]
            for name, (title, unit) in _OF_STEP.items()
            if title
        }
        found |= {name: values.points(name) for name in values.names()[:_OWN_MAX]}
        self.last = training.last
        self.loss, self.validation = training.points(), validation.points()
        self.further = {title: thin(each, _FURTHER_MAX) for title, each in found.items() if each}
        return self


class Tail:
    """Reads each line of a growing file once.

    ``at_bytes`` is where the next line begins; a negative number counts from the end of the file.
    """

    def __init__(self, store: Store, path: str, at_bytes: int = 0) -> None:
        self._store, self._path, self.at_bytes = store, path, at_bytes

    def new(self) -> Iterator[str]:
        """Yield the new complete lines, in texts of some megabytes."""
        if self.at_bytes < 0:
            folder, _, name = self._path.rpartition("/")
            size_bytes = appended_sizes(self._store, folder).get(name, 0)
            self.at_bytes = max(0, size_bytes + self.at_bytes)
        is_more = True
        while is_more:
            try:
                part = read_appended(self._store, self._path, self.at_bytes, _PART_BYTES)
            except StorageError as error:
                if not error.facts.get("missing"):
                    raise
                return
            whole = part[: part.rfind(b"\n") + 1]
            self.at_bytes += len(whole)
            is_more = len(part) == _PART_BYTES and bool(whole)
            if whole:
                yield whole.decode(errors="replace")


class RunRecord:
    """The content of a run directory, a path or an fsspec URL; each part is read on first use.

    ``stats`` and ``summary`` are given by a caller that has them already.
    """

    def __init__(
        self,
        url: str,
        *,
        stats: RunStats | None = None,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.name = url.rstrip("/").rsplit("/", 1)[-1]
        self._store, self._path = open_store(url)
        if stats is not None:
            self.stats = stats
        if summary is not None:
            self.summary = summary

    @cached_property
    def config_text(self) -> str:
        """Return the resolved configuration as YAML."""
        return _text(self._store, join(self._path, CONFIG))

    @cached_property
    def journal(self) -> tuple[Mapping[str, Any], ...]:
        """Return one mapping per record, oldest first."""
        return tuple(_journal(self._store, join(self._path, JOURNAL)))

    @cached_property
    def stats(self) -> RunStats:
        """Return the folded journal; even for a long one this needs little memory."""
        stats = RunStats()
        for record in _journal(self._store, join(self._path, JOURNAL)):
            stats.add(record)
        return stats

    @cached_property
    def steps(self) -> tuple[StepRecord, ...]:
        """Return the steps in order; for a redone step, the last record."""
        return _steps(appended_text(self._store, join(self._path, METRICS)))

    @cached_property
    def curves(self) -> Curves:
        """Return the run's numbers by step, thinned."""
        return Curves(self._store, self._path).read()

    @cached_property
    def incidents(self) -> tuple[Incident, ...]:
        """Return the final incidents, by number."""
        return tuple(_incidents(self._store, join(self._path, "incidents")))

    @property
    def all_incidents(self) -> tuple[Incident, ...]:
        """Return all incidents, including those that are still open."""
        found = {one.number: one for one in (*self.stats.incidents, *self.incidents)}
        return tuple(found[number] for number in sorted(found))

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Return ``summary.json``; empty before the run is over."""
        return _object(_text(self._store, join(self._path, SUMMARY)))

    def is_run(self) -> bool:
        """Return whether a controller led the run; a script that ran alone leaves only steps."""
        folder = join(self._path, JOURNAL)
        return bool(self.config_text or self._store.sizes(folder))


def read_run(url: str) -> RunRecord:
    """Return the run whose directory is at ``url``.

    Raises:
        RunNotFoundError: There is no run at ``url``.
        JournalCorruptError: A line of the journal that is not the last of its segment is damaged.
    """
    run = RunRecord(url)
    if not (run.journal or run.config_text or run.summary or run.steps):
        raise no_run(url)
    return run


def no_run(url: str) -> RunNotFoundError:
    """Return the error for a directory without a run, with a hint how to find one."""
    return RunNotFoundError(
        f"{url} holds no run: neither config.yaml nor a journal is there; "
        "name the folder that `everstep run` printed as its run directory",
        url=url,
    )


def _text(store: Store, path: str) -> str:
    return store.read(path).decode(errors="replace") if store.exists(path) else ""


def appended_text(store: Store, path: str) -> str:
    """Return the text of a file of lines; "" if it does not exist."""
    try:
        return read_appended(store, path).decode(errors="replace")
    except StorageError as error:
        if not error.facts.get("missing"):
            raise
        return ""


def _object(text: str) -> dict[str, Any]:
    return json_object(text) or {}


def json_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if it holds none, as a line that is cut short."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _journal(store: Store, directory: str) -> Iterator[dict[str, Any]]:
    found = read_all_appended(store, directory)
    segments = without_late_lines([found[name] for name in sorted(found)])
    for name, text in zip(sorted(found), segments, strict=True):
        lines = text.decode(errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            record = json_object(line)
            if record is not None:
                yield record
            elif number < len(lines):
                raise JournalCorruptError(
                    f"journal/{name}:{number} is not a JSON object; "
                    "restore the file or move it away to read the rest",
                    path=f"journal/{name}",
                    line=number,
                )


def log_tail(store: Store, path: str, *, attempt: int, rank: int, size_bytes: int = 16384) -> str:
    """Return the end of what a rank printed in an attempt; "" if it printed nothing.

    Attempt 0 is the newest one in which the rank printed something. The end has at most
    ``size_bytes``; its first line may be incomplete.
    """
    root = join(path, LOGS)
    names = [f"attempt-{attempt:04d}"] if attempt else sorted(store.list(root), reverse=True)
    pattern = re.compile(_LOG.format(rank=rank))
    for name in names:
        sizes = store.sizes(join(root, name))
        found = [(int(match[1] or 0), file) for file in sizes if (match := pattern.fullmatch(file))]
        tail = b""
        for _, file in sorted(found, reverse=True):
            missing_bytes = size_bytes - len(tail)
            begin = max(0, sizes[file] - missing_bytes)
            whole = join(root, name, file)
            tail = store.read_range(whole, begin, sizes[file] - begin) + tail
            if begin or len(tail) >= size_bytes:
                break
        if tail:
            return tail.decode(errors="replace")
    return ""


def _counted(text: str, attempt: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield attempt, step and content of the lines that count, from ``attempt`` on."""
    for line in text.splitlines():
        document = json_object(line)
        own = int(document.get("attempt", 0)) if document else 0
        # A process of a fenced attempt may wake up and write late.
        if document is not None and "step" in document and own >= attempt:
            attempt = own
            yield attempt, int(document["step"]), document


def _steps(text: str) -> tuple[StepRecord, ...]:
    by_step: dict[int, StepRecord] = {}
    newest = 0
    for attempt, step, document in _counted(text, newest):
        if attempt > newest:
            # The attempt starts from a committed step; later steps of older attempts are lost.
            newest, by_step = attempt, {at: found for at, found in by_step.items() if at < step}
        by_step[step] = _step(document)
    return tuple(by_step[step] for step in sorted(by_step))


def _step(document: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(document["step"]),
        attempt=int(document.get("attempt", 0)),
        loss=_number(document, "loss"),
        grad_norm=_number(document, "grad_norm"),
        learning_rate=_number(document, "lr"),
        tokens=int(document.get("tokens", 0)),
        samples=int(document.get("samples", 0)),
        first_sample=int(document.get("order_start", 0)),
        step_s=float(document.get("step_s", 0.0)),
        num_workers=int(document.get("num_workers", 0)),
        layout=str(document.get("layout") or ""),
    )


def _incidents(store: Store, directory: str) -> list[Incident]:
    incidents: list[Incident] = []
    for name in store.list(directory):
        document = _object(_text(store, join(directory, name, "incident.json")))
        if document:
            incidents.append(Incident.from_json(document, number=len(incidents) + 1))
    return incidents


def _number(document: Mapping[str, Any], name: str) -> float:
    """Return a number; null stands for nan, which JSON does not have."""
    value = document.get(name)
    return nan if value is None else float(value)
