"""Which parameters train: the same ones on all workers, and saved with each version."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from workers.collectives import on_host
from workers.errors import TaskError
from workers.parallel import LocalShard, Used
from workers.train.executor.exchange import all_agree

#: The key of a version for the parameters that a script froze at its start, if others are frozen
#: now.
FROZEN_AT_FIRST: Final = "frozen_at_first"


class Trained:
    """Which parameters train, and which are frozen."""

    def __init__(
        self,
        shards: Sequence[LocalShard],
        parameters: Mapping[str, nn.Parameter],
        names: Collection[str],
        used: Used,
        is_updated: Callable[[nn.Parameter], bool],
        device: torch.device,
    ) -> None:
        self._shards, self._parameters = shards, parameters
        self._names, self._used, self._device = sorted(names), used, device
        self._updated = {name for name, one in parameters.items() if is_updated(one)}
        #: Names of the frozen parameters of the whole model, as all workers last agreed.
        self.frozen: tuple[str, ...] = ()
        self.updated: tuple[str, ...] = ()  #: Names of the parameters that an optimizer has.
        self.may_grow = False  #: Whether an optimizer has a frozen one, which may train later.
        self._at_first: tuple[str, ...] = ()
        self._noted: list[bool] = []

    def values(self) -> dict[str, Any]:
        """Return the values that a version keeps for ``begin``, besides the frozen names."""
        is_changed = self._at_first != self.frozen
        return {FROZEN_AT_FIRST: list(self._at_first)} if is_changed else {}

    def begin(self, frozen: Collection[str] | None, values: Mapping[str, Any]) -> None:
        """Agree on frozen parameters, and freeze those of a version; every worker calls it.

        In each attempt a script again freezes its initial choice. If that equals its choice before
        the version, the version counts; if not, the script was changed, and its choice counts.
        ``frozen`` is None without a version, or if it does not record them.
        """
        self.agree("before the first step")
        self._at_first = self.frozen
        known = set(self._names)
        if frozen is None or known & set(values.get(FROZEN_AT_FIRST, frozen)) != set(self.frozen):
            return
        wanted = known & set(frozen)
        for shard in self._shards:
            shard.parameter.requires_grad_(shard.fqn not in wanted)
        self.agree("before the first step")

    @contextmanager
    def growing(self, frozen: Collection[str]) -> Iterator[bool]:
        """Make the optimizers treat all parameters but ``frozen`` as trained, in a block.

        Every worker calls it. Yields whether any frozen parameter was trained in a version.
        """
        self.agree("in session.optimizer")
        grown = set(self.frozen) - set(frozen)
        mine = [one for name, one in self._parameters.items() if name in grown]
        for one in mine:
            one.requires_grad_(True)
        yield bool(grown)
        for one in mine:
            one.requires_grad_(False)

    def has_changed(self) -> bool:
        """Return whether the script has frozen or unfrozen a parameter since the last agreement."""
        return [shard.parameter.requires_grad for shard in self._shards] != self._noted

    def begin_step(self, number: int) -> None:
        """Agree before gradients of parameters that were frozen so far are reduced.

        Every worker calls it. If there can be none, the step's own all-reduce reports changes.
        """
        if not self.may_grow:
            return
        if not all_agree(not self.has_changed(), self._device):
            self.agree(f"in step {number}")

    def agree(self, when: str) -> None:
        """Agree on the parameters that train; every worker calls it. ``when`` is for people.

        Raise ``TaskError`` if one trains on some workers only, or cannot be trained.
        """
        mine = {shard.fqn: shard.parameter.requires_grad for shard in self._shards}
        trains = [mine.get(name) is True for name in self._names]
        freezes = [mine.get(name) is False for name in self._names]
        updated = [name in self._updated for name in self._names]
        said = torch.tensor([trains, freezes, updated], dtype=torch.int32, device=self._device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        found = on_host(said.reshape(-1))
        num = len(self._names)
        frozen: dict[int, str] = {}
        for place, name in enumerate(self._names):
            is_trained, is_frozen = found[place], found[num + place]
            if is_trained and is_frozen:
                here = (
                    f" (it {'trains' if mine[name] else 'is frozen'} here)" if name in mine else ""
                )
                raise TaskError(
                    f"parameter {name} trains on some workers only {when}{here}: "
                    "call requires_grad_ on all workers in the same step",
                    fqn=name,
                )
            if is_frozen:
                frozen[place] = name
        self.frozen, self._used.frozen = tuple(frozen.values()), frozenset(frozen)
        self.updated = tuple(n for n, yes in zip(self._names, found[2 * num :], strict=True) if yes)
        both = zip(found[num : 2 * num], found[2 * num :], strict=True)
        self.may_grow = any(is_frozen and is_updated for is_frozen, is_updated in both)
        # The optimizer's parameters carry the same flag.
        self._noted = [shard.parameter.requires_grad for shard in self._shards]
        for shard, is_trained in zip(self._shards, self._noted, strict=True):
            if is_trained and shard.parameter.dtype != torch.float32:
                raise TaskError(
                    f"parameter {shard.fqn} is {shard.parameter.dtype} and trains now; masters are "
                    "float32: build the model in float32, or leave it frozen",
                    fqn=shard.fqn,
                )
            self._parameters[shard.fqn].requires_grad_(is_trained)
