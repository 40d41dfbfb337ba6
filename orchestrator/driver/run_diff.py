"""``everstep diff``: compare two runs by the files in their directories."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from shlex import quote
from typing import Any

from orchestrator.config import Source
from orchestrator.core import Incident
from orchestrator.driver.changes import ELSEWHERE, flat
from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from orchestrator.report import CONTACT, RunRecord, StepRecord, read_run
from ucp_core.errors import CheckpointNotFoundError
from ucp_core.inspection import DiffReport, Tolerance, compare, diff, json_value
from ucp_core.native import checkpoint_name, open_checkpoint
from ucp_core.storage import join
from workers.protocol import CHECKPOINTS, RESULT

#: The numbers of a step to compare, and their names for people.
_NUMBERS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens": "tokens",
    "samples": "number of samples",
    "first_sample": "place of its samples in the order",
}
#: Settings that say where a run is, not what it trains.
_PLACES = ELSEWHERE | {"run.name"}
#: Matches all tensors, but not small values beside them such as the number of the attempt.
_ALL = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberDiff:
    """A number that differs between the steps of two runs."""

    name: str  #: Such as ``loss``.
    num_steps: int  #: Steps in which it differs.
    first_step: int  #: The first of these steps.
    first_values: tuple[float, float]  #: The numbers in that step.
    #: How many float64 values lie between them; None if one of them is not a number.
    first_ulp: int | None
    max_relative: float  #: Largest difference of finite numbers, relative to the larger one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run at the first step that differs; ``incident`` is the last one before it."""

    attempt: int
    layout: str
    incident: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """How two runs differ."""

    urls: tuple[str, str]  #: The directories.
    #: Both values of each setting that differs, by section and key.
    settings: dict[str, tuple[Any, Any]]
    steps: tuple[int, int]  #: The first and the last step that both have.
    gaps: tuple[int, ...]  #: Steps in between that only one of them has.
    numbers: tuple[NumberDiff, ...]  #: The numbers of steps that differ.
    #: Both runs at the first step that differs; empty if there is none.
    situations: tuple[Situation, ...]
    #: By step, the differences between the tensors of a version that both have. Versions after the
    #: first that differs are not compared.
    versions: dict[int, DiffReport]
    #: Whether the weights after the last step are equal; None if one of them is not known.
    same_end: bool | None

    @property
    def equal(self) -> bool:
        """Return whether everything that both have is equal; settings do not count."""
        is_same = self.same_end is not False and all(one.equal for one in self.versions.values())
        return is_same and not self.numbers and not self.gaps

    @property
    def first_step(self) -> int | None:
        """Return the first step that differs."""
        return min((one.first_step for one in self.numbers), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        versions = {step: report.to_json() for step, report in self.versions.items()}
        said = {"equal": self.equal, "first_step": self.first_step}
        document: dict[str, Any] = json_value(said | asdict(self) | {"versions": versions})
        return document

    def lines(self) -> Iterator[str]:
        """Yield the differences as lines for people."""
        first, last = self.steps
        if self.first_step is None:
            yield f"steps {first} to {last} are equal: {', '.join(_NUMBERS.values())}"
        else:
            yield f"step {self.first_step} is the first that differs, of steps {first} to {last}"
        for one in self.numbers:
            ulp = one.first_ulp
            bits = "" if ulp is None else f", in the last {ulp.bit_length()} of 64 bits"
            x, y = one.first_values
            yield (
                f"{_NUMBERS[one.name]}: {x!r} and {y!r} in step {one.first_step}{bits}; "
                f"{one.num_steps} steps differ, by at most {one.max_relative:.2g} of the value"
            )
        for url, then in zip(self.urls, self.situations, strict=False):
            template = "incident {number} ({kind}, {who})" if then.incident else "no incident"
            before = template.format(**(then.incident or {}))
            yield f"before that in {url}: {before}; attempt {then.attempt}, {then.layout}"
        if self.gaps:
            yield f"only one of them has the steps {', '.join(map(str, self.gaps))}"
        for key, (one, other) in self.settings.items():
            yield f"setting {key}: {one!r} and {other!r}"
        yield from self._told_versions()
        if self.same_end is not None:
            yield f"the weights at the end are {'equal' if self.same_end else 'different'}"

    def _told_versions(self) -> Iterator[str]:
        equal = [str(step) for step, report in self.versions.items() if report.equal]
        if equal:
            yield f"versions {', '.join(equal)}: all weights and optimizer states are equal"
        for step, report in self.versions.items():
            if not report.equal:
                paths = (quote(join(url, CHECKPOINTS, checkpoint_name(step))) for url in self.urls)
                yield (
                    f"version {step}: {len(report.tensors)} tensors differ, {report.num_equal} are "
                    f"equal; see `ucp diff {' '.join(paths)}`"
                )


def diff_runs(a: str, b: str, *, weights: bool = True) -> RunDiff:
    """Return how the runs in two directories differ.

    With ``weights`` compare the versions in storage, too; they are read if checksums do not prove
    them equal.

    Raises:
        RunNotFoundError: One of them holds no run, or one that still trains; or they have no step
            in common.
    """
    urls = a, b
    records = read_run(a), read_run(b)
    for url in urls:
        _require_at_rest(Run(url))
    one, other = ({each.step: each for each in record.steps} for record in records)
    common = sorted(one.keys() & other.keys())
    if not common:
        raise RunNotFoundError(
            f"no step is in both runs: {a} has {_span(one)}, {b} has {_span(other)}; name two runs "
            "that have trained the same steps"
        )
    steps = [(one[step], other[step]) for step in common]
    numbers = tuple(_numbers(steps))
    first_step = min((found.first_step for found in numbers), default=0)
    return RunDiff(
        urls=urls,
        settings=_settings(records),
        steps=(common[0], common[-1]),
        gaps=tuple(s for s in sorted(one.keys() ^ other.keys()) if common[0] < s < common[-1]),
        numbers=numbers,
        situations=tuple(
            _situation(run[first_step], record.incidents)
            for run, record in zip((one, other), records, strict=True)
            if first_step
        ),
        versions=dict(_versions(urls)) if weights else {},
        same_end=_same_end(urls, common[-1]),
    )


def _span(steps: Mapping[int, StepRecord]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "none"


def _require_at_rest(run: Run) -> None:
    is_led = run.store.exists(join(run.path, CONTACT)) and not run.is_over()
    if is_led and run.ask("status") is not None:
        raise RunNotFoundError(
            f"the run in {run.url} still trains, at step {run.last_step()[0]}: wait for its end "
            f"(`everstep status {quote(run.url)} --watch`), or stop it (`everstep stop "
            f"{quote(run.url)}`)",
            url=run.url,
        )


def _numbers(steps: Sequence[tuple[StepRecord, StepRecord]]) -> Iterator[NumberDiff]:
    """Yield the numbers that differ in ``steps``, pairs of both runs' records."""
    for name in _NUMBERS:
        pairs = [(float(getattr(a, name)), float(getattr(b, name))) for a, b in steps]
        found = _compared(pairs)
        if found is None:
            continue
        at_first = _compared([pairs[found.first]])
        gaps = (abs(x - y) / max(abs(x), abs(y)) for x, y in pairs if x != y and isfinite(x - y))
        yield NumberDiff(
            name=name,
            num_steps=found.num_different,
            first_step=steps[found.first][0].step,
            first_values=found.values,
            first_ulp=at_first.max_ulp if at_first is not None else None,
            max_relative=max(gaps, default=0.0),
        )


def _compared(pairs: Sequence[tuple[float, float]]) -> Any:
    one, other = (memoryview(array("d", column)).cast("B") for column in zip(*pairs, strict=True))
    return compare(one, other, ("F64", "F64"), Tolerance())


def _situation(step: StepRecord, incidents: Sequence[Incident]) -> Situation:
    before = [incident for incident in incidents if incident.attempt < step.attempt]
    told = ("number", "kind", "who", "evidence", "attempt")
    return Situation(
        attempt=step.attempt,
        layout=step.layout,
        incident={name: getattr(before[-1], name) for name in told} if before else None,
    )


def _settings(records: Sequence[RunRecord]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ; a script that ran alone has none."""
    one, other = (flat(Source(each.config_text, each.url).document) for each in records)
    keys = sorted((one.keys() | other.keys()) - _PLACES) if one and other else []
    both = {key: (one.get(key), other.get(key)) for key in keys}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _versions(urls: Sequence[str]) -> Iterator[tuple[int, DiffReport]]:
    """Yield the versions that both runs have committed, up to the first that differs."""
    runs = [Run(url) for url in urls]
    for name in sorted(set(runs[0].saves()) & set(runs[1].saves())):
        try:
            pair = [open_checkpoint(run.store, join(run.path, CHECKPOINTS, name)) for run in runs]
        except CheckpointNotFoundError:
            continue  # it was not committed
        report = diff(*pair, names=_ALL)
        yield pair[0].step, report
        if not report.equal:
            return


def _same_end(urls: Sequence[str], last_step: int) -> bool | None:
    """Return whether the weights after ``last_step`` are equal; None if a run ended elsewhere."""
    digests = set()
    for run in map(Run, urls):
        path = join(run.path, RESULT)
        result = json.loads(run.store.read(path)) if run.store.exists(path) else {}
        if result.get("step") != last_step:
            return None
        digests.add(result["weights_digest"])
    return len(digests) == 1
