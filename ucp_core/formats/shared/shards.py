"""Joins the shards in the files of a model-parallel checkpoint to whole tensors.

Pure. Model parallelism cuts a tensor into shards. ZeRO flattens each shard and cuts it into runs.
Readers add runs. ``Shards.entries`` looks up the pattern of each tensor and proves that the runs
cover it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add, mul, sub
from typing import Any, NamedTuple, TypeAlias

from ucp_core.errors import CheckpointCorruptError, PatternError
from ucp_core.geometry import DTYPE_BYTES, Box, Fragment, TensorEntry, TensorKey, flat_range
from ucp_core.language import Cut, Pattern, Placement, extract, place, plain, strip_padding, union
from ucp_core.numerics import shortened
from ucp_core.torch_files import TensorRef


class Rank(NamedTuple):
    """A model-parallel rank: its pipeline stage, and its number within the stage."""

    stage: int
    tp: int


class FlatRun(NamedTuple):
    """Elements ``[start, stop)`` of a flattened shard, side by side in a file."""

    file: str
    offset_bytes: int
    start: int
    stop: int


@dataclass(slots=True)
class Shard:
    """The shard of one tensor on one model-parallel rank."""

    dtype: str  #: Dtype in the files.
    shape: tuple[int, ...]
    #: Places of the elements of the flattened shard.
    runs: list[FlatRun] = field(default_factory=list)
    #: Distances in bytes between neighbours, if the runs are whole rows that are not C-contiguous.
    strides: tuple[int, ...] | None = None


#: Returns the pattern of a tensor by its key and the shapes of its shards, and its extent along
#: dim 0 without padding, or None if there is no padding.
Layouts: TypeAlias = Callable[[TensorKey, Sequence[tuple[int, ...]]], tuple[Pattern, int | None]]


@dataclass(slots=True)
class Shards:
    """Shards by tensor and rank."""

    tp_degree: int  #: Tensor-parallel ranks in a stage.
    #: Patterns of the tensors of ``entries`` as JSON, if there are several ranks.
    patterns: dict[TensorKey, Any] = field(default_factory=dict)
    _found: dict[TensorKey, dict[Rank, Shard]] = field(default_factory=lambda: defaultdict(dict))

    def add_flat(
        self,
        key: TensorKey,
        rank: Rank,
        ref: TensorRef,
        shape: tuple[int, ...],
        at: int = 0,
        span: tuple[int, int] = (0, 0),
    ) -> None:
        """Add elements ``span`` of a flattened shard; the span may be empty.

        Args:
            ref: The tensor that holds them, side by side.
            shape: Shape of the shard.
            at: Number of the first element in the tensor.
        """
        shard = self._found[key].setdefault(rank, Shard(ref.dtype, shape))
        if (shard.dtype, shard.shape) != (ref.dtype, shape):
            raise CheckpointCorruptError(
                f"{key} is {ref.dtype}{list(shape)} in {ref.file}, but another file has it "
                f"as {shard.dtype}{list(shard.shape)}"
            )
        start, stop = span
        if stop > start:
            offset_bytes = ref.offset_bytes + at * DTYPE_BYTES[ref.dtype]
            shard.runs.append(FlatRun(ref.file, offset_bytes, start, stop))

    def add_ref(self, key: TensorKey, rank: Rank, ref: TensorRef) -> None:
        """Add a whole shard; raise ``CheckpointCorruptError`` if the rank has one already."""
        other = self._found[key].get(rank)
        if other is not None and other.runs:
            raise CheckpointCorruptError(
                f"{key} is in {other.runs[0].file} and in {ref.file}, both for rank {rank.tp} "
                f"of stage {rank.stage}: one file is left from another run"
            )
        count = prod(ref.shape)
        runs = [FlatRun(ref.file, ref.offset_bytes, 0, count)] if count else []
        self._found[key][rank] = Shard(ref.dtype, ref.shape, runs, ref.byte_strides)

    def add_rows(
        self, key: TensorKey, rank: Rank, ref: TensorRef, first: int, num_rows: int
    ) -> None:
        """Add a part of a shard that has ``num_rows`` along dim 0: the rows from ``first`` on."""
        row = prod(ref.shape[1:])
        span = first * row, first * row + ref.num_elements
        self.add_flat(key, rank, ref, (num_rows, *ref.shape[1:]), 0, span)
        self._found[key][rank].strides = ref.byte_strides

    def drop(self, key: TensorKey, rank: Rank) -> None:
        """Drop a shard, because the reader has a better one."""
        self._found[key].pop(rank, None)

    def add_empty(self, fqn: str, tp: int, shape: tuple[int, ...]) -> None:
        """Add a rank's shard without elements to every slot and stage that lacks it."""
        for key, ranks in self._found.items():
            if key.fqn == fqn:
                kinds = {rank.stage: shard.dtype for rank, shard in ranks.items()}
                for stage, dtype in kinds.items():
                    ranks.setdefault(Rank(stage, tp), Shard(dtype, shape))

    def fqns(self) -> set[str]:
        """Return the names of all tensors."""
        return {key.fqn for key in self._found}

    def shape_of(self, key: TensorKey, rank: Rank | None = None) -> tuple[int, ...] | None:
        """Return the shape of a rank's shard, or of any rank's; None if there is none."""
        found = self._found.get(key, {})
        shards = found.values() if rank is None else filter(None, [found.get(rank)])
        return next((shard.shape for shard in shards), None)

    def entries(self, layouts: Layouts) -> dict[TensorKey, TensorEntry]:
        """Return the whole tensors."""
        made: dict[TensorKey, TensorEntry] = {}
        unknown: dict[str, PatternError] = {}
        placed: dict[tuple[Pattern, tuple[tuple[int, ...], ...]], _PlacedRuns] = {}
        for key, ranks in self._found.items():
            stages = _by_stage(key, ranks, self.tp_degree)
            shapes = tuple(shard.shape for shard in next(iter(stages.values())))
            try:
                pattern, extent = layouts(key, shapes)
            except PatternError as error:
                if "unknown" not in error.facts:
                    raise
                unknown.setdefault(key.fqn, error)
                continue
            memo = pattern, shapes
            if memo not in placed:
                placed[memo] = _PlacedRuns(place(pattern, shapes, name=str(key)), plain(pattern))
            made[key] = _entry(key, stages, placed[memo], extent)
            if self.tp_degree > 1:
                # The true extent if padding was stripped.
                is_stripped = made[key].shape != placed[memo].placement.shape
                self.patterns[key] = (
                    plain(Cut(0, unpadded=made[key].shape[0]))
                    if is_stripped and pattern == Cut(0)
                    else placed[memo].told
                )
        if unknown:
            names = [str(error.facts["unknown"]) for error in unknown.values()]
            told = f"{next(iter(unknown.values()))} (tensors: {shortened(names, 5)})"
            raise PatternError(told, unknown=tuple(names))
        return dict(sorted(made.items()))


@dataclass(slots=True)
class _PlacedRuns:
    """A placement with the fragments of its runs; layers and slots share them."""

    placement: Placement  #: The placement of all tensors of one pattern and shape.
    told: Any  #: The pattern as JSON.
    #: Fragments by rank and run, for elements of one byte in a file that begins with the run.
    known: dict[tuple[int, int, int], list[Fragment]] = field(default_factory=dict)

    def fragments(self, key: TensorKey, tp: int, start: int, stop: int) -> list[Fragment]:
        """Return the fragments of a run."""
        place_of = tp, start, stop
        found = self.known.get(place_of)
        if found is None:
            flat = start, stop
            found = extract(key, "U8", self.placement, tp, file="", offset_bytes=0, flat=flat)
            self.known[place_of] = found
        return found


def _by_stage(
    key: TensorKey, ranks: dict[Rank, Shard], tp_degree: int
) -> dict[int, tuple[Shard, ...]]:
    """Return the tensor's shards by stage and rank; all stages must agree."""
    found: dict[int, tuple[Shard, ...]] = {}
    for stage in sorted({rank.stage for rank in ranks}):
        missing = [tp for tp in range(tp_degree) if Rank(stage, tp) not in ranks]
        if missing:
            raise CheckpointCorruptError(
                f"{key}: in stage {stage}, the files of tensor parallel rank(s) {missing} lack "
                "it, the files of other ranks have it"
            )
        found[stage] = tuple(ranks[Rank(stage, tp)] for tp in range(tp_degree))
    kinds = {tuple((s.dtype, s.shape) for s in shards) for shards in found.values()}
    if len(kinds) > 1 or len({dtype for dtype, _ in next(iter(kinds))}) > 1:
        raise CheckpointCorruptError(
            f"{key}: ranks hold it in several dtypes, or stages hold it in different shapes: "
            f"{sorted(kinds)}"
        )
    return found


def _entry(
    key: TensorKey,
    stages: dict[int, tuple[Shard, ...]],
    placed: _PlacedRuns,
    extent: int | None,
) -> TensorEntry:
    first = min(stages)
    fragments: list[Fragment] = []
    for stage, shards in stages.items():
        for tp, shard in enumerate(shards):
            fragments += _fragments(key, placed, tp, shard, replica=stage != first)
    entry = union(key, stages[first][0].dtype, placed.placement, fragments)
    if extent is None or not entry.shape or entry.shape[0] <= extent:
        return entry
    return strip_padding(entry, (extent, *entry.shape[1:]))


def _fragments(
    key: TensorKey, placed: _PlacedRuns, tp: int, shard: Shard, *, replica: bool
) -> Iterable[Fragment]:
    itemsize = DTYPE_BYTES[shard.dtype]
    for run in shard.runs:
        if shard.strides is not None:
            yield from _strided(placed.placement, tp, shard, run, replica=replica)
            continue
        for fragment in placed.fragments(key, tp, run.start, run.stop):
            strides = fragment.strides
            yield Fragment(
                box=fragment.box,
                file=run.file,
                offset_bytes=run.offset_bytes + fragment.offset_bytes * itemsize,
                num_bytes=fragment.num_bytes * itemsize,
                crc32=None,
                blocks=(),
                replica=replica or fragment.replica,
                strides=None if strides is None else tuple([s * itemsize for s in strides]),
                copy=fragment.copy,
            )


def _strided(
    placement: Placement, tp: int, shard: Shard, run: FlatRun, *, replica: bool
) -> Iterable[Fragment]:
    """Yield the fragments of rows of a shard that are not C-contiguous in their file."""
    strides = shard.strides
    assert strides is not None, "only strided shards come here"
    itemsize = DTYPE_BYTES[shard.dtype]
    (held,) = flat_range(shard.shape, run.start, run.stop)
    for piece in placement.pieces[tp]:
        local = piece.local.intersect(held)
        if local is None:
            continue
        shape = local.shape
        start = tuple(map(add, piece.start, map(sub, local.start, piece.local.start)))
        first = sum(map(mul, map(sub, local.start, held.start), strides))
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        yield Fragment(
            box=Box(start, tuple(map(add, start, shape))),
            file=run.file,
            offset_bytes=run.offset_bytes + first,
            num_bytes=last + itemsize,
            crc32=None,
            blocks=(),
            replica=replica or piece.replica,
            strides=strides,
            copy=tp if placement.relation == "average" else 0,
        )
