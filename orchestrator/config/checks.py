"""Check that the values of well-formed keys fit together."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.config.schema import RunConfig
from orchestrator.config.sections import NoticesSection, TopologySection
from orchestrator.policies import choose, one_node
from ucp_core.errors import Problem
from ucp_core.numerics import counted
from workers.keeper import CLOUDS
from workers.models import PRESETS
from workers.settings import AUTO, between_keys, model_shape


def cross_problems(config: RunConfig, num_experts: int = 0) -> list[Problem]:
    """Return the problems of single values, and of keys that contradict one another.

    ``num_experts`` is the number of experts in a layer of the built-in model.
    """
    lines = [line.partition(": ") for line in between_keys(config.settings())]
    found = [Problem(path, message) for path, _, message in lines]
    found += _worker_problems(config)
    found += _axis_problems(config, num_experts)
    found += _sequence_problems(config)
    found += _capacity_problems(config)
    found += _notice_problems(config.notices)
    found += _topology_problems(config.topology)
    if config.run.arguments and not config.run.script:
        found.append(Problem("run.arguments", "go to run.script, which is not set; set it"))
    return found


def _worker_problems(config: RunConfig) -> Iterator[Problem]:
    least, most = config.workers.min, config.workers.max
    rules, copies = config.layout_rules(), config.parallel.dp_replicate
    if copies > 1 and config.train.deterministic:
        yield Problem(
            "parallel.dp_replicate",
            f"train.deterministic fixes the order of sums over shards, but not over {copies} "
            "copies: write parallel.dp_replicate: 1, or train.deterministic: false",
        )
    if config.parallel.ep > 1 and config.train.deterministic:
        yield Problem(
            "parallel.ep",
            "train.deterministic fixes the order of sums, but the tokens of "
            f"{config.parallel.ep} workers reach the experts in any order: write parallel.ep: 1, "
            "or train.deterministic: false",
        )
    shards = most // (rules.multiple // rules.ep)
    if least > most:
        yield Problem("workers.min", f"{least} is more than workers.max={most}")
    elif most < rules.multiple:
        yield Problem(
            "workers.max",
            f"{most} is too few for {rules}: raise it to {rules.multiple}, or lower a degree",
        )
    elif shards % rules.ep:
        yield Problem(
            "parallel.ep",
            f"{rules.ep} does not divide the {shards} shards of workers.max={most}: write "
            f"{math.gcd(rules.ep, shards)}, or make workers.max a multiple of {rules.multiple}",
        )
    elif choose(one_node(most), most, rules, least) is None:
        multiple = rules.multiple_min
        used, enough = most - most % multiple, math.ceil(least / multiple) * multiple
        yield Problem(
            "workers.min",
            f"{least} cannot be reached: {rules} takes workers in multiples of {multiple}, "
            f"so of workers.max={most} only {used} can train; raise workers.max to "
            f"{enough}" + (f" or lower workers.min to {used}" if used else ""),
        )


def _topology_problems(topology: TopologySection) -> Iterator[Problem]:
    for key, what in (("racks", "node"), ("zones", "rack")):
        counts = Counter(each for names in getattr(topology, key).values() for each in names)
        for name in (each for each, number in counts.items() if number > 1):
            yield Problem(f"topology.{key}", f"{what} {name} is named twice: name it once")
        if key == "zones":
            for rack in sorted(counts.keys() - topology.racks.keys()):
                known = ", ".join(topology.racks) or "none"
                yield Problem(
                    "topology.zones", f"{rack} is not a rack; topology.racks names {known}"
                )


def _axis_problems(config: RunConfig, num_experts: int) -> Iterator[Problem]:
    """Yield problems of the tensor, pipeline and expert degrees."""
    parallel = config.parallel
    dp = max(config.workers.max // (parallel.cp * parallel.tp * parallel.pp), 1)
    passes = -(-config.train.num_micro_batches // dp)
    if passes < parallel.pp:
        yield Problem(
            "parallel.pp",
            f"{parallel.pp} stages need as many micro-batches each; with workers.max="
            f"{config.workers.max} there are {passes}: raise train.global_batch or lower "
            "train.micro_batch",
        )
    if parallel.stages_per_worker > 1 and parallel.pp == 1:
        yield Problem(
            "parallel.stages_per_worker",
            f"{parallel.stages_per_worker} stages need parallel.pp above 1; else write 1",
        )
    room = config.workers_per_local_node()
    if config.cluster.address is None and parallel.tp > room:
        yield Problem(
            "parallel.tp",
            f"{parallel.tp} is more than the {counted(room, 'worker')} that cluster.local_nodes="
            f"{config.cluster.local_nodes} leaves each node: at most {room}, or fewer nodes",
        )
    if config.run.script or config.model.preset not in PRESETS:
        return
    if (num_experts or 1) % parallel.ep:
        message = f"{parallel.ep} does not divide the {num_experts} experts"
        preset = f"model.preset={config.model.preset}"
        none = f"{preset} has no experts: write parallel.ep: 1"
        yield Problem("parallel.ep", message if num_experts else none)
    shape = model_shape(config.model)
    sizes = {name: getattr(shape, name) for name in ("num_kv_heads", "ffn_dim", "vocab_size")}
    uneven = [f"model.{name}={size}" for name, size in sizes.items() if size % parallel.tp]
    if uneven:
        yield Problem("parallel.tp", f"{parallel.tp} does not divide {', '.join(uneven)}")
    if parallel.pp > shape.num_layers:
        message = f"{parallel.pp} is more than model.num_layers={shape.num_layers}"
        yield Problem("parallel.pp", message)
    elif parallel.pp * parallel.stages_per_worker > shape.num_layers:
        yield Problem(
            "parallel.stages_per_worker",
            f"{parallel.stages_per_worker} with parallel.pp={parallel.pp} is more stages than "
            f"model.num_layers={shape.num_layers}: at most {shape.num_layers // parallel.pp}",
        )
    if parallel.pp > 1 and shape.tied:
        yield Problem(
            "parallel.pp",
            "the embedding is also the output layer, but their stages differ: write "
            "model.tied: false, or parallel.pp: 1",
        )


def _sequence_problems(config: RunConfig) -> Iterator[Problem]:
    cp, length = config.parallel.cp, config.data.sequence_length
    if cp > 1 and config.train.deterministic:
        yield Problem(
            "parallel.cp",
            "train.deterministic fixes the order of sums over micro-batches, but not over the "
            f"{cp} parts of one: write parallel.cp: 1, or train.deterministic: false",
        )
    if not config.run.script and length % cp:
        fits = max(degree for degree in range(1, cp) if not length % degree)
        message = f"{cp} does not divide data.sequence_length={length}: write {fits}"
        yield Problem("parallel.cp", message)


def _capacity_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the alternatives, each with its place."""
    is_priced = any(each.usd_per_hour for each in config.capacity)
    for number, each in enumerate(config.capacity):
        where, num_gpus = f"capacity.{number}", config.cluster.gpus_per_worker
        if each.resources.get("GPU", num_gpus) != num_gpus:
            message = f"must be cluster.gpus_per_worker={num_gpus:g}, or left out"
            yield Problem(f"{where}.resources.GPU", message)
        if is_priced and "usd_per_hour" not in each.model_fields_set:
            yield Problem(
                f"{where}.usd_per_hour",
                "is missing, but other alternatives have a price, so the cost of the run "
                "would be too low: add it, or 0 for free machines",
            )
        if config.cluster.address is None and (each.selector() or each.resources):
            yield Problem(
                where,
                "simulated nodes are all alike: name a cluster by cluster.address or "
                "--address, or leave out resources, labels, zone and spot",
            )


def _notice_problems(asked: NoticesSection) -> Iterator[Problem]:
    allowed = (AUTO, *CLOUDS, "none")
    if asked.cloud not in allowed:
        known = ", ".join(allowed)
        message = f"{asked.cloud!r} is none of {known}; for another cloud set notices.command"
        yield Problem("notices.cloud", message)
    service = urlsplit(asked.endpoint)
    if asked.endpoint and (service.scheme != "http" or not service.netloc):
        message = f"must be like http://169.254.169.254, not {asked.endpoint!r}"
        yield Problem("notices.endpoint", message)
    if asked.file and not Path(asked.file).is_absolute():
        yield Problem("notices.file", f"{asked.file!r} must be an absolute path")
    try:
        if asked.command and not any(shlex.split(asked.command)[:1]):
            yield Problem("notices.command", f"{asked.command!r} names no program")
    except ValueError as error:
        yield Problem("notices.command", f"{asked.command!r} is not a command: {error}")
