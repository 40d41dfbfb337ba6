"""Checks that a sample is the same on every worker, and the same after a resume.

Each worker reads a few samples that others train on, once in the first step of an attempt. With a
``DataLoader`` these are samples of the dataset. A script that takes indices reads by itself: then
each worker calls its function of the loss with one micro-batch more, up to where it calls a module,
and what the module is called with is compared.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from workers.collectives import on_host
from workers.data import (
    CONTENT_LENGTH,
    Content,
    DataLoader,
    DataOrder,
    are_alike,
    content_of,
    random_seed,
    seeded,
)
from workers.errors import DataError
from workers.parallel import Mesh

log = logging.getLogger(__name__)

#: So many samples from one end of a dataset to the other, and so many of an attempt's first step.
_SPREAD, _OF_STEP = 4, 4
_NAME_BYTES: Final = 64
_CAUSES: Final = (
    "Usual causes: the order in which glob or os.listdir give files (sort it), a shuffle without a "
    "seed, files that differ"
)


def agree_on_samples(
    loader: DataLoader,
    order: DataOrder,
    *,
    seed: int,
    step: int,
    kept: Mapping[str, Content],
    mesh: Mesh,
    device: torch.device,
) -> dict[str, Content]:
    """Return what a checkpoint keeps of a few samples; every worker calls it.

    Args:
        step: The step that the attempt resumes from.
        kept: What its checkpoint kept of them.

    Raises:
        DataError: A sample differs between workers, or is not what it was.
    """
    num = order.num_samples
    spread = sorted({(num - 1) * place // (_SPREAD - 1) for place in range(_SPREAD)})
    first = [one for one in order.step(step + 1)[:_OF_STEP].tolist() if one >= 0]
    indices = [*spread, *first]
    names = [f"sample {index} of the data" for index in indices]

    def read() -> list[Content]:
        return loader.contents(indices, seed=seed)

    found = read()
    before = [kept.get(str(index)) for index in spread]
    changed = [
        at for at, one in enumerate(before) if one is not None and not are_alike(one, found[at])
    ]
    parts = _differing(found, names, mesh, device)
    if (parts or _any(bool(changed), device)) and _is_repeatable(found, read, device):
        _refuse(parts)
        told = [
            f"{names[at]} is {_short(found[at])} and was {_short(before[at] or ())}"
            for at in changed
        ]
        raise DataError(
            f"the data changed since the checkpoint of step {step}: {'; '.join(told)}. {_CAUSES}, "
            "or were replaced. Bring them back, or start a new run from this one (run.init_from, "
            "with run.init_state=all). If samples change with the steps on purpose, name the data: "
            "DataLoader(..., digest=...)"
        )
    return {str(index): list(one) for index, one in zip(spread, found, strict=False)}


def agree_on_inputs(
    loss_of: Callable[[Any], Any],
    model: nn.Module,
    indices: Any,
    *,
    seed: int,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Check that every worker reads the same for the same indices; every worker calls it.

    Raises:
        DataError: A module is called with other inputs.
    """

    def read() -> list[Content]:
        with seeded(random_seed(seed, "inputs", *indices.tolist())):
            return [_first_inputs(loss_of, model, indices)]

    found = read()
    shown = ", ".join(map(str, indices[:_OF_STEP].tolist()))
    names = [
        f"what the model gets for the indices {shown}{'' if len(indices) <= _OF_STEP else ', ...'}"
    ]
    parts = _differing(found, names, mesh, device)
    if parts and _is_repeatable(found, read, device):
        _refuse(parts)


def _first_inputs(loss_of: Callable[[Any], Any], model: nn.Module, indices: Any) -> Content:
    """Return what identifies the inputs of the first module that ``loss_of`` calls."""

    def see(_module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _CalledSignal([args, kwargs])

    hooks = [
        module.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
        for module in model.modules()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            loss_of(indices)
    except _CalledSignal as called:
        return content_of(called.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return content_of(None)


class _CalledSignal(BaseException):
    """The script called a module; passes through its handlers of exceptions."""

    def __init__(self, inputs: Any) -> None:
        super().__init__("a module was called")
        self.inputs = inputs


def _differing(
    found: Sequence[Content], names: Sequence[str], mesh: Mesh, device: torch.device
) -> list[str]:
    """Return what is not the same on all ranks that read the same parts, in words."""
    num = dist.get_world_size()
    table = torch.zeros((num, len(found) + 1, CONTENT_LENGTH), dtype=torch.float64)
    table[mesh.rank, :-1] = torch.tensor(found, dtype=torch.float64)
    table[mesh.rank, -1, 0] = mesh.part
    rows = _summed(table, device)
    told = []
    for at, name in enumerate(names):
        kinds: list[tuple[float, Content, list[int]]] = []
        for rank in range(num):
            part, one = float(rows[rank, -1, 0]), rows[rank, at].tolist()
            alike = next((k for k in kinds if k[0] == part and are_alike(k[1], one)), None)
            if alike is None:
                kinds.append((part, one, [rank]))
            else:
                alike[2].append(rank)
        if len(kinds) > len({part for part, _, _ in kinds}):
            told.append((name, kinds))
    if not told:
        return []
    nodes = _nodes(mesh.rank, num, device)
    return [
        f"{name} is "
        + " and ".join(
            f"{_short(one)} on rank " + ", ".join(f"{rank} (node {nodes[rank]})" for rank in ranks)
            for _, one, ranks in kinds
        )
        for name, kinds in told
    ]


def _refuse(parts: Sequence[str]) -> None:
    if parts:
        raise DataError(
            f"the workers have different training data: {'; '.join(parts)}. {_CAUSES} between nodes"
        )


def _is_repeatable(
    found: Sequence[Content], read: Callable[[], list[Content]], device: torch.device
) -> bool:
    """Return whether every rank reads the same again; else nothing can be said of the data."""
    again = read()
    is_same = all(are_alike(*pair) for pair in zip(found, again, strict=True))
    if not _any(not is_same, device):
        return True
    if dist.get_rank() == 0:
        log.warning(
            "samples are not the same when they are read twice, so whether all workers have the "
            "same data is not known; draw random numbers by torch.rand, numpy.random or random, "
            "whose seeds are set here"
        )
    return False


def _short(content: Content) -> str:
    """Return a digest to show."""
    return f"{zlib.crc32(repr([round(one, 3) for one in content]).encode()):08x}"


def _nodes(rank: int, num: int, device: torch.device) -> list[str]:
    name = socket.gethostname().encode()[:_NAME_BYTES]
    table = torch.zeros((num, _NAME_BYTES), dtype=torch.float64)
    table[rank, : len(name)] = torch.tensor(list(name), dtype=torch.float64)
    rows = _summed(table, device).astype(np.uint8)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _any(vote: bool, device: torch.device) -> bool:  # noqa: FBT001  the vote itself
    return bool(_summed(torch.tensor([float(vote)]), device)[0])


def _summed(numbers: torch.Tensor, device: torch.device) -> Any:
    """Return the sum over all ranks."""
    there = numbers.double().to(device).reshape(-1)
    dist.all_reduce(there)
    return np.array(on_host(there)).reshape(numbers.shape)
