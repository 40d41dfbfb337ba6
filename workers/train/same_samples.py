"""Check that a sample is the same on every worker, and the same after a resume.

In the first step of an attempt, and then at growing distances, each worker reads a few samples on
which others train. With a ``DataLoader`` these are samples of the dataset. A script that takes
indices reads the data itself. Then each worker calls the script's loss function with a few extra
micro-batches, up to where it calls a module, and the inputs of that call are compared.
"""

import logging
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn

from workers.data import (
    Content,
    DataLoader,
    DataOrder,
    are_alike,
    content_of,
    random_seed,
    seeded,
)
from workers.errors import DataDiffersError
from workers.parallel import CalledSignal, Mesh
from workers.train.executor import all_agree, exchanged

log = logging.getLogger(__name__)

#: Minimum number of samples spread over the whole dataset, and of samples of the step.
_SPREAD, _OF_STEP = 4, 4
_NUM_SHOWN: Final = 4
_CAUSES: Final = (
    "Usual causes: the order in which glob or os.listdir give files (sort it), a shuffle without a "
    "seed, files that differ"
)

#: Indices that are read at once.
Group: TypeAlias = list[int]
Read: TypeAlias = Callable[[Sequence[Group]], list[Content]]


class SameSamples:
    """The samples of an attempt that are compared, between workers and with the version.

    The loss function gets ``size`` indices; 0 if a ``DataLoader`` reads samples. ``kept`` is the
    record in the version; None if they are not compared with earlier ones.
    """

    def __init__(
        self,
        order: DataOrder,
        *,
        size: int,
        step: int,
        kept: Mapping[str, Content] | None,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._order, self._size, self._step = order, size, step
        self._mesh, self._device = mesh, device
        self._kept = dict(kept) if kept is not None else None
        #: The findings of the first step. A version records them once a later step has confirmed
        #: them.
        self._new: dict[str, Content] = {}
        self._is_off = False
        each = size or 1
        num = each * -(-_SPREAD // each)
        spread = [(order.num_samples - 1) * place // (num - 1) for place in range(num)]
        # With ``parallel.cp`` a loss function reads parts, which differ after a resume.
        is_of_parts = size and mesh.layout.cp > 1
        self._spread = [] if is_of_parts else _cut(spread, each)

    def values(self) -> dict[str, Content] | None:
        """Return the record about samples for a version; None if they change with the steps."""
        return self._kept

    def compare(self, number: int, read: Read) -> None:
        """Compare in step ``number`` if that is due; every worker calls it.

        ``read`` reads samples, always with the same random numbers.
        """
        is_first = number == self._step + 1
        if self._is_off or not (is_first or self._is_due(number)):
            return
        spread = self._spread if is_first or self._size else []
        of_step = self._order.step(number)[: self._size or _OF_STEP].tolist()
        groups = [*spread, *_cut([one for one in of_step if one >= 0], self._size or 1)]
        names, found = [self._name(group) for group in groups], read(groups)
        size = f"/{self._size}" if self._size else ""
        keys = [f"{group[0]}{size}" for group in spread]
        before = {} if self._kept is None else {**self._new, **self._kept}
        changed = [
            (name, one, before[key])
            for name, key, one in zip(names, keys, found, strict=False)
            if key in before and not are_alike(one, before[key])
        ]
        parts, is_changed = self._differing(found, names, is_changed=bool(changed))
        if (parts or is_changed) and not self._is_repeatable(found, read(groups)):
            self._is_off, self._kept = True, None
        elif parts:
            raise DataDiffersError(
                f"the workers have different training data: {'; '.join(parts)}. {_CAUSES} between "
                "nodes"
            )
        elif is_changed and is_first:
            self._refuse_changed(changed)
        elif is_changed:
            self._kept = None
        elif is_first and self._size:
            self._new = dict(zip(keys, found, strict=False))
        elif self._kept is not None:
            self._kept = {**dict(zip(keys, found, strict=False)), **self._kept}

    def _is_due(self, number: int) -> bool:
        # A loss function may read differently from some step on, although the data is the same.
        # Finding this out before a fault costs less than reading samples.
        if self._size:
            return number & (number - 1) == 0
        return str(number).rstrip("0") == "1"

    def _name(self, group: Group) -> str:
        if not self._size:
            return f"sample {group[0]} of the data"
        shown = ", ".join(map(str, group[:_NUM_SHOWN]))
        more = "" if len(group) <= _NUM_SHOWN else ", ..."
        return f"what the model gets for the indices {shown}{more}"

    def _refuse_changed(self, changed: Sequence[tuple[str, Content, Content]]) -> None:
        told = [f"{name} is {_short(now)} and was {_short(then)}" for name, now, then in changed]
        named = (
            "session.steps(..., data_digest=...)" if self._size else "DataLoader(..., digest=...)"
        )
        raise DataDiffersError(
            f"the data changed since the checkpoint of step {self._step}: {'; '.join(told)}. "
            f"{_CAUSES}, or were replaced. Bring them back, or start a new run from this one "
            "(run.init_from, with run.init_state=all). If samples change with the steps on "
            f"purpose, name the data: {named}"
        )

    def _differing(
        self, found: Sequence[Content], names: Sequence[str], *, is_changed: bool
    ) -> tuple[list[str], bool]:
        """Return, in words, the differences between ranks that read the same parts.

        Also return whether ``is_changed`` on any rank.
        """
        mine = [self._mesh.part, is_changed, found, socket.gethostname()]
        rows = exchanged(mine, self._device)
        told = []
        for at, name in enumerate(names):
            kinds: list[tuple[int, Content, list[str]]] = []
            for rank, (part, _, theirs, node) in enumerate(rows):
                one, where = theirs[at], f"{rank} (node {node})"
                alike = next((k for k in kinds if k[0] == part and are_alike(k[1], one)), None)
                if alike is None:
                    kinds.append((part, one, [where]))
                else:
                    alike[2].append(where)
            if len(kinds) > len({part for part, _, _ in kinds}):
                each = (f"{_short(one)} on rank {', '.join(ranks)}" for _, one, ranks in kinds)
                told.append(f"{name} is {' and '.join(each)}")
        return told, any(row[1] for row in rows)

    def _is_repeatable(self, found: Sequence[Content], again: Sequence[Content]) -> bool:
        """Return whether every rank read the same again; otherwise the data is unknown."""
        is_same = all(are_alike(*pair) for pair in zip(found, again, strict=True))
        if all_agree(is_same, self._device):
            return True
        if self._mesh.rank == 0:
            log.warning(
                "samples are not the same when they are read twice, so whether all workers have "
                "the same data is not known; draw random numbers by torch.rand, numpy.random or "
                "random, whose seeds are set here"
            )
        return False


def contents(loader: DataLoader, groups: Sequence[Group], *, seed: int) -> list[Content]:
    """Return an identity of samples of a ``DataLoader``."""
    return loader.contents([index for group in groups for index in group], seed=seed)


def inputs(
    loss_of: Callable[[Any], Any], model: nn.Module, groups: Sequence[Group], *, seed: int
) -> list[Content]:
    """Return an identity of the inputs of the first module that ``loss_of`` calls."""
    found = []
    for group in groups:
        with seeded(random_seed(seed, "inputs", *group)):
            found.append(_first_inputs(loss_of, model, np.array(group, np.int64)))
    return found


def _first_inputs(loss_of: Callable[[Any], Any], model: nn.Module, indices: Any) -> Content:
    def see(_module: nn.Module, args: Any, kwargs: Any) -> None:
        raise CalledSignal(args, kwargs)

    hooks = [
        module.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
        for module in model.modules()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            loss_of(indices)
    except CalledSignal as called:
        return content_of([called.args, called.kwargs])
    finally:
        for hook in hooks:
            hook.remove()
    return content_of(None)


def _cut(indices: Sequence[int], size: int) -> list[Group]:
    return [[*indices[at : at + size]] for at in range(0, len(indices), size)]


def _short(content: Content) -> str:
    return f"{zlib.crc32(repr([round(one, 3) for one in content]).encode()):08x}"
