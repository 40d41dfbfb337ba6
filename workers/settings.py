"""The settings of a training: model, data, optimizer, checkpoints, snapshots, sharding.

Frozen values without torch, so that the orchestrator can build and check them anywhere.
``problems`` returns every problem at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from workers.errors import SettingsError
from workers.models import BYTE_VOCAB_SIZE, PRESETS, ModelShape, resolve, shape_problems

__all__ = [
    "AUTO",
    "CheckpointSettings",
    "DataSettings",
    "InitSettings",
    "ModelSettings",
    "NotFiniteSettings",
    "ParallelSettings",
    "Settings",
    "SnapshotSettings",
    "TrainSettings",
    "model_shape",
    "problems",
]

SCHEDULES: Final = ("cosine", "linear", "constant")
PRECISIONS: Final = ("fp32", "bf16")
SKIP, STOP, IGNORE = "skip", "stop", "ignore"
#: An interval chosen from measured costs and failures.
AUTO: Final = "auto"
#: The intervals before anything was measured.
_SNAPSHOT_STEPS, _CHECKPOINT_STEPS = 1, 10
INIT_STATES: Final = ("weights", "all")
MECHANISMS: Final = ("auto", "copy", "parity")
TOLERANCE_MAX: Final = 2
STDLIB: Final = "stdlib"
_STEPS_WAITED: Final = 30
_FORMING_S: Final = 60.0
_WARMUP_STEPS: Final = 20
NUM_BETAS: Final = 2

#: Before the folder of a Hugging Face model.
_FOLDER: Final = "hf:"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which decoder to train.

    Attributes:
        preset: A name in ``workers.models.PRESETS``, which the others override unless None. Or
            ``hf:FOLDER``, a local folder with the ``config.json`` of a causal language model of
            Hugging Face; a new run starts from the weights in it, if there are any.
        vocab_size: Number of token ids.
        dim: Width.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        ffn_dim: Width of the feed-forward layers.
        tied: Whether the embedding is the output layer, too.
    """

    preset: str = "small"
    vocab_size: int | None = None
    dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    tied: bool | None = None

    @property
    def folder(self) -> str:
        """Return the folder of a Hugging Face model; "" if it is a preset."""
        return self.preset.removeprefix(_FOLDER) if self.preset.startswith(_FOLDER) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The text to train on, and how it is cut into samples.

    Attributes:
        source: "stdlib" for the Python standard library's own source files, or a glob of text
            or ``.jsonl`` files, local or as a URL.
        tokenizer: A Hugging Face ``tokenizer.json``; "" for bytes.
        text_field: The field of a JSON line that holds the text.
        sequence_length: Tokens that a sample predicts.
        seed: Seed of the order of samples.
        validation_share: Share of the documents that is held out.
        validation_samples: Maximum number of held-out samples in a validation, always the same.
        cache_directory: Directory for tokens, shared by the processes of a node; "" for the
            machine's temporary directory.
    """

    source: str = STDLIB
    tokenizer: str = ""
    text_field: str = "text"
    sequence_length: int = 128
    seed: int = 0
    validation_share: float = 0.05
    validation_samples: int = 64
    cache_directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFiniteSettings:
    """What to do with an update whose loss or gradient norm is NaN or infinite on any worker.

    Attributes:
        action: "skip" leaves it out on all workers: weights, buffers and optimizer stay as they
            were, and the step counts. "stop" ends the run before it, "ignore" takes it.
        most: With "skip", so many in a row end the run.
    """

    action: str = SKIP
    most: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The optimization, the same for any number of workers.

    Attributes:
        steps: Optimizer steps of the whole run.
        global_batch: Samples per step over all workers.
        micro_batch: Samples per forward pass; divides ``global_batch``.
        lr: Peak learning rate.
        warmup_steps: Steps of linear increase to ``lr``; None for 20, or all of a shorter run.
        schedule: The learning rate after the warm-up: "cosine", "linear" or "constant".
        lr_min_ratio: Learning rate of the last step divided by ``lr``.
        weight_decay: AdamW's weight decay of matrices; vectors (norms) have none.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        clip_norm: Maximum gradient norm; 0 for no clipping.
        precision: "fp32", or "bf16" to compute in bfloat16 with fp32 masters.
        seed: Seed of initial weights and dropout.
        deterministic: Sum gradients in one order for any number of workers, so that the weights
            are bit-identical.
        validation_every: Steps between two validations; 0 to validate at the end only.
        not_finite: Updates that are NaN or infinite.
    """

    steps: int = 200
    global_batch: int = 16
    micro_batch: int = 2
    lr: float = 3e-3
    warmup_steps: int | None = None
    schedule: str = "cosine"
    lr_min_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    deterministic: bool = False
    validation_every: int = 0
    not_finite: NotFiniteSettings = field(default_factory=NotFiniteSettings)

    def __post_init__(self) -> None:
        """Take a dictionary of ``not_finite``, too."""
        given: Any = self.not_finite
        if isinstance(given, Mapping):
            object.__setattr__(self, "not_finite", NotFiniteSettings(**given))

    @property
    def num_warmup_steps(self) -> int:
        """Return the number of warm-up steps."""
        if self.warmup_steps is None:
            return min(_WARMUP_STEPS, self.steps)
        return self.warmup_steps

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of a step over all workers."""
        return self.global_batch // self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """How often state goes to storage.

    Attributes:
        every_steps: Steps between two checkpoints. "auto" starts with 10, then uses the interval
            with the least cost, given measured checkpoint times and failures, up to 10 minutes of
            work. The last step is always saved, and the newest one if a run ends early. Recovery
            uses newer snapshots in memory.
        keep: Number of committed checkpoints to keep; 0 keeps all.
        fsync: Whether to force files to disk before the commit. Without it a checkpoint survives
            its process, but perhaps not its machine.
        threads: Threads per worker that read while loading.
    """

    every_steps: int | str = _CHECKPOINT_STEPS
    keep: int = 3
    fsync: bool = False
    threads: int = 2

    @property
    def first_every(self) -> int:
        """Return the interval at the start of an attempt."""
        return self.every_steps if isinstance(self.every_steps, int) else _CHECKPOINT_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How often state goes to the memory of the node's keeper, and how it is protected there.

    Attributes:
        every_steps: Steps between two snapshots; 0 for none, so that only storage is left. "auto"
            starts with 1 and takes fewer if they would cost more than 2 % of step time.
        node_memory_mib: Limit for all snapshots on a node, copies of other nodes' included; 0 for
            half of the memory available when the node's keeper starts, less what other runs on
            the node may still take.
        send_mib_per_s: Limit for what a node's keeper sends to other nodes, for copies and
            recovery; 0 for no limit.
        tolerance: How many nodes of each group of at most 8 may be lost at once while the newest
            snapshots stay complete in memory: 0, 1 or 2, if there are as many other nodes.
        mechanism: "copy" keeps each snapshot on ``tolerance`` other nodes; it sends nothing if
            data-parallel replicas there have the same state. "parity" keeps 1/(k-1) of a snapshot
            on each of k nodes, or twice 1/(k-2) for a tolerance of 2; the former sends no data
            between replicas. "auto" uses copies if memory allows, else parity.
    """

    every_steps: int | str = _SNAPSHOT_STEPS
    node_memory_mib: int = 0
    send_mib_per_s: int = 0
    tolerance: int = 1
    mechanism: str = AUTO

    @property
    def first_every(self) -> int:
        """Return the interval at the start of an attempt; 0 if there are no snapshots."""
        return self.every_steps if isinstance(self.every_steps, int) else _SNAPSHOT_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """How the model is sharded; the degrees of parallelism come with each attempt.

    Attributes:
        reshard_after_forward: Whether a block's gathered parameters are dropped after its
            forward and backward pass: less memory, more gathers. Models of up to 64 MiB stay
            gathered.
        collective_timeout_s: Time after which a collective fails; ten times as long while ranks
            load or commit a version. A backstop: faults are usually found much sooner. Raise it
            if one rank works for longer while the others wait for it, or it is judged to hang.
        gpu_share: The part of its GPU that a worker has; below 1 others share the GPU.
    """

    reshard_after_forward: bool = True
    collective_timeout_s: float = 300.0
    gpu_share: float = 1.0

    @property
    def forming_timeout_s(self) -> float:
        """Return the time after which groups fail to form: no work of a script is in that."""
        return min(_FORMING_S, self.collective_timeout_s)

    def timeout_s(self, step_s: float) -> float:
        """Return the timeout of collectives if a step takes ``step_s``.

        It is longer than ``orchestrator.detection`` needs to find a hung rank: ten slow steps.
        """
        return max(self.collective_timeout_s, _STEPS_WAITED * step_s)

    @property
    def patient_timeout_s(self) -> float:
        """Return the timeout while ranks load or save, which takes some of them longer."""
        return 10 * self.collective_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSettings:
    """The checkpoint that a new run starts from. A run that resumes does not look at it.

    Attributes:
        path: A checkpoint in any format that ``ucp`` opens, a path or URL; "" for new weights.
        state: "weights", or "all" to also load the optimizer state.
        rename: ``(the checkpoint's name, the model's)``, such as ``("transformer.*", "model.*")``;
            a dictionary becomes that.
        missing: Names, with ``*``, of parameters that may begin with new values.
    """

    path: str = ""
    state: str = "weights"
    rename: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make the names hashable, as all settings are."""
        pairs: Any = self.rename.items() if isinstance(self.rename, Mapping) else self.rename
        object.__setattr__(self, "rename", tuple((theirs, ours) for theirs, ours in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a training.

    Attributes:
        model: The built-in model.
        data: The text of the built-in training, and the order of samples.
        train: The optimization.
        checkpoint: State in storage.
        snapshot: State in memory.
        parallel: Sharding.
        init: The checkpoint to start from.
        script: A training script that calls ``everstep.run``; "" trains the built-in
            language model.
        arguments: The script's ``sys.argv[1:]``.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    init: InitSettings = field(default_factory=InitSettings)
    script: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def start(self) -> InitSettings:
        """Return what a new run starts from: ``init``, or the weights in the model's folder."""
        folder = self.model.folder if not self.script else ""
        if self.init.path or not folder or not any(Path(folder).glob("*.safetensors")):
            return self.init
        return InitSettings(path=folder)

    def to_json(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values."""
        document = asdict(self)
        document["train"]["betas"] = list(self.train.betas)
        document["arguments"] = list(self.arguments)
        document["init"]["rename"] = [list(pair) for pair in self.init.rename]
        document["init"]["missing"] = list(self.init.missing)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Settings:
        """Return the settings of ``to_json``; missing names have their defaults.

        Raises:
            SettingsError: There are unknown names; lists all of them.
        """
        unknown: list[str] = []
        settings = _read(cls, document, "", unknown)
        if unknown:
            raise SettingsError("; ".join(unknown), problems=unknown)
        return settings


def model_shape(settings: ModelSettings) -> ModelShape:
    """Return the shape of the model in ``settings``."""
    names = [name.name for name in fields(settings) if name.name != "preset"]
    given = {name: getattr(settings, name) for name in names}
    return resolve(
        settings.preset, {name: value for name, value in given.items() if value is not None}
    )


def problems(settings: Settings) -> list[str]:
    """Return every problem of ``settings``, one line each, path first."""
    return [
        *_model_problems(settings),
        *_data_problems(settings.data),
        *_train_problems(settings.train),
        *_save_problems(settings),
        *_init_problems(settings.init),
    ]


def _read(kind: type[_T], document: dict[str, Any], path: str, unknown: list[str]) -> _T:
    assert is_dataclass(kind)
    known = {entry.name: entry for entry in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name not in known:
            unknown.append(f"{path}{name}: unknown name; one of {', '.join(sorted(known))}")
            continue
        factory: Any = known[name].default_factory
        if isinstance(factory, type) and is_dataclass(factory):
            values[name] = _read(factory, value, f"{path}{name}.", unknown)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _model_problems(settings: Settings) -> list[str]:
    model = settings.model
    if model.folder and not settings.script:
        return _folder_problems(model, has_tokenizer=bool(settings.data.tokenizer))
    if model.preset not in PRESETS:
        known = f"{', '.join(PRESETS)}, nor {_FOLDER}FOLDER with a config.json"
        return [f"model.preset: {model.preset!r} is none of {known}"]
    shape = model_shape(model)
    found = [f"model.{problem}" for problem in shape_problems(shape)]
    if not settings.data.tokenizer and shape.vocab_size < BYTE_VOCAB_SIZE:
        found.append(
            f"model.vocab_size: {shape.vocab_size} is too small for bytes, which need "
            f"{BYTE_VOCAB_SIZE}; raise it or set data.tokenizer"
        )
    return found


def _folder_problems(model: ModelSettings, *, has_tokenizer: bool) -> list[str]:
    given = [f.name for f in fields(model) if f.name != "preset" and getattr(model, f.name)]
    found = [f"model.{name}: config.json decides that with {model.preset}" for name in given]
    path = Path(model.folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return [*found, f"model.preset: {path} cannot be read: {error}"]
    vocab_size = config.get("vocab_size", BYTE_VOCAB_SIZE)
    if not has_tokenizer and vocab_size < BYTE_VOCAB_SIZE:
        found.append(
            f"model.preset: {path} has vocab_size={vocab_size}, bytes need {BYTE_VOCAB_SIZE}; set "
            "data.tokenizer"
        )
    return found


def _data_problems(data: DataSettings) -> list[str]:
    found = [] if data.source else ["data.source: is empty; set 'stdlib' or a glob of files"]
    found += _at_least("data", data, sequence_length=2, validation_samples=1, seed=0)
    if not 0 < data.validation_share < 1:
        found.append(
            f"data.validation_share: {data.validation_share} must be between 0 and 1, both excluded"
        )
    return found


def _train_problems(train: TrainSettings) -> list[str]:
    found = _at_least(
        "train", train, steps=1, global_batch=1, micro_batch=1, seed=0,
        validation_every=0, weight_decay=0, clip_norm=0,
    )  # fmt: skip
    if train.micro_batch >= 1 and train.global_batch % train.micro_batch:
        found.append(
            f"train.global_batch: {train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch}"
        )
    checks: list[tuple[bool, str]] = [
        (_finite(train.lr) and train.lr > 0, f"lr: {train.lr} must be above 0"),
        (0 <= train.lr_min_ratio <= 1, f"lr_min_ratio: {train.lr_min_ratio} must be in [0, 1]"),
        (train.eps > 0, f"eps: {train.eps} must be above 0"),
        (
            len(train.betas) == NUM_BETAS and all(0 <= beta < 1 for beta in train.betas),
            f"betas: {list(train.betas)} must be two numbers in [0, 1)",
        ),
        (
            0 <= train.num_warmup_steps <= max(train.steps, 0),
            f"warmup_steps: {train.warmup_steps} must be from 0 to train.steps={train.steps}",
        ),
        _one_of("schedule", train.schedule, SCHEDULES),
        _one_of("precision", train.precision, PRECISIONS),
        _one_of("not_finite.action", train.not_finite.action, (SKIP, STOP, IGNORE)),
        (
            train.not_finite.most >= 1,
            f"not_finite.most: {train.not_finite.most} must be at least 1",
        ),
    ]
    return found + [f"train.{text}" for right, text in checks if not right]


def _save_problems(settings: Settings) -> list[str]:
    found = _interval("checkpoint", settings.checkpoint.every_steps, least=1)
    found += _at_least("checkpoint", settings.checkpoint, keep=0, threads=1)
    if settings.checkpoint.keep == 1:
        found.append(
            "checkpoint.keep: 1 leaves no older checkpoint if the newest is damaged; use 2 or more"
        )
    snapshot = settings.snapshot
    found += _interval("snapshot", snapshot.every_steps, least=0)
    found += _at_least("snapshot", snapshot, node_memory_mib=0, send_mib_per_s=0, tolerance=0)
    if snapshot.tolerance > TOLERANCE_MAX:
        found.append(f"snapshot.tolerance: {snapshot.tolerance} must be at most {TOLERANCE_MAX}")
    right, text = _one_of("mechanism", snapshot.mechanism, MECHANISMS)
    found += [] if right else [f"snapshot.{text}"]
    timeout_s = settings.parallel.collective_timeout_s
    if not (_finite(timeout_s) and timeout_s > 0):
        found.append(f"parallel.collective_timeout_s: {timeout_s} must be above 0")
    return found


def _init_problems(init: InitSettings) -> list[str]:
    right, text = _one_of("init_state", init.state, INIT_STATES)
    found = [] if right else [f"run.{text}"]
    if not init.path and init != InitSettings():
        found.append("run.init_from: is empty, and the other keys of init need it; name it")
    found += [
        f"run.init_rename: {theirs!r} and {ours!r} need one '*' each, or none"
        for theirs, ours in init.rename
        if (theirs.count("*"), ours.count("*")) not in {(0, 0), (1, 1)}
    ]
    return found


def _interval(path: str, every_steps: int | str, *, least: int) -> list[str]:
    if isinstance(every_steps, int):
        right = every_steps >= least
        return [] if right else [f"{path}.every_steps: {every_steps} must be at least {least}"]
    if every_steps == AUTO:
        return []
    return [f"{path}.every_steps: {every_steps!r} is neither a number of steps nor {AUTO}"]


def _at_least(path: str, values: Any, **least: int) -> list[str]:
    return [
        f"{path}.{name}: {getattr(values, name)} must be at least {bound}"
        for name, bound in least.items()
        if not getattr(values, name) >= bound
    ]


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> tuple[bool, str]:
    return value in choices, f"{name}: {value!r} is none of {', '.join(choices)}"


_finite: Callable[[float], bool] = math.isfinite
