"""The services. Their packages are optional and imported only when they are used."""

import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.config import RunConfig
from orchestrator.shell.clock import wall_time
from orchestrator.shell.loggers.curve import Point
from ucp_core.storage import LocalStore, join, open_store

#: MLflow's limits of metrics in a request and of characters in a parameter.
_METRICS_MAX, _PARAMETER_CHARS = 1000, 500
_PARAMETERS_MAX = 100


class Service(Protocol):
    """One run of a service."""

    run_id: str  #: The service's id of the run, with which a later process continues it.
    written: int  #: The last step that the service has; -1 if unknown.

    def write(self, points: Sequence[Point]) -> None:
        """Write points in the order of steps; raise whatever the service raises."""

    def close(self, outcome: str) -> None:
        """Write what is buffered, and end the service's run with ``outcome``.

        With "" leave it open for another process to continue.
        """


class TensorBoard:
    """Event files in the directory ``run_id``, a path or a URL that tensorboard opens itself.

    Steps after ``written`` are written again: tensorboard's purge hides the points that an earlier
    process wrote for them.
    """

    def __init__(self, _config: RunConfig, run_id: str, written: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id, self.written = run_id, written
        self._events = EventFileWriter(run_id)
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=wall_time(), step=written + 1, session_log=start)
        self._events.add_event(event)

    def write(self, points: Sequence[Point]) -> None:
        """Write points, and return when they are in the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            summary = Summary(value=values)
            event = Event(wall_time=point.wall_time, step=point.step, summary=summary)
            self._events.add_event(event)
        self._events.flush()

    def close(self, outcome: str) -> None:  # noqa: ARG002  tensorboard has no outcomes
        """Close the file."""
        self._events.close()


class Wandb:
    """A run of Weights & Biases; it continues ``run_id`` if the service has that one."""

    def __init__(self, config: RunConfig, run_id: str, _written: int) -> None:
        import wandb

        settings = config.logging.wandb
        assert settings is not None, "the run asks for it"
        store, path = open_store(config.run.directory)
        if not isinstance(store, LocalStore):
            path = join(tempfile.gettempdir(), f"everstep-wandb-{run_id}")
            Path(path).mkdir(exist_ok=True)
        self.run_id = run_id
        # wandb would install its own handlers for both, but ``close`` reports the end.
        ends = {"exit": sys.exit, "excepthook": sys.excepthook}
        self._run = wandb.init(
            id=self.run_id,
            resume="allow",
            project=settings.project,
            entity=settings.entity or None,
            name=settings.name or config.run.name,
            group=settings.group or None,
            tags=settings.tags,
            mode=settings.mode,
            config=config.model_dump(mode="json"),
            dir=path,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        vars(sys).update(ends)
        self.written = int(self._run.starting_step) - 1

    def write(self, points: Sequence[Point]) -> None:
        """Log points; the service's own process sends them."""
        for point in points:
            # Otherwise wandb would hold each point back until the next one.
            self._run.log(dict(point.values), step=point.step, commit=True)

    def close(self, outcome: str) -> None:
        """End the run; wait until all points are sent."""
        self._run.finish(exit_code=0 if outcome in {"completed", "stopped", ""} else 1)


class Mlflow:
    """A run of MLflow; with ``run_id`` "" it begins one, with the configuration as parameters."""

    _STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # noqa: RUF012

    def __init__(self, config: RunConfig, run_id: str, _written: int) -> None:
        from mlflow import MlflowClient

        settings = config.logging.mlflow
        assert settings is not None, "the run asks for it"
        self._client = MlflowClient(settings.tracking_uri or None)
        self.run_id, self.written = run_id, -1
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            known = self._client.get_metric_history(run_id, "train/loss")
            self.written = max((one.step for one in known), default=-1)
            return
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(settings.experiment)
        )
        run = self._client.create_run(experiment, run_name=settings.name or config.run.name)
        self.run_id = run.info.run_id
        self._log_parameters(config)

    def write(self, points: Sequence[Point]) -> None:
        """Write points in requests of at most ``_METRICS_MAX`` values."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.wall_time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _METRICS_MAX):
            part = metrics[start : start + _METRICS_MAX]
            self._client.log_batch(self.run_id, metrics=part)

    def close(self, outcome: str) -> None:
        """Report to the server how the run ended; with "" leave the run open."""
        if outcome:
            self._client.set_terminated(self.run_id, self._STATUS.get(outcome, "FAILED"))

    def _log_parameters(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        rows = [
            Param(f"{section}.{key}".rstrip("."), str(value)[:_PARAMETER_CHARS])
            for section, keys in config.model_dump(mode="json").items()
            for key, value in (keys if isinstance(keys, dict) else {"": keys}).items()
            if value not in (None, "", [], {})
        ]
        for start in range(0, len(rows), _PARAMETERS_MAX):
            part = rows[start : start + _PARAMETERS_MAX]
            self._client.log_batch(self.run_id, params=part)


#: Opens each service, given the run's configuration, the service's id of the run, and the last step
#: that it is known to have.
SERVICES: dict[str, Callable[[RunConfig, str, int], Service]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def first_ids(config: RunConfig) -> dict[str, str]:
    """Return each configured service and its id for a new run; "" if the service chooses it."""
    where = config.logging.tensorboard
    if where is True:
        where = join(config.run.directory, "tensorboard")
    # Ids that wandb makes have the same form.
    ids = {"tensorboard": where or "", "wandb": secrets.token_hex(4), "mlflow": ""}
    return {name: each for name, each in ids.items() if getattr(config.logging, name)}
