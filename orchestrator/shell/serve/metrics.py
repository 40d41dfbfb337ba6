"""All Prometheus metrics of a run: a table of paths into its document, read at each scrape.

The totals come from the journal, so they continue after a restart of the controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.core import Incident, RunStats
from orchestrator.report import RunDocument
from orchestrator.shell.clock import wall_time

#: This many of the newest incidents have their own series.
_NUM_INCIDENTS = 20
#: Longest text in a label.
_TEXT_MAX = 160
#: How many characters of a node's id boards show.
_NODE = 12
#: This many members and nodes have their own series, so that a scrape of a large run is not slow.
NUM_TOLD = 1000
#: The values of ``RunStats.phase``.
_PHASES = "waiting", "forming", "training", "yielding", "recovering", "over"
#: A path leads to a number, to numbers by label, or to rows whose key follows the colon.
_TABLE = """\
gauge run_info | pages:is | url directory | 1; the labels locate its page.
gauge phase | phases | phase | 1 for the phase that the run is in.
counter phase_seconds | stats.phases_s | phase | Time spent in each phase.
gauge attempt | stats.attempt | | Number of the newest attempt.
gauge step | step | | Last completed step that need not be redone.
gauge goal_steps | goal | | The last step of the run.
counter steps | steps_done | | Completed steps, including those that were redone.
counter lost_steps | stats.lost_steps | | Completed steps that were redone.
gauge goodput_ratio | stats.goodput | | Share of the time spent in steps that counted.
gauge goodput_since_start_ratio | stats.goodput_since_start | | The same share, of the \
time without starts and stops by a person.
gauge time_seconds | stats.parts_s | part | Where the time went; the parts add up to all of it.
gauge workers | stats.num_workers | | Workers in the newest attempt.
gauge layout_info | layouts | layout | 1 for the layout of the workers.
gauge step_samples | scale.samples | | Samples of one step.
gauge step_tokens | tokens | | Tokens of one step, where known.
gauge loss | loss | | Loss of the last completed step.
gauge validation_loss | validation_loss | | Loss of the last evaluation.
gauge grad_norm | grad_norm | | Norm of the gradient before clipping.
gauge learning_rate | lr | | Learning rate of the last completed step.
gauge step_duration_seconds | step_s | percentile | Percentiles of the last steps, saves included.
counter incidents | kinds | kind | Interruptions and planned changes.
counter incidents_by_rule | rules | rule verdict | Incidents that detection found.
counter incident_seconds | recovering_s | kind phase | Time of each phase of a recovery.
counter loaded_bytes | sources | source | Bytes that recoveries loaded, by source.
counter verdicts | verdicts | who | Failures that named a worker, and those that did not.
counter incident_cost_usd | spent_usd | kind | Cost of waiting for recoveries, and \
of redone steps.
gauge incident_detected_timestamp_seconds | newest:found_s | number kind who nodes why | When the \
newest incidents were found.
gauge incident_recovery_seconds | newest:recovery_s | number | Time to the first new step.
gauge incident_lost_steps | newest:lost_steps | number | Steps redone after it.
gauge incident_spent_usd | newest:cost_usd | number | Cost of waiting for it, and of redone steps.
gauge suspected_seconds | suspected:for_s | kind rank node worker | How long a rank or link has \
been suspected.
gauge suspected_times | suspected:times | kind rank node worker | How many times as long as \
normal it takes.
counter suspicions | stats.suspicions | kind | Suspicions so far.
gauge worker_processes | processes | state | Processes of workers by state.
gauge workers_without_series | num_untold | | Members without their own series: the last \
ranks of many.
gauge nodes | states | state | Nodes by state.
gauge node_noticed | noticed:is | node | 1 if a notice says that it will go.
gauge reservations_pending | pending_capacity | | Requested places for workers that are not \
granted yet.
gauge worker_step | workers:step | rank node worker | Last step that the worker completed.
gauge worker_heartbeat_age_seconds | workers:last_heartbeat_s | rank node worker | Age of its \
heartbeat.
gauge worker_compute_seconds | workers:compute_s | rank node worker | Its fastest micro-batch of \
the last step, forward and backward.
gauge worker_data_seconds | workers:data_s | rank node worker | Its wait for the data of the last \
step.
gauge worker_device_bytes | workers:device_bytes | rank node worker | Memory in use on its device.
gauge worker_device_bytes_max | workers:device_bytes_max | rank node worker | Memory of its device.
gauge reservations_asked | capacity:asked | alternative | Places for workers that the run has or \
has requested.
gauge reservations_granted | capacity:granted | alternative | Those that it has.
gauge reservations_refused | capacity:refused | alternative | Requests that were not granted in \
time; they stay open.
gauge reservations_wait_seconds | capacity:waits_s | alternative | How long the open requests have \
waited for a grant.
gauge reservations_refused_for_seconds | capacity:refused_for_s | alternative | How long they have \
been refused.
gauge reservations_grant_seconds | capacity:grant_s | alternative | Time until a machine came.
counter reservation_requests | requests | alternative | Requests for places for workers.
counter reservation_grants | grants | alternative | Requests that were granted.
counter reservation_refusals | refusals | alternative | Requests that were not granted in time.
counter cost_usd | cost.usd | | Cost of the places for workers.
gauge cost_usd_per_hour | cost.usd_per_hour | | Their cost per hour.
gauge snapshot_step | redundancy.step | | Newest step complete in memory.
gauge stored_step | redundancy.stored_step | | Newest step known to be in storage.
gauge node_losses_survived | redundancy.node_losses_survived | | Nodes that may be lost without \
losing the snapshot.
gauge redundancy_reduced_for_seconds | redundancy.reduced_for_s | | How long the run has survived \
fewer lost nodes than configured; 0 if it survives as many.
counter redundancy_reduced_seconds | redundancy.reduced_s | | Time in which the run survived \
fewer lost nodes than configured.
gauge keeper_problems | num_problems | | Problems that reduce the protection by snapshots.
gauge keeper_held_bytes | keepers:held_bytes | node | Memory that snapshots take on a node.
gauge keeper_budget_bytes | keepers:budget_bytes | node | Memory that snapshots may take there.
gauge step_seconds | cadence.step_s | | Median step time, without saves.
gauge save_cost_ratio | cadence.cost_share | | Share of step time for which saves stall training.
gauge save_cost_budget_ratio | cadence.cost_share_max | | The largest share allowed.
gauge save_stall_seconds | stalls_s | what | Median stall of training.
gauge save_every_steps | every | what | Steps between two saves.
"""


class _Row(NamedTuple):
    """A metric: its family and name, and the path to its samples."""

    family: str
    name: str
    path: str  #: Names, separated by dots.
    key: str  #: Key of the value in each row at ``path``; "" if there are no rows.
    labels: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, line: str) -> _Row:
        names, where, labels, text = (part.strip() for part in line.split("|"))
        family, name = names.split()
        path, _, key = where.partition(":")
        return cls(family, name, path, key, tuple(labels.split()), text)

    def metric(self, run: tuple[str, str], told: Mapping[str, Any]) -> Metric:
        family = CounterMetricFamily if self.family == "counter" else GaugeMetricFamily
        metric = family(f"everstep_{self.name}", self.text, labels=("run", "run_id", *self.labels))
        for values, number in self._samples(told):
            if number is not None:
                metric.add_metric((*run, *values), float(number))
        return metric

    def _samples(self, told: Mapping[str, Any]) -> Iterable[tuple[tuple[str, ...], float | None]]:
        found: Any = told
        for name in self.path.split("."):
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        if self.key:
            return (
                (tuple(_label(row, name) for name in self.labels), row[self.key]) for row in found
            )
        if not self.labels:
            return [((), found)]
        return [(key if isinstance(key, tuple) else (key,), found[key]) for key in found]


_ROWS: Final = tuple(map(_Row.of, _TABLE.splitlines()))
#: Metrics of the run's own numbers, and metrics of workers, whose rows exist only at a scrape.
_OF_RUN = tuple(row for row in _ROWS if row.path != "workers")
_OF_WORKERS = tuple(row for row in _ROWS if row.path == "workers")


class RunCollector(Collector):
    """Yields the metrics of one run; every series has the labels ``run`` and ``run_id``.

    Args:
        run: The name of the run, which other runs may have, too.
        run_id: The unique id of the run.
        told: Returns the run's document, with rows for at most ``NUM_TOLD`` members.
    """

    def __init__(self, *, run: str, run_id: str, told: Callable[[], RunDocument]) -> None:
        self._run = run, run_id
        self._told = told
        #: The wall time at which the run's clock was 0; computed once, so that incidents do not
        #: move.
        self._epoch_s: float | None = None

    def describe(self) -> list[Metric]:
        """Return nothing: names are checked at a scrape, not before the run is up."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        told = self._content()
        return (row.metric(self._run, told) for row in _ROWS)

    def prepare(self) -> Callable[[], bytes]:
        """Return a function that makes the text of the current metrics, in any thread."""
        told = self._content()
        metrics = [row.metric(self._run, told) for row in _OF_RUN]
        made = (row.metric(self._run, told) for row in _OF_WORKERS)
        return lambda: generate_latest(_Made([*metrics, *made]))

    def _content(self) -> dict[str, Any]:
        """Return the document that the paths of the table refer to."""
        document = self._told()
        stats, scale, status = document.stats, document.scale, document.status
        if self._epoch_s is None:
            self._epoch_s = wall_time() - status["at_s"]
        redundancy, cadence = status["redundancy"], status["cadence"]
        # Alternatives that were never requested have no row.
        names = {str(n): row["alternative"] for n, row in enumerate(status["capacity"])}
        noticed = [
            {"node": row["node"], "is": row["state"] == "draining"}
            for row in status["nodes"]
            if row["state"] != "lost"
        ]
        # Nodes that will go come first: if there are many nodes, not all have series.
        noticed.sort(key=lambda row: not row["is"])
        saves = "snapshot", "checkpoint"
        return {
            **status,
            **_of_incidents(stats, self._epoch_s, is_priced=status["cost"]["usd"] is not None),
            "stats": stats,
            "scale": scale,
            "pages": [{**status, "is": 1}] if status["url"] else [],
            "phases": {name: name == stats.phase for name in _PHASES},
            "steps_done": stats.step + stats.lost_steps,
            "layouts": {status["layout"]: 1} if status["layout"] else {},
            "tokens": scale.tokens or status["step_tokens"],
            "suspected": [{**row, **_suspected(row["guilty"])} for row in status["suspects"]],
            "num_untold": max(0, stats.num_workers - NUM_TOLD),
            "states": status["node_states"],
            "noticed": noticed[:NUM_TOLD],
            "requests": {names.get(n, n): num for n, num in stats.asked.items()},
            "grants": {names.get(n, n): num for n, num in stats.granted.items()},
            "refusals": {names.get(n, n): num for n, num in stats.refused.items()},
            "num_problems": len(redundancy["problems"]),
            "keepers": redundancy["keepers"][:NUM_TOLD],
            "stalls_s": {name: cadence[f"{name}_stall_s"] for name in saves},
            "every": {name: cadence[f"{name}_steps"] for name in saves},
        }


def _of_incidents(stats: RunStats, epoch_s: float, *, is_priced: bool) -> dict[str, Any]:
    """Return the numbers of incidents, for a table and for marks on curves."""
    sources: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    recovering_s: dict[tuple[str, str], float] = {}
    spent_usd: dict[str, float] = {}
    for one in stats.incidents:
        for phase, took_s in one.phases_s.items():
            recovering_s[one.kind, phase] = recovering_s.get((one.kind, phase), 0.0) + took_s
        spent_usd[one.kind] = spent_usd.get(one.kind, 0.0) + one.cost_usd
        sources.update(one.sources)
        if not one.is_planned:
            verdicts["named" if one.guilty else "undecided"] += 1

    def row(one: Incident) -> dict[str, Any]:
        return {
            "number": one.number,
            "kind": one.kind,
            "who": one.who,
            "nodes": ", ".join(dict.fromkeys(node[:_NODE] for *_, node in one.places)),
            "why": one.evidence[:_TEXT_MAX],
            "found_s": None if one.t_detect_s is None else round(epoch_s + one.t_detect_s),
            "recovery_s": one.recovery_s,
            "lost_steps": one.lost_steps,
            "cost_usd": one.cost_usd if is_priced else None,
        }

    return {
        "kinds": Counter(one.kind for one in stats.incidents),
        "rules": Counter((one.rule, one.verdict) for one in stats.incidents if one.rule),
        "recovering_s": recovering_s,
        "sources": sources,
        "verdicts": verdicts,
        "spent_usd": spent_usd if is_priced else {},
        "newest": list(map(row, stats.incidents[-_NUM_INCIDENTS:])),
    }


class _Made(Collector):
    """Metrics that exist already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics


def _label(row: Mapping[str, Any], name: str) -> str:
    text = str(row[name])
    return ",".join(node[:_NODE] for node in text.split(",")) if name == "node" else text


def _suspected(guilty: Mapping[str, Any]) -> dict[str, str]:
    """Return the ranks, or links between ranks, and the nodes of a suspicion as labels."""
    links = (f"{sender} to {receiver}" for sender, receiver in guilty["links"])
    ranks = ",".join([*map(str, guilty["ranks"]), *links])
    return {"rank": ranks, "node": ",".join(guilty["nodes"])}
