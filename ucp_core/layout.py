"""Parallel layouts: the degree of each mesh axis, and the place of each rank. Pure.

Ranks are numbered row-major over ``AXES``: the last axis varies fastest, so the ranks that
communicate most (tp) are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

#: Mesh axes, outermost first. ``ep`` regroups the ranks of ``dp_shard``, so it does not add ranks.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: The same places with ``dp_shard`` split in two: ranks with the same experts, and with others.
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The degree of every mesh axis."""

    pp: int = 1  #: Pipeline stages.
    dp_replicate: int = 1  #: Full copies of the model (HSDP's outer axis).
    dp_shard: int = 1  #: Ways in which parameters and optimizer state are sharded (FSDP2).
    cp: int = 1  #: Context-parallel ways.
    tp: int = 1  #: Tensor-parallel ways.
    #: Expert-parallel ways, taken out of ``dp_shard``: neighbours on it have other experts.
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            assert isinstance(degree, int), f"{field.name}={degree!r} is not an int"
            assert degree >= 1, f"{field.name}={degree} must be at least 1"
        assert self.dp_shard % self.ep == 0, f"ep={self.ep} must divide dp_shard={self.dp_shard}"

    @property
    def world_size(self) -> int:
        """Return the number of workers that the layout needs."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks; each has samples of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Return the ways in which ``dp_shard`` shards experts."""
        return self.dp_shard // self.ep

    def coordinates(self, rank: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
        """Return the place of ``rank`` on every axis of ``AXES``, or of ``EXPERT_AXES``."""
        assert 0 <= rank < self.world_size, f"rank {rank} is not in a world of {self.world_size}"
        place: dict[str, int] = {}
        for axis in reversed(axes):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in axes}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Return the rank at ``coordinates``, outermost first; the inverse of ``coordinates``."""
        rank = 0
        for axis, place in coordinates.items():
            degree = getattr(self, axis)
            assert 0 <= place < degree, f"{axis}={place} of {degree}"
            rank = rank * degree + place
        return rank

    def data_rank(self, rank: int) -> int:
        """Return which data-parallel rank, ``0 <= r < dp``, feeds ``rank``."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def ranks_along(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on ``axes`` at most, in order.

        Axes are those of ``AXES`` and ``EXPERT_AXES``.
        """
        free = {*axes, *(("efsdp", "ep") if "dp_shard" in axes else ())}
        place = self.coordinates(rank, EXPERT_AXES)
        ranges = [
            range(getattr(self, axis)) if axis in free else (at,) for axis, at in place.items()
        ]
        return tuple(self.rank(dict(zip(place, at, strict=True))) for at in product(*ranges))

    def to_json(self) -> dict[str, int]:
        """Return the degrees by axis name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ParallelLayout:
        """Return the layout that ``to_json`` wrote; an unknown axis raises ``TypeError``."""
        return cls(**document)

    def __str__(self) -> str:
        """Return the axes above 1, as in ``dp_shard=4 x tp=2``; ``1 worker`` if there are none."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        used = [part for part in parts if not part.endswith("=1")]
        return " x ".join(used) or "1 worker"
