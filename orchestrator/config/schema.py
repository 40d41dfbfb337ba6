"""The configuration of a run, and what the controller and the workers derive from it."""

import math
from dataclasses import replace

import yaml

from orchestrator.config.sections import (
    Alternative,
    ClusterSection,
    LoggingSection,
    NoticesSection,
    RecoverySection,
    Section,
    TopologySection,
    WorkersSection,
)
from orchestrator.core import Bounds, RunRules
from orchestrator.detection import PATIENCE
from orchestrator.policies import (
    BudgetRules,
    CadenceRules,
    CapacityRules,
    LayoutRules,
    SharingRules,
)
from workers.settings import (
    AUTO,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    Settings,
    SnapshotSettings,
    TrainSettings,
)

#: With the default patience, a controller that a signal stopped is killed after this time. Training
#: does not need it in the meantime, and a debugger may stop it for a moment. A slow controller is
#: never killed.
_CONTROLLER_STOPPED_S = 10.0


class RunConfig(Section):
    """All settings that are decided before a run starts."""

    run: RunSettings
    workers: WorkersSection
    cluster: ClusterSection = ClusterSection()
    topology: TopologySection = TopologySection()
    capacity: tuple[Alternative, ...] = ()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    parallel: ParallelSettings = ParallelSettings()
    recovery: RecoverySection = RecoverySection()
    notices: NoticesSection = NoticesSection()
    logging: LoggingSection = LoggingSection()

    @property
    def controller_stopped_s(self) -> float:
        """Return how long a signal may stop the controller before it is killed."""
        return _CONTROLLER_STOPPED_S * self.recovery.patience / PATIENCE

    @property
    def is_page_local(self) -> bool:
        """Return whether metrics and status are only for the controller's own machine."""
        is_auto = self.cluster.metrics_host == AUTO
        return self.cluster.metrics_host == "loopback" or (is_auto and not self.cluster.address)

    def worker_resources(self) -> dict[str, float]:
        """Return the resources of one worker, in Ray's terms."""
        resources = {"CPU": self.cluster.cpus_per_worker}
        if self.cluster.gpus_per_worker:
            resources["GPU"] = self.cluster.gpus_per_worker
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
        """Return the alternatives of capacity in order, each with all of its resources."""
        needed = self.worker_resources()
        return tuple(
            each.model_copy(update={"resources": {**needed, **each.resources}})
            for each in self.capacity or (Alternative(),)
        )

    def workers_per_local_node(self) -> int:
        """Return how many workers each simulated node has room for, just enough for all."""
        return math.ceil(self.workers.max / self.cluster.local_nodes)

    def cpus_per_local_node(self) -> int:
        """Return the CPUs of each simulated node."""
        return math.ceil(self.workers_per_local_node() * self.cluster.cpus_per_worker)

    def settings(self) -> Settings:
        """Return the settings of the workers."""
        return Settings(
            run=self.run,
            model=self.model,
            data=self.data,
            train=self.train,
            checkpoint=self.checkpoint,
            snapshot=self.snapshot,
            parallel=self.parallel,
            gpu_share=self.cluster.gpus_per_worker or 1.0,
        )

    def layout_rules(self) -> LayoutRules:
        """Return the degrees of the full size, and which of them other sizes must keep."""
        wish = self.parallel
        return LayoutRules(
            dp_replicate=wish.dp_replicate,
            cp=wish.cp,
            tp=wish.tp,
            pp=wish.pp,
            ep=wish.ep,
            stages_per_worker=wish.stages_per_worker,
            fixed=wish.fixed,
            num_micro_batches=self.train.num_micro_batches,
        )

    def watched(self) -> dict[str, str]:
        """Return the arguments of ``workers.keeper.sources_of`` for the nodes of the run."""
        asked = self.notices.model_dump()
        if asked["cloud"] == AUTO and self.cluster.address is None:
            asked["cloud"] = "none"
        return asked

    def rules(self) -> RunRules:
        """Return the rules by which the controller decides."""
        recovery = self.recovery
        return RunRules(
            run=self.run.name,
            min_workers=self.workers.min,
            max_workers=self.workers.max,
            standby_per_node=self.workers.standby_per_node,
            total_steps=self.train.steps,
            checkpoint_every=_common_multiple(self.checkpoint, self.snapshot),
            layout=self.layout_rules(),
            budgets=BudgetRules(
                infrastructure_max=recovery.infrastructure_failures_max,
                preemption_max=recovery.preemptions_max,
                user_max=recovery.user_errors_max,
                stuck_max=recovery.stuck_attempts_max,
            ),
            snapshot=self.snapshot,
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
            topology=None if self.topology == TopologySection() else self.topology.topology(),
        )

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _common_multiple(checkpoint: CheckpointSettings, snapshot: SnapshotSettings) -> int:
    """Return a divisor of every step that is committed, in memory or in storage."""
    # An interval set to "auto" can be any number. With snapshots, an attempt that ends early leaves
    # its last step in memory, whichever it is.
    is_any = bool(snapshot.every_steps or checkpoint.best.value)
    is_any |= not isinstance(checkpoint.every_steps, int)
    return 1 if is_any else int(checkpoint.every_steps)


def _bounds(recovery: RecoverySection) -> Bounds:
    usual = Bounds()
    scale = recovery.patience / PATIENCE
    scaled = ("grace_s", "start_s", "form_s", "fence_s", "kill_s", "read_s", "yield_s", "survey_s")
    bounds = {name: getattr(usual, name) * scale for name in scaled}
    bounds["grace_s"] = min(bounds["grace_s"], recovery.capacity_wait_s)
    return replace(usual, capacity_s=recovery.capacity_wait_s, **bounds)
