"""Find what would fail before anything starts: storage, data, files, memory."""

import math
import uuid
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil

import ucp_core
from orchestrator.config.schema import RunConfig
from orchestrator.config.source_text import why_absent
from orchestrator.policies import Job, choose, memory_bytes, one_node
from ucp_core.errors import Problem, UcpError
from ucp_core.storage import LocalStore, Store, join, open_store
from workers.data import find_source
from workers.errors import WorkerError
from workers.models import ModelShape, num_parameters
from workers.process import gpus_here, share_of_gpu
from workers.settings import model_shape

GIB = 1 << 30
#: The package of the extra ``loggers`` that each key of ``logging`` imports.
_LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def run_preflight(config: RunConfig, doubtful: Collection[str] = ()) -> list[Problem]:
    """Return what would fail; start nothing and leave nothing behind.

    Write and delete a small file in the run directory, or in its nearest existing parent.
    ``config`` is the well-formed part of a configuration. ``doubtful`` are the keys whose value
    there is not the user's; checks that depend on them are skipped.
    """
    found: list[Problem] = []
    if "run.directory" not in doubtful:
        found += _storage_problems(config)
    if not any(key.startswith("data.") for key in doubtful):
        found += _data_problems(config)
    rest = (*_file_problems(config), *_logging_problems(config), *_gpu_problems(config))
    found += [problem for problem in rest if problem.path not in doubtful]
    if not doubtful:
        found += _memory_problems(config)
    return found


def _gpu_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why this machine has too few GPUs for its simulated nodes."""
    share, workers = config.cluster.gpus_per_worker, config.workers.max
    if config.cluster.address is not None or not share:
        return
    num_gpus = len(gpus_here())
    fits = share_of_gpu(workers, config.cluster.local_nodes, num_gpus) if num_gpus else 0.0
    if share <= fits:
        return
    advice = "write 0 to train on the CPU, or name a cluster by cluster.address"
    if num_gpus:
        advice = f"write {fits:g} to have workers share a GPU, or lower workers.max"
    yield Problem(
        "cluster.gpus_per_worker",
        f"{share:g} is too much for workers.max={workers} on cluster.local_nodes="
        f"{config.cluster.local_nodes}: torch finds {num_gpus} GPUs on this machine; {advice}",
    )


def worker_memory_bytes(config: RunConfig, num_workers: int) -> int:
    """Return the least memory in bytes that training needs on each of ``num_workers``."""
    layout = choose(one_node(num_workers), num_workers, config.layout_rules())
    assert layout is not None, f"no layout has {num_workers} workers"
    job = job_of(config, model_shape(config.model))
    return memory_bytes(layout, replace(job, reduces=job.reduces is not False))


def job_of(config: RunConfig, shape: ModelShape) -> Job:
    """Return a model of these sizes and its batch, as forecasts need them."""
    return Job(
        shape=shape,
        sequence_length=config.data.sequence_length,
        micro_batch=config.train.micro_batch,
        num_micro_batches=config.train.num_micro_batches,
        compute_bytes=2 if config.train.precision == "bf16" else 4,
        reshards=config.parallel.reshard_after_forward,
        reduces={"auto": None, "once": False, "every_pass": True}[config.train.reduce_gradients],
        stages_per_worker=config.parallel.stages_per_worker,
        chunks_loss=not (config.run.script or config.model.folder),
        in_tree=config.train.deterministic,
    )


def _storage_problems(config: RunConfig) -> Iterator[Problem]:
    url, why = config.run.directory, ""
    try:
        store, path = open_store(url)
        probe = join(_there(store, path), f"write-test-{uuid.uuid4().hex[:8]}")
        store.write_atomic(probe, b"everstep", fsync=False)
        try:
            if store.read(probe) != b"everstep":
                why = "reading returns other bytes than were written"
        finally:
            store.delete(probe)
    except (UcpError, OSError) as error:
        why = str(error)
    if why:
        message = f"{url} cannot be written: {why}; name a directory that every node can write"
        yield Problem("run.directory", message)


def _there(store: Store, path: str) -> str:
    """Return the directory, or its nearest existing parent.

    The directory is not created here: removing it again could take it from another command that is
    launching a run in it.
    """
    while isinstance(store, LocalStore) and not store.exists(path):
        path = str(Path(path).parent)
    return path


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    try:
        find_source(config.data)
    except (WorkerError, UcpError, OSError) as error:
        message = str(error).removeprefix("data.source: ")
        yield Problem("data.source", message + why_absent(config.data.source))


def _file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield missing files, and problems of the script and of the first checkpoint."""
    run = config.run
    for path, value in (("run.script", run.script), ("data.tokenizer", config.data.tokenizer)):
        if value and "://" not in value and not Path(value).is_file():
            yield Problem(path, f"there is no file {value}{why_absent(value)}")
    if run.init_from:
        try:
            ucp_core.open(run.init_from)  # reads no tensor
        except (UcpError, OSError) as error:
            yield Problem("run.init_from", f"{error}{why_absent(run.init_from)}")
    if run.script and Path(run.script).is_file():
        try:
            # A worker would raise this before it runs the first line of the script.
            with warnings.catch_warnings(action="ignore"):
                compile(Path(run.script).read_bytes(), run.script, "exec", dont_inherit=True)
        except SyntaxError as error:
            yield Problem("run.script", f"{run.script}:{error.lineno}: {error.msg}")
        except (ValueError, OSError) as error:
            yield Problem("run.script", f"{run.script} cannot be read: {error}")


def _logging_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the requested services whose packages are missing.

    The controller needs the packages; this machine is assumed to have the same ones as its node.
    """
    for name, package in _LOGGER_PACKAGES.items():
        if getattr(config.logging, name) and find_spec(package) is None:
            message = f"the package {package} is not installed; pip install 'everstep[loggers]'"
            yield Problem(f"logging.{name}", message)


def _memory_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why the model does not fit in memory with ``workers.min``.

    The model of a user's script or folder is unknown, so it is not checked.
    """
    if config.run.script or config.model.folder:
        return
    multiple = config.layout_rules().multiple_min
    first = math.ceil(config.workers.min / multiple) * multiple
    need, room = worker_memory_bytes(config, first), _room_bytes(config, first)
    if need > room:
        yield Problem(
            "workers.min",
            f"with {first} workers each needs at least {need / GIB:.1f} GiB for "
            f"{num_parameters(model_shape(config.model)) / 1e6:,.0f} M parameters, optimizer and "
            f"activations, and has {room / GIB:.1f} GiB; {_way_out(config, first)}",
        )


def _way_out(config: RunConfig, first: int) -> str:
    multiple = config.layout_rules().multiple_min
    for count in range(first, config.workers.max + 1, multiple):
        if worker_memory_bytes(config, count) <= _room_bytes(config, count):
            return f"{count} would be enough"
    return (
        f"even workers.max={config.workers.max} workers are too few: use a smaller "
        "model.preset, train.micro_batch or data.sequence_length, or more workers"
    )


def _room_bytes(config: RunConfig, num_workers: int) -> float:
    """Return the memory in bytes of each of ``num_workers``; infinity if unknown."""
    if config.cluster.memory_gib_per_worker is not None:
        return config.cluster.memory_gib_per_worker * GIB
    if config.cluster.address is None and not config.cluster.gpus_per_worker:
        return float(psutil.virtual_memory().total) / num_workers
    return math.inf
