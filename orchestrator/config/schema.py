"""The configuration of a run: what each key means, its default, and what is wrong with it.

This is the only module that reads YAML or environment variables; the rest of the project is passed
values. ``load`` reports every problem at once, each with its place. What needs more than the text,
such as data, storage and memory, is checked by ``orchestrator.config.preflight``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from orchestrator.config.sources import (
    KeyPath,
    Problem,
    Source,
    did_you_mean,
    dotted,
    override,
    parse,
)
from orchestrator.core import Bounds, RunRules
from orchestrator.detection import PATIENCE
from orchestrator.errors import ConfigError
from orchestrator.policies import (
    BudgetRules,
    CadenceRules,
    CapacityRules,
    LayoutRules,
    RedundancyRules,
    SharingRules,
    choose,
    usable,
)
from ucp_core.errors import UcpError
from ucp_core.storage import open_store
from workers.keeper import CLOUDS
from workers.models import PRESETS
from workers.placement import Preference
from workers.settings import (
    AUTO,
    STDLIB,
    CheckpointSettings,
    DataSettings,
    InitSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
    SnapshotSettings,
    TrainSettings,
    model_shape,
)
from workers.settings import (
    problems as settings_problems,
)

__all__ = [
    "MlflowSection",
    "Problem",
    "RunConfig",
    "WandbSection",
    "demo_config",
    "load",
]

#: Checks a configuration against the world: files, storage, memory. The second argument lists keys
#: whose value is missing or wrong. They are reported elsewhere, so it must ignore them.
Look: TypeAlias = Callable[["RunConfig", Collection[str]], Sequence[Problem]]

#: With that patience. A controller that a signal has stopped is ended after this. Training does not
#: need it meanwhile, and a debugger may stop it for a moment; a slow one is never ended.
_CONTROLLER_STOPPED_S = 10.0
#: What ``cluster.metrics_host`` may be.
_HOSTS = (AUTO, "cluster", "loopback")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(_Section):
    """What the run is called and where it lives.

    Attributes:
        directory: Run directory, a path or an fsspec URL that every node can reach.
        name: For people. Default: the last part of ``directory``.
        priority: A run that lacks workers takes them from those of lower priority on its cluster,
            down to their ``workers.min``, and gives them back; runs of one priority share evenly.
        script: A training script that calls ``everstep.run``. Without one the built-in language
            model is trained.
        arguments: Of that script, each as one text: ``["--width", "512"]``.
        init_from: A checkpoint that a new run starts from, a path or URL, in any format that
            ``ucp`` opens: Hugging Face, DeepSpeed, Megatron, torch DCP, everstep.
        init_state: "weights", or "all" to go on with the optimizer's state, too.
        init_rename: The model's names by the checkpoint's: ``{"transformer.*": "model.*"}``.
        init_missing: Names, with ``*``, of parameters that may begin with new values.
    """

    directory: str = Field(min_length=1)
    name: str = ""
    priority: int = 0
    script: str = ""
    arguments: tuple[str, ...] = ()
    init_from: str = ""
    init_state: str = "weights"
    init_rename: dict[str, str] = Field(default_factory=dict)
    init_missing: tuple[str, ...] = ()


class ClusterSection(_Section):
    """Where the workers run.

    Attributes:
        address: A Ray cluster, such as ``auto`` or ``10.0.0.1:6379``. Default: ``RAY_ADDRESS`` if
            that is set, else simulated nodes on this machine.
        local_nodes: Number of simulated nodes.
        cpus_per_worker: CPUs that Ray reserves for one worker.
        gpus_per_worker: GPUs of one worker; 0 trains on the CPU.
        memory_gib_per_worker: Memory of a worker's device, to refuse models that cannot fit.
            Default: this machine's memory for simulated nodes; elsewhere it is not checked.
        metrics_host: Where these listen, for everybody to read: ``cluster`` is the head's address
            in it, ``loopback`` is for the head alone. Default: ``auto``, which is ``cluster``, and
            ``loopback`` for simulated nodes.
        metrics_port: Port of the controller's metrics and status; 0 takes a free one.
        rack_label: A Ray label of the nodes. Nodes with the same value fail together, as in a rack
            or a zone, and do not protect each other's snapshots. Default: each node fails alone.
    """

    address: str | None = Field(default=None, min_length=1)
    local_nodes: int = Field(default=2, ge=1, le=256)
    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    memory_gib_per_worker: float | None = Field(default=None, gt=0)
    metrics_host: str = AUTO
    metrics_port: int = Field(default=0, ge=0, le=65535)
    rack_label: str = ""


class Alternative(_Section):
    """Room for one worker, as the run may ask for it. The first in ``capacity`` is asked for first.

    The next is asked for as well when the provider has no machine for it, or none came in three
    times as long as one took before. When the better one returns, the workers move back.

    Attributes:
        resources: What it needs, in Ray's terms, beside or instead of that in ``cluster``.
        labels: That its node must have, such as ``{ray.io/accelerator-type: L4}``.
        zone: Of its node, as Ray's label ``ray.io/availability-zone`` says it.
        spot: Whether its node is on the spot market, by ``ray.io/market-type``. Default: either.
        usd_per_hour: Price of the room for one worker, from which the cost of the run follows.
    """

    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    zone: str = ""
    spot: bool | None = None
    usd_per_hour: float = Field(default=0.0, ge=0)

    def selector(self) -> dict[str, str]:
        """Return the labels that its node must have."""
        market = "" if self.spot is None else "spot" if self.spot else "on-demand"
        own = {"ray.io/availability-zone": self.zone, "ray.io/market-type": market}
        return {**self.labels, **{label: value for label, value in own.items() if value}}


class WorkersSection(_Section):
    """How many workers train.

    Attributes:
        max: The run always asks for so many.
        min: With fewer the run waits for capacity.
        standby_per_node: Warm processes that a node keeps to replace a dead worker at once.
    """

    max: int = Field(ge=1)
    min: int = Field(default=1, ge=1)
    standby_per_node: int = Field(default=0, ge=0, le=8)


class ParallelSection(_Section):
    """How the model is sharded over the workers. ``dp_shard`` follows from their number.

    Workers come in multiples of the product of the degrees.

    Attributes:
        dp_replicate: Full copies of the model.
        tp: Tensor-parallel ways: workers that have a part of each matrix, and the same samples.
        pp: Pipeline stages: workers that have some of the layers each, and the same samples.
        reshard_after_forward: See ``workers.settings.ParallelSettings``.
        collective_timeout_s: See there.
    """

    dp_replicate: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    reshard_after_forward: bool = True
    collective_timeout_s: float = ParallelSettings().collective_timeout_s

    def layout_rules(self) -> LayoutRules:
        """Return the degrees that every layout has."""
        return LayoutRules(dp_replicate=self.dp_replicate, tp=self.tp, pp=self.pp)


class RecoverySection(_Section):
    """How long the run waits, and when it gives up.

    Attributes:
        patience: The one knob of all waits. A step may take this many times the observed p99
            before it is examined, and every other bound scales with it. A larger value reacts
            later and raises fewer false alarms.
        capacity_wait_s: With fewer than ``workers.min`` for this long the run fails, and so it does
            if storage says nothing for as long when it is needed to resume.
        infrastructure_failures_max: Crashes, hangs and lost nodes within an hour.
        preemptions_max: Nodes taken with notice within an hour.
        user_errors_max: Exceptions of single ranks within an hour. A bug in the script is
            recognised sooner, because it repeats.
        stuck_attempts_max: Attempts in a row without a new committed step.
    """

    patience: float = Field(default=PATIENCE, ge=1.5, le=100.0)
    capacity_wait_s: float = Field(default=86400.0, gt=0)
    infrastructure_failures_max: int = Field(default=1000, ge=0)
    preemptions_max: int = Field(default=10000, ge=0)
    user_errors_max: int = Field(default=3, ge=0)
    stuck_attempts_max: int = Field(default=12, ge=1)


class NoticesSection(_Section):
    """Who tells a node that it is taken, beside Ray, Kubernetes and Slurm, which need no key.

    Attributes:
        cloud: Whose metadata service each node asks: ``aws``, ``gcp``, ``azure`` or ``none``.
            ``auto`` is what the machine's firmware says; simulated nodes then ask nobody.
        endpoint: Of that service, instead of the address on the machine's own link.
        file: A file on each node that exists while the node is under notice. It begins with a time
            in ISO 8601, or the seconds from when it was written.
        command: Likewise a command that prints such a text, and nothing while there is no notice.
    """

    cloud: str = AUTO
    endpoint: str = ""
    file: str = ""
    command: str = ""


class WandbSection(_Section):
    """A run of Weights & Biases. The key comes from ``WANDB_API_KEY`` or ``wandb login``.

    Attributes:
        project: Its project.
        entity: User or team; the service's default if empty.
        name: Of the run; ``run.name`` if empty.
        group: Of runs.
        tags: Of the run.
        mode: "online", or "offline", which writes to the run directory for ``wandb sync``.
    """

    project: str = Field(min_length=1)
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"


class MlflowSection(_Section):
    """A run of MLflow.

    Attributes:
        experiment: Is created if there is none of that name.
        tracking_uri: Of the server; ``MLFLOW_TRACKING_URI`` if empty.
        name: Of the run; ``run.name`` if empty.
    """

    experiment: str = Field(min_length=1)
    tracking_uri: str = ""
    name: str = ""


class LoggingSection(_Section):
    """Where the run's curve goes beside its directory: one curve through all attempts.

    The controller writes it: its node needs the packages, and the keys of the services.

    Attributes:
        tensorboard: True for ``RUN_DIR/tensorboard``, or a directory.
        wandb: Weights & Biases.
        mlflow: MLflow.
    """

    tensorboard: bool | str = False
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None


class RunConfig(_Section):
    """Everything that is decided before a run starts.

    ``model``, ``data``, ``train``, ``checkpoint`` and ``snapshot`` are those of
    ``workers.settings``.
    """

    run: RunSection
    workers: WorkersSection
    cluster: ClusterSection = ClusterSection()
    capacity: tuple[Alternative, ...] = ()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    parallel: ParallelSection = ParallelSection()
    recovery: RecoverySection = RecoverySection()
    notices: NoticesSection = NoticesSection()
    logging: LoggingSection = LoggingSection()

    @property
    def patience(self) -> float:
        """Return how many times the observed p99 a step may take."""
        return self.recovery.patience

    @property
    def controller_stopped_s(self) -> float:
        """Return how long a signal may stop the controller before it is ended."""
        return _CONTROLLER_STOPPED_S * self.patience / PATIENCE

    @property
    def is_page_local(self) -> bool:
        """Return whether metrics and status are only for the controller's own machine."""
        is_auto = self.cluster.metrics_host == AUTO
        return self.cluster.metrics_host == "loopback" or (is_auto and not self.cluster.address)

    def worker_resources(self) -> dict[str, float]:
        """Return what one worker needs, in Ray's terms."""
        resources = {"CPU": self.cluster.cpus_per_worker}
        if self.cluster.gpus_per_worker:
            resources["GPU"] = float(self.cluster.gpus_per_worker)
        return resources

    def alternative_names(self) -> list[str]:
        """Return a short name of each of ``alternatives``, for people and metrics."""
        return [
            " ".join((str(number), *each.selector().values()))
            for number, each in enumerate(self.capacity)
        ] or ["any"]

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens the built-in model sees in a step; 0 for a script of the user."""
        return 0 if self.run.script else self.train.global_batch * self.data.sequence_length

    def alternatives(self) -> tuple[Alternative, ...]:
        """Return what may be asked for, the first first; each has all of its resources."""
        needed = self.worker_resources()
        return tuple(
            each.model_copy(update={"resources": {**needed, **each.resources}})
            for each in self.capacity or (Alternative(),)
        )

    def cpus_per_local_node(self) -> int:
        """Return the CPUs of each simulated node, just enough for all workers."""
        workers_per_node = math.ceil(self.workers.max / self.cluster.local_nodes)
        return math.ceil(workers_per_node * self.cluster.cpus_per_worker)

    def settings(self) -> Settings:
        """Return the settings of the workers."""
        parallel = ParallelSettings(
            reshard_after_forward=self.parallel.reshard_after_forward,
            collective_timeout_s=self.parallel.collective_timeout_s,
        )
        return Settings(
            model=self.model,
            data=self.data,
            train=self.train,
            checkpoint=self.checkpoint,
            snapshot=self.snapshot,
            parallel=parallel,
            init=InitSettings(
                path=self.run.init_from,
                state=self.run.init_state,
                rename=tuple(self.run.init_rename.items()),
                missing=self.run.init_missing,
            ),
            script=self.run.script,
            arguments=self.run.arguments,
        )

    def watched(self) -> dict[str, str]:
        """Return who may tell a node of its end, as ``workers.keeper`` takes it."""
        asked = self.notices.model_dump()
        if asked["cloud"] == AUTO and self.cluster.address is None:
            asked["cloud"] = "none"
        return asked

    def settings_json(self) -> dict[str, Any]:
        """Return ``settings`` as plain values."""
        return self.settings().to_json()

    def rules(self) -> RunRules:
        """Return the rules that the controller decides by."""
        recovery = self.recovery
        return RunRules(
            run=self.run.name,
            min_workers=self.workers.min,
            max_workers=self.workers.max,
            standby_per_node=self.workers.standby_per_node,
            total_steps=self.train.steps,
            checkpoint_every=_common_multiple(self.checkpoint, self.snapshot),
            layout=self.parallel.layout_rules(),
            budgets=BudgetRules(
                infrastructure_max=recovery.infrastructure_failures_max,
                preemption_max=recovery.preemptions_max,
                user_max=recovery.user_errors_max,
                stuck_max=recovery.stuck_attempts_max,
            ),
            redundancy=RedundancyRules(
                tolerance=self.snapshot.tolerance,
                preference=Preference(self.snapshot.mechanism),
            ),
            cadence=CadenceRules(
                has_snapshots=bool(self.snapshot.every_steps),
                chooses_snapshots=self.snapshot.every_steps == AUTO,
                chooses_checkpoints=self.checkpoint.every_steps == AUTO,
            ),
            capacity=CapacityRules(
                usd_per_hour=tuple(each.usd_per_hour for each in self.alternatives())
            ),
            sharing=SharingRules(
                priority=self.run.priority,
                needs=tuple(sorted(self.alternatives()[0].resources.items())),
            ),
            bounds=_bounds(recovery),
        )

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load(
    path_or_text: str, overrides: Sequence[str] = (), *, look: Look | None = None
) -> RunConfig:
    """Return the configuration in a YAML file, or in YAML text, under ``overrides``.

    Relative paths become absolute, because workers run in other directories.

    Args:
        path_or_text: A path, an fsspec URL, the name of an example such as ``local/small``, or
            text of more than one line.
        overrides: ``section.key=value`` in order; values are read as YAML.
        look: Checks more than the text, such as ``orchestrator.config.run_preflight``.

    Raises:
        ConfigError: With every problem at once, each with its place and what would be right.
    """
    source = _read(path_or_text)
    override(source, overrides)
    _apply_environment(source)
    config = _validate(source, look)
    if config is None:
        raise _refused(source)
    return _resolved(config)


def demo_config(directory: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of ``everstep demo`` for ``directory``, under ``overrides``.

    It brings its own nodes, so ``RAY_ADDRESS`` is ignored.
    """
    text = files("orchestrator.driver").joinpath("demo.yaml").read_text(encoding="utf-8")
    source = parse(text, name="demo.yaml")
    override(source, [f"run.directory={yaml.safe_dump(directory)}", *overrides])
    config = _validate(source)
    if config is None:
        raise _refused(source)
    return _resolved(config)


def _read(path_or_text: str) -> Source:
    if "\n" in path_or_text:
        return parse(path_or_text, name="text")
    examples = _examples()
    example = examples.get(path_or_text.removesuffix(".yaml"))
    try:
        store, path = open_store(path_or_text)
        if example is not None and not store.exists(path):
            return parse(example.read_text(encoding="utf-8"), name=example.name)
        text = store.read(path).decode()
    except (UcpError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path_or_text} cannot be read as a configuration: {error}; examples that come with "
            f"everstep: {', '.join(examples)}",
            problems=[str(error)],
        ) from error
    return parse(text, name=Path(path_or_text).name)


def _examples() -> dict[str, Path]:
    """Return the example configurations by name, such as ``local/small``.

    They lie in this package in a wheel, and in ``cluster_configs`` in a checkout, beside files for
    Ray and Kubernetes, which have no section ``run``.
    """
    package = Path(__file__).parents[1]
    places = (package / "examples", package.parent / "cluster_configs")
    root = next((place for place in places if place.is_dir()), package)
    found = [path for path in sorted(root.rglob("*.yaml")) if "\nrun:\n" in path.read_text("utf-8")]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in found}


def _apply_environment(source: Source) -> None:
    """Use ``RAY_ADDRESS`` unless the file or the command line names a cluster."""
    address = os.environ.get("RAY_ADDRESS", "")
    cluster = source.document.setdefault("cluster", {})
    asked_here = source.places.get(("cluster", "local_nodes")) == "command line"
    if address and not asked_here and isinstance(cluster, dict) and not cluster.get("address"):
        cluster["address"] = address
        source.places["cluster", "address"] = "RAY_ADDRESS"


def _validate(source: Source, look: Look | None = None) -> RunConfig | None:
    """Return the configuration, or None with every problem added to ``source``."""
    if any(not problem.path for problem in source.problems):
        return None  # a text that is no mapping has no keys to check
    config = None
    try:
        config = RunConfig.model_validate(source.document)
    except ValidationError as error:
        for detail in error.errors():
            # A wrong interval is reported twice: as a number and as a word.
            if detail["loc"][-1] != "str":
                source.problems.append(_field_problem(source, detail))
    part, broken = _well_formed_part(source)
    crossed = _cross_problems(source, part, broken)
    source.problems.extend(crossed)
    if look is not None:
        doubtful = _defaulted(source, broken) | {problem.path for problem in crossed}
        source.problems.extend(
            source.problem(tuple(problem.path.split(".")), problem.message)
            for problem in look(_resolved(part), doubtful)
        )
    return None if source.problems else config


def _refused(source: Source) -> ConfigError:
    lines = [str(problem) for problem in source.problems]
    count = f"{len(lines)} problems" if len(lines) > 1 else "1 problem"
    listing = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{source.name} has {count}:{listing}", problems=lines)


def _field_problem(source: Source, detail: Any) -> Problem:
    path: KeyPath = tuple(detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        known = _known_keys(path[:-1])
        what = "section" if len(path) == 1 else "key"
        return source.problem(path, f"is no {what}; {did_you_mean(str(path[-1]), known)}")
    if kind == "missing":
        return source.problem(path, f"is missing; write for example {_EXAMPLES[dotted(path)]}")
    if kind == "tuple_type":
        return source.problem(path, f"must be a list, such as [{{spot: true}}], not {value!r}")
    if kind in {"model_type", "dataclass_type"}:
        return source.problem(path, f"must be a section with keys, not {value!r}")
    if path[:2] == ("logging", "tensorboard"):
        return source.problem(path[:2], f"must be true or a directory, not {value!r}")
    if path[-1] == "int":
        return source.problem(path[:-1], f"must be a number of steps or {AUTO}, not {value!r}")
    message = str(detail["msg"])
    message = message.removeprefix("Input should be ").removeprefix("a valid ")
    return source.problem(path, f"must be {message.split(',')[0]}, not {value!r}")


#: What a required key may look like.
_EXAMPLES = {
    "run": "run: {directory: runs/first}",
    "run.directory": "directory: runs/first",
    "workers": "workers: {max: 4}",
    "workers.max": "max: 4",
    "logging.wandb.project": "project: my-models",
    "logging.mlflow.experiment": "experiment: my-models",
}


def _known_keys(path: KeyPath) -> list[str]:
    if not path:
        return list(RunConfig.model_fields)
    kind: Any = RunConfig.model_fields[str(path[0])].annotation
    kind = next(iter(get_args(kind)), kind)  # that of one in a list
    if len(path) > 1 and path[0] == "logging":
        kind = next(iter(get_args(kind.model_fields[str(path[1])].annotation)))
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(kind.model_fields)


def _cross_problems(source: Source, config: RunConfig, broken: Collection[str]) -> list[Problem]:
    """Return what is wrong with values and between keys, for all well-formed keys.

    The others have their defaults, and are reported elsewhere.
    """
    found: list[tuple[str, str]] = [
        (path, message)
        for path, _, message in (
            line.partition(": ") for line in settings_problems(config.settings())
        )
    ]
    found += _worker_problems(config)
    found += _axis_problems(config)
    if (host := config.cluster.metrics_host) not in _HOSTS:
        found.append(("cluster.metrics_host", f"{host!r} is none of {', '.join(_HOSTS)}"))
    found += [*_capacity_problems(config), *_notice_problems(config.notices)]
    if config.run.arguments and not config.run.script:
        found.append(("run.arguments", "are for a run.script, and there is none; name one"))
    return [
        source.problem(tuple(path.split(".")), message)
        for path, message in found
        if path not in broken
    ]


def _well_formed_part(source: Source) -> tuple[RunConfig, set[str]]:
    """Return the configuration without the malformed keys, and those keys."""
    document: dict[str, Any] = {"run": {"directory": "x"}, "workers": {"max": 1}}
    broken: set[str] = set()
    for name in RunConfig.model_fields:
        if name not in source.document:
            continue
        section = source.document[name]
        try:
            RunConfig.model_validate({**document, name: section})
        except ValidationError as error:
            bad = {str(detail["loc"][1]) for detail in error.errors() if len(detail["loc"]) > 1}
            broken |= {f"{name}.{key}" for key in bad}
            # Without a valid workers.max nothing bounds workers.min.
            broken |= {"workers.min"} if "workers.max" in broken else set()
            if name == "capacity":
                continue
            kept = section if isinstance(section, dict) else {}
            section = {
                **document.get(name, {}),
                **{key: value for key, value in kept.items() if key not in bad},
            }
        document[name] = section
    return RunConfig.model_validate(document), broken


def _defaulted(source: Source, broken: Collection[str]) -> set[str]:
    """Return the keys whose value in the well-formed part is not the user's."""
    found: set[str] = set()
    for name, field in RunConfig.model_fields.items():
        known = {f"{name}.{key}" for key in _known_keys((name,))}
        section = source.document.get(name, None if field.is_required() else {})
        found |= known if not isinstance(section, dict) else known.intersection(broken)
    return found


def _notice_problems(asked: NoticesSection) -> list[tuple[str, str]]:
    found = []
    allowed = (AUTO, *CLOUDS, "none")
    if asked.cloud not in allowed:
        known = ", ".join(allowed)
        message = f"{asked.cloud!r} is none of {known}; else set notices.command"
        found.append(("notices.cloud", message))
    service = urlsplit(asked.endpoint)
    if asked.endpoint and (service.scheme != "http" or not service.netloc):
        message = f"must be like http://169.254.169.254, not {asked.endpoint!r}"
        found.append(("notices.endpoint", message))
    if asked.file and not Path(asked.file).is_absolute():
        found.append(("notices.file", f"{asked.file!r} must be a whole path: it is on every node"))
    return found


def _worker_problems(config: RunConfig) -> list[tuple[str, str]]:
    least, most = config.workers.min, config.workers.max
    rules, copies = config.parallel.layout_rules(), config.parallel.dp_replicate
    if copies > 1 and config.train.deterministic:
        # The fixed tree of sums covers shards, not copies.
        message = (
            f"{copies} copies are not summed in a fixed order: write 1, or "
            "train.deterministic: false"
        )
        return [("parallel.dp_replicate", message)]
    if least > most:
        return [("workers.min", f"{least} is more than workers.max={most}")]
    used = usable(most, rules)
    if used >= least:
        return []
    enough = math.ceil(least / rules.multiple) * rules.multiple
    message = (
        f"{least} cannot be reached: {rules} takes workers in multiples of {rules.multiple}, so of "
        f"workers.max={most} only {used} can train; raise workers.max to "
        f"{enough}" + (f" or lower workers.min to {used}" if used else "")
    )
    return [("workers.min", message)]


def _axis_problems(config: RunConfig) -> list[tuple[str, str]]:
    """Return what tensor parallelism cannot cut, and what gives stages too little to do."""
    found: list[tuple[str, str]] = []
    parallel, rules = config.parallel, config.parallel.layout_rules()
    most = choose(config.workers.max, rules)
    passes = -(-config.train.num_micro_batches // most.dp) if most is not None else parallel.pp
    if passes < parallel.pp:
        message = (
            f"{parallel.pp} stages need as many micro-batches each; with workers.max="
            f"{config.workers.max} there are {passes}: raise train.global_batch or lower "
            "train.micro_batch"
        )
        found.append(("parallel.pp", message))
    if config.run.script or config.model.preset not in PRESETS:
        return found
    shape = model_shape(config.model)
    sizes = {name: getattr(shape, name) for name in ("num_kv_heads", "ffn_dim", "vocab_size")}
    uneven = [f"model.{name}={size}" for name, size in sizes.items() if size % parallel.tp]
    if uneven:
        found.append(("parallel.tp", f"{parallel.tp} does not divide {', '.join(uneven)}"))
    if parallel.pp > shape.num_layers:
        message = f"{parallel.pp} is more than model.num_layers={shape.num_layers}"
        found.append(("parallel.pp", message))
    if parallel.pp > 1 and shape.tied:
        message = (
            "the embedding is the output layer, too, and they are on different stages: write "
            "model.tied: false, or parallel.pp: 1"
        )
        found.append(("parallel.pp", message))
    return found


def _capacity_problems(config: RunConfig) -> list[tuple[str, str]]:
    """Return what is wrong with alternatives: each names the place of the one that has it."""
    found: list[tuple[str, str]] = []
    for number, each in enumerate(config.capacity):
        where, num_gpus = f"capacity.{number}", config.cluster.gpus_per_worker
        if each.resources.get("GPU", num_gpus) != num_gpus:
            message = f"must be cluster.gpus_per_worker={num_gpus}, or left out"
            found.append((f"{where}.resources.GPU", message))
        if config.cluster.address is None and (each.selector() or each.resources):
            message = (
                "simulated nodes are all alike: name a cluster by cluster.address or --address, "
                "or leave out resources, labels, zone and spot"
            )
            found.append((where, message))
    return found


def _common_multiple(checkpoint: CheckpointSettings, snapshot: SnapshotSettings) -> int:
    """Return a divisor of every step that is committed, in memory or in storage."""
    # An interval that the run chooses may be any number, and with snapshots an attempt that ends
    # early leaves its last step in memory, whichever that is.
    is_any = bool(snapshot.every_steps) or not isinstance(checkpoint.every_steps, int)
    return 1 if is_any else int(checkpoint.every_steps)


def _bounds(recovery: RecoverySection) -> Bounds:
    usual = Bounds()
    scale = recovery.patience / PATIENCE
    scaled = ("grace_s", "start_s", "form_s", "fence_s", "kill_s", "read_s", "yield_s", "survey_s")
    bounds = {name: getattr(usual, name) * scale for name in scaled}
    bounds["grace_s"] = min(bounds["grace_s"], recovery.capacity_wait_s)
    return replace(usual, capacity_s=recovery.capacity_wait_s, **bounds)


def _resolved(config: RunConfig) -> RunConfig:
    data = config.data
    data = replace(
        data,
        source=data.source if data.source == STDLIB else _absolute(data.source),
        tokenizer=_absolute(data.tokenizer),
        cache_directory=_absolute(data.cache_directory),
    )
    directory = _absolute(config.run.directory)
    run = config.run.model_copy(
        update={
            "directory": directory,
            "name": config.run.name or directory.rstrip("/").rsplit("/", 1)[-1],
            "script": _absolute(config.run.script),
            "init_from": _absolute(config.run.init_from),
        }
    )
    tensorboard = config.logging.tensorboard
    if isinstance(tensorboard, str):
        tensorboard = _absolute(tensorboard)
    logging = config.logging.model_copy(update={"tensorboard": tensorboard})
    return config.model_copy(update={"run": run, "data": data, "logging": logging})


def _absolute(path: str) -> str:
    if not path or "://" in path:
        return path
    return str(Path(path).expanduser().absolute())
