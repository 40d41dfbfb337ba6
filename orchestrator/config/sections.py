"""The sections of a configuration that only the controller needs: each key, meaning and default.

Sections that workers also need are in ``workers.settings``.
"""

from math import inf
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from orchestrator.detection import PATIENCE
from orchestrator.traffic import Topology
from workers.settings import AUTO

_GBIT_BYTES: Final = 1e9 / 8


class Section(BaseModel):
    """Base of all sections: checks its keys when it is made, and never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClusterSection(Section):
    """Where the workers run.

    Attributes:
        address: A Ray cluster, such as ``auto`` or ``10.0.0.1:6379``. Default: ``RAY_ADDRESS`` if
            that is set, else simulated nodes on this machine.
        local_nodes: Number of simulated nodes.
        cpus_per_worker: CPUs that Ray reserves for one worker.
        gpus_per_worker: GPUs of one worker; 0 trains on the CPU. With 0.25, four workers share a
            GPU: each has a quarter of its memory, and they take turns.
        memory_gib_per_worker: Memory of a worker's device, to refuse models that cannot fit.
            Default: an equal share of this machine's memory for simulated nodes that train on the
            CPU; elsewhere memory is not checked.
        metrics_host: Which machines can reach the metrics and status page: ``cluster`` (by the
            head's address), ``loopback`` (the head only), or ``auto``: ``loopback`` for simulated
            nodes, else ``cluster``.
        metrics_port: Port of the controller's metrics and status; 0 picks a free one.
        rack_label: A Ray label of the nodes. Nodes with the same value fail together, as in a rack
            or a zone, and do not protect each other's snapshots. Default: each node fails alone.
    """

    address: str | None = Field(default=None, min_length=1)
    local_nodes: int = Field(default=2, ge=1, le=256)
    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: float = Field(default=0.0, ge=0, le=1)
    memory_gib_per_worker: float | None = Field(default=None, gt=0)
    metrics_host: Literal["auto", "cluster", "loopback"] = "auto"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    rack_label: str = ""


class TopologySection(Section):
    """The network between the nodes; ``everstep plan`` and the choice of keepers for copies use it.

    While a run trains, its racks are those that ``cluster.rack_label`` names.

    Attributes:
        racks: The nodes of each rack, by address. A node that is not listed is its own rack.
        zones: The racks of each zone.
        rails: Network cards of a node. Rank i of a node uses card i modulo ``rails``.
        node_gbit_s: Speed of a card, one way.
        spines: Equal-cost paths between two racks: uplinks of a rack for each rail.
        uplink_gbit_s: Speed of an uplink, one way. Default: ``node_gbit_s``.
        zone_gbit_s: Speed between a zone and the others, one way. Default: only the uplinks of its
            racks limit it.
    """

    racks: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    zones: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    rails: int = Field(default=1, ge=1)
    node_gbit_s: float = Field(default=100.0, gt=0)
    spines: int = Field(default=1, ge=1)
    uplink_gbit_s: float | None = Field(default=None, gt=0)
    zone_gbit_s: float | None = Field(default=None, gt=0)

    def topology(self) -> Topology:
        """Return the links, in bytes a second."""
        zone, uplink = self.zone_gbit_s, self.uplink_gbit_s or self.node_gbit_s
        return Topology(
            racks={node: rack for rack, nodes in self.racks.items() for node in nodes},
            zones={rack: zone for zone, racks in self.zones.items() for rack in racks},
            rails=self.rails,
            node_bytes_s=self.node_gbit_s * _GBIT_BYTES,
            spines=self.spines,
            uplink_bytes_s=uplink * _GBIT_BYTES,
            zone_bytes_s=inf if zone is None else zone * _GBIT_BYTES,
        )


class Alternative(Section):
    """Room for one worker that the run may request.

    The run requests the alternatives of ``capacity`` in order. It also requests the next one if
    the provider has no machine for this one, or if none came within three times the usual time
    (three minutes until the first has come). When a better one is granted, the workers move back.

    Attributes:
        resources: Resources by Ray's names; they add to those of ``cluster`` or replace them.
        labels: Labels of its node, such as ``{ray.io/accelerator-type: L4}``.
        zone: Zone of its node, as in Ray's label ``ray.io/availability-zone``.
        spot: Whether its node is on the spot market, by ``ray.io/market-type``. Default: either.
        usd_per_hour: Price of the room for one worker; the run computes its cost from it. Set it
            for all alternatives or for none.
    """

    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    zone: str = ""
    spot: bool | None = None
    usd_per_hour: float = Field(default=0.0, ge=0)

    def selector(self) -> dict[str, str]:
        """Return the labels that its node needs."""
        market = "" if self.spot is None else "spot" if self.spot else "on-demand"
        own = {"ray.io/availability-zone": self.zone, "ray.io/market-type": market}
        return {**self.labels, **{label: value for label, value in own.items() if value}}


class WorkersSection(Section):
    """How many workers train.

    Attributes:
        max: Most workers that train; the run always requests this many.
        min: Fewest workers that train; with fewer the run waits for capacity.
        standby_per_node: Warm processes that a node keeps to replace a dead worker at once.
    """

    max: int = Field(ge=1)
    min: int = Field(default=1, ge=1)
    standby_per_node: int = Field(default=0, ge=0, le=8)


class RecoverySection(Section):
    """How long the run waits, and when it gives up.

    Attributes:
        patience: How many times the observed p99 a step may take before the run examines it. Most
            other bounds of waits scale with it. A larger value reacts later and raises fewer false
            alarms.
        capacity_wait_s: The run fails after this long with fewer than ``workers.min`` workers, or
            after storage that it needs to resume was silent for as long.
        infrastructure_failures_max: The run fails after more crashes, hangs and lost nodes than
            this within an hour.
        preemptions_max: The same for nodes that the provider takes with notice.
        user_errors_max: The same for exceptions of single ranks. The run recognises a bug in the
            script sooner, because it repeats.
        stuck_attempts_max: The run fails after more attempts in a row than this without a new
            committed step. In a run that has trained, attempts that lost a peer for an unknown
            reason end it only after an hour.
    """

    patience: float = Field(default=PATIENCE, ge=1.5, le=100.0)
    capacity_wait_s: float = Field(default=86400.0, gt=0)
    infrastructure_failures_max: int = Field(default=1000, ge=0)
    preemptions_max: int = Field(default=10000, ge=0)
    user_errors_max: int = Field(default=3, ge=0)
    stuck_attempts_max: int = Field(default=12, ge=1)


class NoticesSection(Section):
    """Sources of notices that a node will be taken; Ray, Kubernetes and Slurm need no key.

    Attributes:
        cloud: The cloud whose metadata service each node asks: ``aws``, ``gcp``, ``azure`` or
            ``none``. ``auto`` detects it from the machine's firmware; simulated nodes then ask
            none.
        endpoint: Address of that service instead of the link-local one.
        file: A file on each node that exists while the node is under notice. Its text starts with a
            time in ISO 8601, or with a number of seconds from the time at which the file was
            written.
        command: A command that prints such a text, or nothing while there is no notice.
    """

    cloud: str = AUTO
    endpoint: str = ""
    file: str = ""
    command: str = ""


class WandbSection(Section):
    """A run of Weights & Biases. The key comes from ``WANDB_API_KEY`` or ``wandb login``.

    Attributes:
        project: Its project.
        entity: User or team; the service's default if empty.
        name: Name of the run; ``run.name`` if empty.
        group: Group of runs.
        tags: Tags of the run.
        mode: "online", or "offline", which writes to the run directory for ``wandb sync``.
    """

    project: str = Field(min_length=1)
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"


class MlflowSection(Section):
    """A run of MLflow.

    Attributes:
        experiment: Name of the experiment; the service creates it if it does not exist.
        tracking_uri: Address of the server; ``MLFLOW_TRACKING_URI`` if empty.
        name: Name of the run; ``run.name`` if empty.
    """

    experiment: str = Field(min_length=1)
    tracking_uri: str = ""
    name: str = ""


class LoggingSection(Section):
    """Services to which the controller also writes the run's curve; one curve spans all attempts.

    The controller's node needs their packages and their keys.

    Attributes:
        tensorboard: True for ``RUN_DIR/tensorboard``, or a directory.
        wandb: Weights & Biases.
        mlflow: MLflow.
    """

    tensorboard: bool | str = False
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None
