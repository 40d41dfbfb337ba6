"""All Prometheus metrics of a run, read from its status document and its numbers at each scrape.

So a restarted controller shows the same totals as before: they come from the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.core import RunStats
from orchestrator.shell.clock import wall_time

#: So many incidents have series of their own, the newest ones.
_NUM_INCIDENTS = 20
#: A label is no place for a report.
_TEXT_MAX = 160
#: As much of a node's id as boards show.
_NODE = 12
#: Members, and nodes, with series of their own: a scrape of a large run takes no longer.
NUM_TOLD = 1000
#: The values of ``RunStats.phase``.
_PHASES = "waiting", "forming", "training", "yielding", "recovering", "over"

_Samples = Iterable[tuple[tuple[str, ...], float | None]]


class RunCollector(Collector):
    """Yields the metrics of one run. Every series has the labels ``run`` and ``run_id``.

    Args:
        run: The name of the run, which others may have as well.
        run_id: The run, and no other one.
        status: Returns the document of ``/status``, with rows for ``NUM_TOLD`` members at most.
        samples_per_step: The global batch.
        tokens_per_step: Tokens of it; 0 if only the workers can tell.
    """

    def __init__(
        self,
        *,
        run: str,
        run_id: str,
        status: Callable[[], Mapping[str, Any]],
        stats: RunStats,
        samples_per_step: int,
        tokens_per_step: int,
    ) -> None:
        self._run = run, run_id
        self._status = status
        self._stats = stats
        #: The wall time at which the run's clock was 0; read once, or incidents would move.
        self._epoch_s: float | None = None
        self._samples_per_step = samples_per_step
        self._tokens_per_step = tokens_per_step

    def describe(self) -> list[Metric]:
        """Return nothing: names are checked when they are scraped, not before the run is up."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        status = self._status()
        yield from self._of_run(status)
        yield from self._of_workers(status)

    def prepare(self) -> Callable[[], bytes]:
        """Return what makes the text, in any thread, of how the run is now."""
        status = self._status()
        of_run = list(self._of_run(status))
        return lambda: _text([*of_run, *self._of_workers(status)])

    def _of_run(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield what reads the run's numbers, which change."""
        yield from self._progress(status)
        yield from self._training(status)
        yield from self._incidents()
        yield from self._newest_incidents(status)
        yield from self._suspicions(status)
        yield from self._fleet(status)
        yield from self._capacity(status)
        yield from self._saves(status)

    def _gauge(self, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, samples, labels)

    def _counter(self, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily, name, text, samples, labels)

    def _filled(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        samples: _Samples,
        labels: tuple[str, ...],
    ) -> Metric:
        metric = family(f"everstep_{name}", text, labels=("run", "run_id", *labels))
        for values, number in samples:
            if number is not None:
                metric.add_metric((*self._run, *values), float(number))
        return metric

    def _progress(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        stats = self._stats
        where = [((status["url"], status["directory"]), 1.0)] if status["url"] else []
        yield self._gauge("run_info", "1; says where its page is.", where, "url", "directory")
        phases = [((name,), float(name == stats.phase)) for name in _PHASES]
        yield self._gauge("phase", "1 for the phase that the run is in.", phases, "phase")
        yield self._counter(
            "phase_seconds", "Time spent in each phase.", _by_key(stats.phases_s), "phase"
        )
        yield self._gauge("attempt", "Number of the newest attempt.", _one(stats.attempt))
        yield self._gauge(
            "step", "Last completed step that need not be redone.", _one(status["step"])
        )
        yield self._gauge("goal_steps", "The last step of the run.", _one(status["goal"]))
        yield self._counter(
            "steps",
            "Steps that were completed, those that were redone included.",
            _one(stats.step + stats.lost_steps),
        )
        yield self._counter(
            "lost_steps", "Completed steps that were redone.", _one(stats.lost_steps)
        )
        yield self._gauge(
            "goodput_ratio", "Share of the time spent in steps that counted.", _one(stats.goodput)
        )
        yield self._gauge(
            "goodput_since_start_ratio",
            "The same of the time without starts, and without stops by a person.",
            _one(stats.goodput_since_start),
        )
        yield self._gauge(
            "time_seconds", "Where the time went; adds up to all.", _by_key(stats.parts_s), "part"
        )
        yield self._gauge("workers", "Workers in the newest attempt.", _one(stats.num_workers))
        layout = [((status["layout"],), 1.0)] if status["layout"] else []
        yield self._gauge("layout_info", "1 for the layout of the workers.", layout, "layout")

    def _training(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        tokens = self._tokens_per_step or status["step_tokens"]
        for name, text, value in (
            ("step_samples", "Samples of one step.", self._samples_per_step),
            ("step_tokens", "Tokens of one step, where known.", tokens),
            ("loss", "Loss of the last completed step.", status["loss"]),
            ("validation_loss", "Loss of the last evaluation.", status["validation_loss"]),
            ("grad_norm", "Norm of the gradient before clipping.", status["grad_norm"]),
            ("learning_rate", "Learning rate of the last completed step.", status["lr"]),
        ):
            yield self._gauge(name, text, _one(value))
        yield self._gauge(
            "step_duration_seconds",
            "Percentiles of the last steps, saves included.",
            _by_key(status["step_s"]),
            "percentile",
        )

    def _newest_incidents(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield what a table of incidents says, and marks on curves need."""
        if self._epoch_s is None:
            self._epoch_s = wall_time() - status["at_s"]
        epoch_s, newest = self._epoch_s, self._stats.incidents[-_NUM_INCIDENTS:]
        numbers = [(str(one.number),) for one in newest]
        has_price = status["cost"]["usd"] is not None
        found = [
            (
                (
                    str(one.number),
                    one.kind,
                    one.who,
                    ", ".join(dict.fromkeys(node[:_NODE] for *_, node in one.places)),
                    one.evidence[:_TEXT_MAX],
                ),
                None if one.t_detect_s is None else round(epoch_s + one.t_detect_s),
            )
            for one in newest
        ]
        yield self._gauge(
            "incident_detected_timestamp_seconds",
            "When the newest incidents were found.",
            found,
            *("number", "kind", "who", "nodes", "why"),
        )
        for name, text, values in (
            (
                "incident_recovery_seconds",
                "Time to the first new step.",
                [one.recovery_s for one in newest],
            ),
            ("incident_lost_steps", "Steps redone after it.", [one.lost_steps for one in newest]),
            (
                "incident_spent_usd",
                "Cost of waiting for it, and of redone steps.",
                [one.cost_usd if has_price else None for one in newest],
            ),
        ):
            yield self._gauge(name, text, zip(numbers, values, strict=True), "number")

    def _incidents(self) -> Iterator[Metric]:
        incidents = self._stats.incidents
        yield self._counter(
            "incidents",
            "Interruptions and planned changes.",
            _by_key(Counter(incident.kind for incident in incidents)),
            "kind",
        )
        found = Counter((each.rule, each.verdict) for each in incidents if each.rule)
        yield self._counter(
            "incidents_by_rule",
            "Incidents that detection found.",
            found.items(),
            "rule",
            "verdict",
        )
        seconds: Counter[tuple[str, str]] = Counter()
        loaded: Counter[str] = Counter()
        verdicts: Counter[str] = Counter()
        for incident in incidents:
            for phase, duration_s in incident.phases_s.items():
                seconds[incident.kind, phase] += duration_s  # type: ignore[assignment]
            loaded.update(incident.sources)
            if not incident.is_planned:
                verdicts["named" if incident.guilty else "undecided"] += 1
        yield self._counter(
            "incident_seconds",
            "Time of each phase of a recovery.",
            seconds.items(),
            "kind",
            "phase",
        )
        yield self._counter(
            "loaded_bytes", "Bytes that recoveries loaded, by source.", _by_key(loaded), "source"
        )
        yield self._counter(
            "verdicts", "Failures in which somebody was named, or nobody.", _by_key(verdicts), "who"
        )

    def _suspicions(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        rows = status["suspects"]
        keys = [(row["kind"], *_suspected(row["guilty"]), row["worker"]) for row in rows]
        of_rank = "kind", "rank", "node", "worker"
        for name, text, key in (
            ("suspected_seconds", "How long a rank or link has been suspected.", "for_s"),
            ("suspected_times", "How many times as long as it should it takes.", "times"),
        ):
            samples = zip(keys, (row[key] for row in rows), strict=True)
            yield self._gauge(name, text, samples, *of_rank)
        yield self._counter(
            "suspicions", "Suspicions so far.", _by_key(self._stats.suspicions), "kind"
        )

    def _fleet(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        yield self._gauge(
            "worker_processes",
            "Processes of workers by state.",
            _by_key(status["processes"]),
            "state",
        )
        yield self._gauge(
            "workers_without_series",
            "Members without series of their own: those of the last ranks of many.",
            _one(max(0, self._stats.num_workers - NUM_TOLD)),
        )
        yield self._gauge(
            "nodes",
            "Nodes by state.",
            _by_key(Counter(row["state"] for row in status["nodes"])),
            "state",
        )
        noticed = [
            ((row["node"][:_NODE],), row["state"] == "draining")
            for row in status["nodes"]
            if row["state"] != "lost"
        ]
        # Those that go come first: of many not all have series.
        noticed.sort(key=lambda sample: not sample[1])
        told = noticed[:NUM_TOLD]
        yield self._gauge("node_noticed", "1 if somebody says that it goes.", told, "node")
        yield self._gauge(
            "reservations_pending",
            "Places for workers that were asked for and not granted yet.",
            _one(status["pending_capacity"]),
        )

    def _of_workers(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield six series for each worker, from the document alone."""
        members = status["workers"]
        of_member = "rank", "node", "worker"
        keys = [(str(row["rank"]), row["node"][:_NODE], row["worker"]) for row in members]
        for name, text, key in (
            ("worker_step", "Last step that the worker completed.", "step"),
            ("worker_heartbeat_age_seconds", "Age of its heartbeat.", "last_heartbeat_s"),
            (
                "worker_compute_seconds",
                "Its fastest micro-batch of the last step, forward and backward.",
                "compute_s",
            ),
            ("worker_data_seconds", "Its wait for the data of the last step.", "data_s"),
            ("worker_device_bytes", "Memory in use on its device.", "device_bytes"),
            ("worker_device_bytes_max", "Memory of its device.", "device_bytes_max"),
        ):
            samples = zip(keys, (row[key] for row in members), strict=True)
            yield self._gauge(name, text, samples, *of_member)

    def _capacity(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        rows = status["capacity"]
        for name, text, key in (
            ("reservations_asked", "Places for workers that the run has or asks for.", "asked"),
            ("reservations_granted", "Those that it has.", "granted"),
            (
                "reservations_refused",
                "Those that were not granted in time; still asked for.",
                "refused",
            ),
            (
                "reservations_wait_seconds",
                "How long the open requests wait for a grant.",
                "waits_s",
            ),
            ("reservations_refused_for_seconds", "How long they are refused.", "refused_for_s"),
            ("reservations_grant_seconds", "How long a machine took to come.", "grant_s"),
        ):
            samples = [((row["alternative"],), row[key]) for row in rows]
            yield self._gauge(name, text, samples, "alternative")
        for name, text, totals in (
            ("reservation_requests", "Requests for places for workers.", self._stats.asked),
            ("reservation_grants", "Requests that were granted.", self._stats.granted),
            (
                "reservation_refusals",
                "Requests that were not granted in time.",
                self._stats.refused,
            ),
        ):
            # Those that were never asked for have no row.
            named = {str(number): row["alternative"] for number, row in enumerate(rows)}
            samples = [((named.get(number, number),), n) for number, n in totals.items()]
            yield self._counter(name, text, samples, "alternative")
        cost = status["cost"]
        yield self._counter("cost_usd", "What the places for workers cost.", _one(cost["usd"]))
        yield self._gauge(
            "cost_usd_per_hour", "What they cost in an hour.", _one(cost["usd_per_hour"])
        )
        if cost["usd"] is not None:
            by_kind: Counter[str] = Counter()
            for incident in self._stats.incidents:
                by_kind[incident.kind] += incident.cost_usd  # type: ignore[assignment]
            yield self._counter(
                "incident_cost_usd",
                "What waiting for recoveries, and steps done twice, cost.",
                _by_key(by_kind),
                "kind",
            )

    def _saves(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        redundancy, cadence = status["redundancy"], status["cadence"]
        for name, text, value in (
            ("snapshot_step", "Newest step complete in memory.", redundancy["step"]),
            ("stored_step", "Newest step known to be in storage.", redundancy["stored_step"]),
            (
                "node_losses_survived",
                "Nodes that may be lost without losing the snapshot.",
                redundancy["node_losses_survived"],
            ),
            (
                "redundancy_reduced_for_seconds",
                "How long fewer nodes may be lost than asked for; 0 if all is well.",
                redundancy["reduced_for_s"],
            ),
            (
                "keeper_problems",
                "Problems that reduce the protection by snapshots.",
                len(redundancy["problems"]),
            ),
            ("step_seconds", "Median step, without saves.", cadence["step_s"]),
            (
                "save_cost_ratio",
                "Share of step time for which saves stall training.",
                cadence["cost_share"],
            ),
            ("save_cost_budget_ratio", "The largest share allowed.", cadence["cost_share_max"]),
        ):
            yield self._gauge(name, text, _one(value))
        for name, text, key in (
            ("keeper_held_bytes", "Memory that snapshots take on a node.", "held_bytes"),
            ("keeper_budget_bytes", "Memory that they may take there.", "budget_bytes"),
        ):
            rows = redundancy["keepers"][:NUM_TOLD]
            samples = [((row["node"][:_NODE],), row[key]) for row in rows]
            yield self._gauge(name, text, samples, "node")
        yield self._counter(
            "redundancy_reduced_seconds",
            "Time in which fewer nodes might be lost than asked for.",
            _one(redundancy["reduced_s"]),
        )
        stalls_s = {name: cadence[f"{name}_stall_s"] for name in ("snapshot", "checkpoint")}
        every = {name: cadence[f"{name}_steps"] for name in ("snapshot", "checkpoint")}
        yield self._gauge(
            "save_stall_seconds", "Median stall of training.", _by_key(stalls_s), "what"
        )
        yield self._gauge("save_every_steps", "Steps between two saves.", _by_key(every), "what")


class _Made(Collector):
    """Metrics that are there."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._metrics


def _text(metrics: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Made(metrics))
    return generate_latest(registry)


def _one(value: float | None) -> _Samples:
    return [((), value)]


def _by_key(values: Mapping[str, float | None]) -> _Samples:
    return [((key,), value) for key, value in values.items()]


def _suspected(guilty: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ranks, or links between ranks, and the nodes of a suspicion as labels."""
    links = (f"{sender} to {receiver}" for sender, receiver in guilty["links"])
    ranks = ",".join([*map(str, guilty["ranks"]), *links])
    return ranks, ",".join(node[:12] for node in guilty["nodes"])
