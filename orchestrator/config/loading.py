"""Read a configuration, and report what is wrong with it.

No other room reads YAML or environment variables of the configuration; they get values. ``load``
reports every problem at once, each with its place.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias, get_args

from orchestrator.config.checks import cross_problems
from orchestrator.config.schema import RunConfig
from orchestrator.config.source_text import COMMAND_LINE, Source, why_absent
from orchestrator.errors import ConfigError
from ucp_core.errors import Place, Problem, UcpError
from ucp_core.numerics import counted
from ucp_core.storage import open_store
from ucp_core.yaml_places import KeyPath, did_you_mean, dotted
from workers.process import gpus_here, share_of_gpu
from workers.settings import STDLIB, value_problem, well_formed

#: Checks a configuration against the world: files, storage, memory. The second argument lists keys
#: whose value is missing or wrong. They are reported elsewhere, so it must ignore them.
Look: TypeAlias = Callable[["RunConfig", Collection[str]], Sequence[Problem]]

#: Returns values, by ``section.key``, that a document lacks.
Ask: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def load(
    path_or_text: str,
    overrides: Sequence[str] = (),
    *,
    look: Look | None = None,
    ask: Ask | None = None,
) -> RunConfig:
    """Return the configuration of a YAML file or text, with ``overrides`` applied.

    Relative paths become absolute, because workers run in other directories.

    Args:
        path_or_text: A path, an fsspec URL, the name of an example such as ``local/small``, or text
            of more than one line.
        overrides: ``section.key=value`` in order; each value is parsed as YAML.
        look: Further checks, such as ``orchestrator.config.run_preflight``.
        ask: Returns values for keys that neither the text nor the overrides have.

    Raises:
        ConfigError: With every problem at once, each with its place and what would be right.
    """
    source = _read(path_or_text)
    source.override(overrides)
    _apply_environment(source)
    if ask is not None and not source.problems:
        script = Place(str(_section(source, "run").get("script")))
        for key, value in ask(source.document).items():
            path = tuple(key.split("."))
            source.assign(path, value)
            source.places[path] = script
    return _resolved(_validated(source, look))


def load_for_gpus(
    path_or_text: str,
    overrides: Sequence[str],
    *,
    num_workers: int,
    model: Mapping[str, Any] | None = None,
    num_experts: int = 0,
) -> tuple[RunConfig, frozenset[str]]:
    """Return a configuration for other machines, and the keys that it or ``overrides`` set.

    Errors are those of ``load``.

    Args:
        path_or_text: As for ``load``.
        overrides: As for ``load``; they also override ``model``.
        num_workers: Workers on all machines; replaces ``workers.max``.
        model: Replaces the model or the script of the configuration.
        num_experts: Experts in a layer of ``model``.
    """
    source = _read(path_or_text)
    scripts: set[str] = set()
    if model is not None:
        source.document["model"] = dict(model)
        for key in _section(source, "run").keys() & {"script", "arguments"}:
            scripts.add(f"run.{key}")
            del _section(source, "run")[key]
    source.override(overrides)
    named = {
        f"{name}.{key}"
        for name, section in source.document.items()
        for key in (section if isinstance(section, dict) else ())
    }
    source.document.pop("capacity", None)
    source.assign(("cluster",), {"address": "auto"})
    source.assign(("workers", "max"), num_workers)
    config = _validated(source, num_experts=num_experts)
    return _resolved(config), frozenset(named | scripts)


def _section(source: Source, name: str) -> dict[str, Any]:
    found = source.document.get(name)
    return found if isinstance(found, dict) else {}


def demo_config(directory: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of ``everstep demo`` for ``directory``, with ``overrides`` applied.

    The demo brings its own nodes, so ``RAY_ADDRESS`` is ignored. Workers share the GPUs of this
    machine, if it has some.
    """
    text = files("orchestrator.driver").joinpath("demo.yaml").read_text(encoding="utf-8")
    source = Source(text, "demo.yaml")
    source.assign(("run", "directory"), directory)
    source.override(overrides)
    config = _validated(source)
    num_gpus = len(gpus_here())
    if num_gpus and "gpus_per_worker" not in config.cluster.model_fields_set:
        share = share_of_gpu(config.workers.max, config.cluster.local_nodes, num_gpus)
        cluster = config.cluster.model_copy(update={"gpus_per_worker": share})
        config = config.model_copy(update={"cluster": cluster})
    return _resolved(config)


def _read(path_or_text: str) -> Source:
    if "\n" in path_or_text:
        return Source(path_or_text, "text")
    examples = _examples()
    example = examples.get(path_or_text.removesuffix(".yaml"))
    try:
        store, path = open_store(path_or_text)
        if example is not None and not store.exists(path):
            return Source(example.read_text(encoding="utf-8"), example.name)
        text = store.read(path).decode()
    except (UcpError, UnicodeDecodeError) as error:
        beside = (path.as_posix() for path in Path(path_or_text).parent.glob("*.y*ml"))
        near = get_close_matches(path_or_text, [*beside, *examples], n=1, cutoff=0.8)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{path_or_text} cannot be read as a configuration: {error}{why_absent(path_or_text)}; "
            f"{meant}`everstep init` writes a new one; examples that come with everstep: "
            f"{', '.join(examples)}",
            problems=[str(error)],
        ) from error
    return Source(text, Path(path_or_text).name)


def _examples() -> dict[str, Path]:
    """Return the example configurations by name, such as ``local/small``.

    In a wheel they are in this package; in a checkout they are in ``cluster_configs``, beside files
    for Ray and Kubernetes, which have no section ``run``.
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
    asked_here = source.places.get(("cluster", "local_nodes")) == COMMAND_LINE
    if address and not asked_here and isinstance(cluster, dict) and not cluster.get("address"):
        cluster["address"] = address
        source.places["cluster", "address"] = Place("RAY_ADDRESS")


def _validated(source: Source, look: Look | None = None, num_experts: int = 0) -> RunConfig:
    """Return the configuration; raise ``ConfigError`` with every problem of ``source``."""
    if any(not problem.path for problem in source.problems):
        raise _refused(source)  # A text that is no mapping has no keys to check.
    for name, value in source.document.items():
        if value is None and name in RunConfig.model_fields and name != "capacity":
            source.document[name] = {}  # only comments below it
    config, details = well_formed(RunConfig, source.document)
    source.problems += [_field_problem(source, detail) for detail in details]
    broken = {dotted(detail["loc"][:2]) for detail in details}
    # Without a valid workers.max there is no bound for workers.min.
    broken |= {"workers.min"} if "workers.max" in broken else set()
    crossed = cross_problems(config, num_experts)
    found = [problem for problem in crossed if problem.path not in broken]
    if look is not None:
        doubtful = _doubtful(broken) | {problem.path for problem in found}
        found += look(_resolved(config), doubtful)
    source.problems += [source.problem(tuple(p.path.split(".")), p.message) for p in found]
    if source.problems:
        raise _refused(source)
    return config


def _refused(source: Source) -> ConfigError:
    lines = [str(problem) for problem in source.problems]
    places = dict.fromkeys(problem.place.file or source.name for problem in source.problems)
    what = " and ".join("the command line" if one == COMMAND_LINE.file else one for one in places)
    count = f"{'has' if len(places) == 1 else 'have'} {counted(len(lines), 'problem')}"
    listing = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{what} {count}:{listing}", problems=lines)


#: Examples of required keys.
_EXAMPLES = {
    "run": "run: {directory: runs/first}",
    "run.directory": "directory: runs/first",
    "workers": "workers: {max: 4}",
    "workers.max": "max: 4",
    "logging.wandb.project": "project: my-models",
    "logging.mlflow.experiment": "experiment: my-models",
}


def _field_problem(source: Source, detail: Any) -> Problem:
    path: KeyPath = tuple(detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        what = "section" if len(path) == 1 else "key"
        return source.problem(path, f"is not a {what}; {_meant(path)}")
    if kind == "missing":
        return source.problem(path, f"is missing; write for example {_EXAMPLES[dotted(path)]}")
    if kind == "tuple_type":
        return source.problem(path, f"must be a list, such as [{{spot: true}}], not {value!r}")
    if kind in {"model_type", "dataclass_type"}:
        return source.problem(path, f"must be a section with keys, not {value!r}")
    if path[:2] == ("logging", "tensorboard"):
        return source.problem(path[:2], f"must be true or a directory, not {value!r}")
    return source.problem(*value_problem(detail))


def _meant(path: KeyPath) -> str:
    """Return a hint for the unknown key at ``path``: a similar key, here or in another section."""
    word, known = str(path[-1]), _known_keys(path[:-1])
    if get_close_matches(word, known, n=1, cutoff=0.8):
        return did_you_mean(word, known)
    everywhere = {f"{one}.{key}" for one in RunConfig.model_fields for key in _known_keys((one,))}
    same = sorted(one for one in everywhere if one.endswith(f".{word}"))
    if not same and not get_close_matches(word, known, n=1):
        # ``checkpoint_every`` is nearly ``checkpoint.every_steps``.
        joined = {one.replace(".", "_"): one for one in everywhere}
        same = [joined[near] for near in get_close_matches(word, joined, n=1, cutoff=0.8)]
    return f"did you mean {' or '.join(same)}?" if same else did_you_mean(word, known)


def _known_keys(path: KeyPath) -> list[str]:
    if not path:
        return list(RunConfig.model_fields)
    kind: Any = RunConfig.model_fields[str(path[0])].annotation
    kind = next(iter(get_args(kind)), kind)  # the type of a list's elements
    if len(path) > 1 and path[0] == "logging":
        kind = next(iter(get_args(kind.model_fields[str(path[1])].annotation)))
    for part in path[1:]:
        if is_dataclass(kind):
            kind = next(field.default_factory for field in fields(kind) if field.name == part)
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(kind.model_fields)


def _doubtful(broken: Collection[str]) -> set[str]:
    """Return the keys in ``broken``, and all keys of the sections in it."""
    return {
        f"{name}.{key}"
        for name in RunConfig.model_fields
        for key in _known_keys((name,))
        if name in broken or f"{name}.{key}" in broken
    }


def _resolved(config: RunConfig) -> RunConfig:
    data, run = config.data, config.run
    data = replace(
        data,
        source=data.source if data.source == STDLIB else _absolute(data.source),
        tokenizer=_absolute(data.tokenizer),
        cache_directory=_absolute(data.cache_directory),
    )
    directory = _absolute(run.directory)
    run = replace(
        run,
        directory=directory,
        name=run.name or directory.rstrip("/").rsplit("/", 1)[-1],
        script=_absolute(run.script),
        init_from=_absolute(run.init_from),
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
