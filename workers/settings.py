"""The sections of a configuration that workers need: each key, its meaning, bound and default.

Frozen values without torch, so that the orchestrator can build and check them anywhere. Its other
sections are in ``orchestrator.config.sections``. ``problems`` returns every problem at once.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen

from workers.models import BYTE_VOCAB_SIZE, PRESETS, ModelShape, resolve, shape_problems

SKIP, STOP, IGNORE = "skip", "stop", "ignore"
#: The run chooses the interval from measured costs and failures.
AUTO: Final = "auto"
#: Share of a GPU's memory that tensors may use: NCCL, CUDA and fragmentation take the rest.
USABLE_MEMORY: Final = 0.92
#: The intervals before any measurement.
_SNAPSHOT_STEPS, _CHECKPOINT_STEPS = 1, 10
STDLIB: Final = "stdlib"
_STEPS_WAITED: Final = 30
_FORMING_S: Final = 60.0
_WARMUP_STEPS: Final = 20
_NUM_BETAS: Final = 2

#: Prefix for the folder of a Hugging Face model.
_FOLDER: Final = "hf:"

#: Pydantic's names for the branches of an interval; the second branch adds nothing.
_INTERVAL: Final = "constrained-int"
_SECOND_BRANCH: Final = ("str", f"literal['{AUTO}']")
#: Placeholders for keys without a default, so that the others can be checked.
_REQUIRED: Final[dict[str, dict[str, Any]]] = {"run": {"directory": "x"}, "workers": {"max": 1}}

_T = TypeVar("_T")
_Count: TypeAlias = Annotated[int, Ge(0)]
_AtLeastOne: TypeAlias = Annotated[int, Ge(1)]
_Positive: TypeAlias = Annotated[float, Gt(0)]
_Beta: TypeAlias = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The name of the run, its directory, and what it trains.

    Attributes:
        directory: Run directory, a path or an fsspec URL that every node can reach.
        name: A name for people. Default: the last part of ``directory``.
        priority: A run that lacks workers takes them from runs of lower priority on its cluster,
            down to their ``workers.min``, and returns them later; runs of equal priority share
            evenly.
        script: A training script that calls ``everstep.run``. Without one, the run trains the
            built-in language model. If the configuration leaves out ``train.steps``,
            ``train.global_batch``, ``train.micro_batch`` or a key of Trainer's, the run asks the
            script for them.
        arguments: The script's ``sys.argv[1:]``, each as one text: ``["--width", "512"]``.
        resume_from: The version from which a resume continues: "newest", or "finite" for the newest
            with finite weights; steps after it are trained again.
        init_from: Path or URL of a checkpoint from which a new run starts, in any format that
            ``ucp`` opens: Hugging Face, DeepSpeed, Megatron, torch DCP, everstep. A resumed run
            ignores it.
        init_state: "weights", or "all" to also load the optimizer state.
        init_rename: The model's names by the checkpoint's: ``{"transformer.*": "model.*"}``.
        init_missing: Names, with ``*``, of parameters that may start with new values.
        init_rows: Names, with ``*``, of parameters that may have another number of rows, such as an
            embedding for more tokens. Rows that the checkpoint lacks start with new values and zero
            moments; rows that the model lacks are dropped.
    """

    directory: Annotated[str, MinLen(1)]
    name: str = ""
    priority: int = 0
    script: str = ""
    arguments: tuple[str, ...] = ()
    resume_from: Literal["newest", "finite"] = "newest"
    init_from: str = ""
    init_state: Literal["weights", "all"] = "weights"
    init_rename: dict[str, str] = field(default_factory=dict)
    init_missing: tuple[str, ...] = ()
    init_rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The decoder to train.

    Attributes:
        preset: A name in ``workers.models.PRESETS``; the other keys override it unless None. Or
            ``hf:FOLDER``, a local folder with the ``config.json`` of a causal language model of
            Hugging Face; a new run starts from the weights in it, if there are any.
        vocab_size: Number of token ids.
        dim: Width.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        ffn_dim: Width of the feed-forward layers.
        tied: Whether the embedding is also the output layer.
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
    """The text to train on, and how to cut it into samples.

    Attributes:
        source: "stdlib" for the Python standard library's own source files, or a glob of text
            or ``.jsonl`` files, local or as a URL.
        tokenizer: A Hugging Face ``tokenizer.json``; "" for bytes.
        text_field: The field of a JSON line that holds the text.
        sequence_length: Tokens that a sample predicts.
        seed: Seed of the order of samples.
        validation_share: Share of the documents to hold out.
        validation_samples: Maximum number of held-out samples in a validation, always the same.
        cache_directory: Directory for tokens, shared by the processes of a node; "" for the
            machine's temporary directory.
    """

    source: Annotated[str, MinLen(1)] = STDLIB
    tokenizer: str = ""
    text_field: str = "text"
    sequence_length: Annotated[int, Ge(2)] = 128
    seed: _Count = 0
    validation_share: Annotated[float, Gt(0), Lt(1)] = 0.05
    validation_samples: _AtLeastOne = 64
    cache_directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFiniteSettings:
    """Handling of an update whose loss or gradient norm is NaN or infinite on any worker.

    Attributes:
        action: "skip" omits the update on all workers: weights, buffers and optimizer keep their
            values, and the step counts. "stop" ends the run before the update, "ignore" applies it.
        most: With "skip", the run ends after this many such updates in a row.
    """

    action: Literal["skip", "stop", "ignore"] = "skip"
    most: _AtLeastOne = 3


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
        weight_decay: AdamW's weight decay of matrices; vectors (norms) get none.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        clip_norm: Maximum gradient norm; 0 for no clipping.
        precision: "fp32", or "bf16" to compute in bfloat16 with fp32 masters.
        seed: Seed of initial weights and dropout.
        deterministic: Sum gradients in one order for any number of workers, so that the weights
            are bit-identical.
        reduce_gradients: When to reduce. "once" per step: each worker adds up whole gradients of
            its micro-batches (4 bytes a parameter). After "every_pass": it keeps only its part, but
            sends more often. "auto" measures in the first step whether whole gradients fit. In
            deterministic mode sums have their own order.
        validation_every: Steps between two validations; 0 to validate at the end only.
        recheck: Steps between two checks for silent data corruption, 0 for none. In a check all
            workers compute the same micro-batch and compare the bits of its gradients, which costs
            each worker one more micro-batch. The run leaves a machine that computes something else,
            and goes back to its newest version up to the last check before. Needs
            ``deterministic``.
        not_finite: Handling of updates that are NaN or infinite.
    """

    steps: _AtLeastOne = 200
    global_batch: _AtLeastOne = 16
    micro_batch: _AtLeastOne = 2
    lr: _Positive = 3e-3
    warmup_steps: _Count | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    lr_min_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    weight_decay: Annotated[float, Ge(0)] = 0.1
    betas: tuple[_Beta, ...] = (0.9, 0.95)
    eps: _Positive = 1e-8
    clip_norm: Annotated[float, Ge(0)] = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: _Count = 0
    deterministic: bool = False
    reduce_gradients: Literal["auto", "once", "every_pass"] = "auto"
    validation_every: _Count = 0
    recheck: _Count = 0
    not_finite: NotFiniteSettings = field(default_factory=NotFiniteSettings)

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

    def recheck_cost(self, num_ranks: int) -> str:
        """Return what ``recheck`` costs ``num_ranks`` data-parallel ranks; "" if it is off."""
        if not self.recheck:
            return ""
        each = -(-self.num_micro_batches // num_ranks)
        return (
            f"train.recheck: {self.recheck} adds 1 micro-batch per {self.recheck} steps to each "
            f"worker, {100 / (each * self.recheck):.2g} % of a run with {each} micro-batch"
            f"{'es' if each > 1 else ''} a step on each"
        )


#: The value of the last evaluation, as ``BestSettings`` and results name it.
VALIDATION_LOSS: Final = "validation_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSettings:
    """Which checkpoints to keep besides the newest ones.

    Training waits until the checkpoint of a best step is committed.

    Attributes:
        value: The value to compare: "validation_loss", which ``session.evaluate`` returns, or a
            name that the script passes to ``session.log`` in the body of a step; "" for none.
        mode: Whether the lowest value is best, "min", or the highest, "max".
        keep: How many of the best to keep.
    """

    value: str = ""
    mode: Literal["min", "max"] = "min"
    keep: _AtLeastOne = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """How often state goes to storage.

    Attributes:
        every_steps: Steps between two checkpoints. "auto" starts with 10, then uses the cheapest
            interval by measured checkpoint times and failures, up to 10 minutes of work. The last
            step is always saved, and the newest one if a run ends early. Recovery uses newer
            snapshots in memory.
        keep: Number of committed checkpoints to keep, at least 2; 0 keeps all.
        best: Which others to keep.
        fsync: Whether to force files to disk before the commit. Without it a checkpoint survives
            the death of its process, but perhaps not of its machine.
        threads: Threads per worker that read while loading.
    """

    every_steps: _AtLeastOne | Literal["auto"] = _CHECKPOINT_STEPS
    keep: _Count = 3
    best: BestSettings = field(default_factory=BestSettings)
    fsync: bool = False
    threads: _AtLeastOne = 2

    @property
    def first_every(self) -> int:
        """Return the interval at the start of an attempt."""
        return self.every_steps if isinstance(self.every_steps, int) else _CHECKPOINT_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How often state goes to the memory of the node's keeper, and its protection there.

    Attributes:
        every_steps: Steps between two snapshots; 0 for none, so that only storage holds state.
            "auto" starts with 1 and takes fewer if they would cost more than 2 % of step time.
        node_memory_mib: Limit in MiB for all snapshots on a node, including copies from other
            nodes; 0 for half of the memory that is available when the node's keeper starts, minus
            what other runs on the node may still use.
        send_mib_per_s: Limit in MiB/s for what a node's keeper sends to other nodes, for copies and
            recovery; 0 for no limit.
        tolerance: Number of nodes of each group of at most 8 that may be lost at once while the
            newest snapshots stay complete in memory: 0, 1 or 2. It needs as many other nodes. A run
            with fewer workers than places spreads over at least one node more than this.
        mechanism: "copy" keeps each snapshot on ``tolerance`` other nodes; it sends nothing if
            data-parallel replicas there have the same state. "parity" keeps 1/(k-1) of a snapshot
            on each of k nodes, or 2/(k-2) for a tolerance of 2; with a tolerance of 1 it sends no
            data between replicas. "auto" uses copies if memory allows, else parity.
    """

    every_steps: _Count | Literal["auto"] = _SNAPSHOT_STEPS
    node_memory_mib: _Count = 0
    send_mib_per_s: _Count = 0
    tolerance: Annotated[int, Ge(0), Le(2)] = 1
    mechanism: Literal["auto", "copy", "parity"] = "auto"

    @property
    def first_every(self) -> int:
        """Return the interval at the start of an attempt; 0 if there are no snapshots."""
        return self.every_steps if isinstance(self.every_steps, int) else _SNAPSHOT_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """How the model is sharded over the workers. The number of workers decides ``dp_shard``.

    The degrees apply to the full number of workers. With fewer workers they stay while at most a
    quarter of the workers would be idle; otherwise the run uses divisors of them. A script that
    runs in one process ignores them; under torchrun they must divide the number of ranks.

    Attributes:
        dp_replicate: Full copies of the model.
        cp: Context-parallel degree: workers that each have a part of every sequence of the same
            samples.
        tp: Tensor-parallel degree: workers of one node that each have a part of every matrix, and
            the same samples.
        pp: Pipeline-parallel degree: workers that each have some of the layers, and the same
            samples.
        ep: Expert-parallel degree: data-parallel workers that each have some of the experts, and
            exchange tokens. With fewer workers, the largest divisor that divides them.
        stages_per_worker: Pipeline stages of each of these workers; more than 1 for interleaved
            1F1B, which divides the bubble and multiplies the traffic by this number (Megatron-LM:
            ``num_virtual_stages_per_pipeline_rank``).
        fixed: The degrees among ``dp_replicate``, ``cp``, ``tp``, ``pp`` and ``ep`` that stay the
            same at every size.
        reshard_after_forward: Whether to drop a block's gathered parameters after its forward and
            backward pass: less memory, more gathers. Models of up to 64 MiB stay gathered.
        collective_timeout_s: Seconds after which a collective fails; ten times as long while ranks
            load or commit a version. It is a last resort, because faults are usually found much
            sooner. Raise it if one rank may work for longer while the others wait for it; otherwise
            that rank is judged to hang.
    """

    dp_replicate: _AtLeastOne = 1
    cp: _AtLeastOne = 1
    tp: _AtLeastOne = 1
    pp: _AtLeastOne = 1
    ep: _AtLeastOne = 1
    stages_per_worker: _AtLeastOne = 1
    fixed: tuple[Literal["dp_replicate", "cp", "tp", "pp", "ep"], ...] = ()
    reshard_after_forward: bool = True
    collective_timeout_s: _Positive = 300.0

    @property
    def forming_timeout_s(self) -> float:
        """Return the timeout for forming groups, in which no script runs."""
        return min(_FORMING_S, self.collective_timeout_s)

    def timeout_s(self, step_s: float) -> float:
        """Return the timeout of collectives if a step takes ``step_s``.

        It is longer than ``orchestrator.detection`` takes to find a hung rank: ten slow steps.
        """
        return max(self.collective_timeout_s, _STEPS_WAITED * step_s)

    @property
    def patient_timeout_s(self) -> float:
        """Return the timeout while ranks load or save, which takes some of them longer."""
        return 10 * self.collective_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a training: the sections of a configuration that workers need.

    Attributes:
        run: The script, and the checkpoint to start from.
        model: The built-in model.
        data: The text of the built-in training, and the order of samples.
        train: The optimization.
        checkpoint: State in storage.
        snapshot: State in memory.
        parallel: Sharding.
        gpu_share: The part of its GPU that a worker has; below 1, workers share the GPU.
    """

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    run: RunSettings = RunSettings(directory="run")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    parallel: ParallelSettings = ParallelSettings()
    gpu_share: float = 1.0

    @property
    def start(self) -> RunSettings:
        """Return ``run``, to start from the weights in the model's folder if it names none."""
        folder = self.model.folder if not self.run.script else ""
        if self.run.init_from or not folder or not any(Path(folder).glob("*.safetensors")):
            return self.run
        return replace(self.run, init_from=folder)


def model_shape(settings: ModelSettings) -> ModelShape:
    """Return the shape of the model in ``settings``."""
    names = [name.name for name in fields(settings) if name.name != "preset"]
    given = {name: getattr(settings, name) for name in names}
    return resolve(
        settings.preset, {name: value for name, value in given.items() if value is not None}
    )


def problems(settings: Settings) -> list[str]:
    """Return every problem of ``settings``, one line each, path first."""
    part, details = well_formed(Settings, asdict(settings))
    found = [
        f"{'.'.join(map(str, path))}: {message}" for path, message in map(value_problem, details)
    ]
    broken = {line.partition(": ")[0] for line in found}
    return found + [line for line in between_keys(part) if line.partition(": ")[0] not in broken]


def well_formed(kind: type[_T], document: dict[str, Any]) -> tuple[_T, list[Any]]:
    """Return sections without their malformed keys, and pydantic's details of these."""
    # Imported here: it is slow to import, and a worker checks nothing.
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(kind)
    try:
        return adapter.validate_python(document), []
    except ValidationError as error:
        details = [each for each in error.errors() if each["loc"][-1] not in _SECOND_BRANCH]
    part: dict[Any, Any] = {
        name: dict(each) if isinstance(each, dict) else each for name, each in document.items()
    }
    for detail in details:
        name, *keys = detail["loc"]
        if keys and isinstance(part.get(name), dict):
            part[name].pop(keys[0], None)
        else:
            part.pop(name, None)
    for name, least in _REQUIRED.items():
        part[name] = {**least, **part.get(name, {})}
    return adapter.validate_python(part), details


def value_problem(detail: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str]:
    """Return the keys that lead to a malformed value, and what it must be."""
    path, value = detail["loc"], detail["input"]
    if path[-1] == _INTERVAL:
        path = path[:-1]
        if detail["type"] != "greater_than_equal":
            return path, f"must be a number of steps or {AUTO}, not {value!r}"
    wanted = re.sub(r", (unable|got|not) .*", "", detail["msg"].partition(" should ")[2])
    return path, f"must {wanted}, not {value!r}"


def between_keys(settings: Settings) -> list[str]:
    """Return what is wrong between well-formed keys, one line each, path first."""
    train, run = settings.train, settings.run
    found = _model_problems(settings)
    if train.global_batch % train.micro_batch:
        found.append(
            f"train.global_batch: {train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch}"
        )
    if train.num_warmup_steps > train.steps:
        found.append(
            f"train.warmup_steps: {train.warmup_steps} must be from 0 to train.steps={train.steps}"
        )
    if train.deterministic and train.reduce_gradients == "every_pass":
        found.append(
            "train.reduce_gradients: every_pass changes nothing with train.deterministic, "
            "whose sums have their own order; leave one of them out"
        )
    found += _recheck_problems(settings) if train.recheck else []
    if len(train.betas) != _NUM_BETAS:
        found.append(f"train.betas: {list(train.betas)} must be two numbers")
    if settings.checkpoint.keep == 1:
        found.append(
            "checkpoint.keep: 1 leaves no older checkpoint if the newest is damaged; use 2 or more"
        )
    others = run.init_state == "all" or run.init_rename or run.init_missing or run.init_rows
    if not run.init_from and others:
        found.append("run.init_from: is empty, but the other init keys need it; set it")
    found += [
        f"run.init_rename: {theirs!r} and {ours!r} need one '*' each, or none"
        for theirs, ours in run.init_rename.items()
        if (theirs.count("*"), ours.count("*")) not in {(0, 0), (1, 1)}
    ]
    return found


def _recheck_problems(settings: Settings) -> list[str]:
    train, parallel = settings.train, settings.parallel
    found = []
    if not train.deterministic:
        found.append(
            "train.recheck: compares bits, which are the same on all workers only with "
            "train.deterministic: true; write that, or train.recheck: 0"
        )
    found += [
        f"parallel.{axis}: train.recheck compares workers that compute all of a micro-batch, and "
        f"with {degree} each computes a part: write parallel.{axis}: 1, or train.recheck: 0"
        for axis, degree in (("tp", parallel.tp), ("pp", parallel.pp))
        if degree > 1
    ]
    return found


def _model_problems(settings: Settings) -> list[str]:
    model = settings.model
    if model.folder and not settings.run.script:
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
    found = [f"model.{name}: config.json sets that with {model.preset}" for name in given]
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
