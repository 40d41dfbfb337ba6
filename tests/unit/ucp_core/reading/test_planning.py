"""Plans of reads: arithmetic that can be checked by hand."""

from functools import partial

import pytest

from tests.support.work import num_lines
from ucp_core.errors import CheckpointCorruptError, UncoveredRegionError
from ucp_core.geometry import Box, Fragment, StateMap, TensorEntry, TensorKey
from ucp_core.reading import Part, ReadPlan, plan

KEY = TensorKey("w", "weight")


def _map(shape: tuple[int, ...], *boxes: Box, block_bytes: int = 64) -> StateMap:
    fragments = tuple(
        Fragment(box, f"r{index:05d}.bin", 0, 4 * box.num_elements, 0, (0,))
        for index, box in enumerate(boxes)
    )
    entry = TensorEntry(key=KEY, dtype="F32", shape=shape, fragments=fragments)
    return StateMap(entries={KEY: entry}, block_bytes=block_bytes)


def _plan(box: Box, *have: StateMap, span_bytes_max: int = 1 << 20) -> ReadPlan:
    shape = have[0].entries[KEY].shape
    return plan([Part(KEY, "F32", shape, box)], have, span_bytes_max=span_bytes_max)


def test_rows_are_read_only_from_the_files_that_hold_them() -> None:
    """4 ranks saved, 3 load: the middle one needs parts of two files."""
    made = _plan(Box((4, 0), (8, 4)), _map((12, 4), *Box.full((12, 4)).split(0, 4)))

    assert [(c.fragment.file, c.start_byte, c.stop_byte, c.target_byte) for c in made.copies] == [
        ("r00001.bin", 16, 48, 0),
        ("r00002.bin", 0, 32, 32),
    ]
    assert made.needed_bytes == 64


def test_columns_are_gathered() -> None:
    """The bytes lie apart in the file, so they cannot be read into place."""
    (copy,) = _plan(Box((0, 1), (4, 3)), _map((4, 4), Box.full((4, 4)))).copies

    assert (copy.start_byte, copy.stop_byte, copy.target_byte) == (4, 60, -1)


def test_whole_blocks_are_counted_as_read() -> None:
    """The unit of verification is the unit of reading: the prediction must say so."""
    made = _plan(Box((3,), (4,)), _map((100,), Box.full((100,)), block_bytes=64))

    assert (made.needed_bytes, made.read_bytes) == (4, 64)


def test_the_first_source_is_preferred_and_the_next_fills_the_rest() -> None:
    """Memory of a neighbour before storage, box by box."""
    near = StateMap(
        entries={KEY: _map((8,), Box((2,), (4,))).entries[KEY]},
        block_bytes=64,
    )
    far = _map((8,), Box.full((8,)))

    made = _plan(Box((0,), (8,)), near, far)

    assert [(c.source, c.box) for c in made.copies] == [
        (0, Box((2,), (4,))),
        (1, Box((0,), (2,))),
        (1, Box((4,), (8,))),
    ]


def test_no_copy_spans_more_than_it_may() -> None:
    """The memory of whoever executes the plan hangs on it."""
    have = _map((64, 64), Box.full((64, 64)), block_bytes=256)
    for box in (Box.full((64, 64)), Box((0, 0), (64, 3)), Box((0, 5), (64, 64))):
        made = _plan(box, have, span_bytes_max=1024)

        assert max(c.stop_byte - c.start_byte for c in made.copies) <= 1024
        assert len(made.copies) > 1
    # Cut at blocks, so that no block is read twice.
    assert _plan(Box.full((64, 64)), have, span_bytes_max=1024).read_bytes == 64 * 64 * 4


def test_work_is_shared_by_bytes() -> None:
    """Not by count: an embedding weighs more than a thousand norms."""
    made = _plan(Box.full((1024,)), _map((1024,), *Box.full((1024,)).split(0, 64)))
    lists = made.work_lists(4)

    assert [sum(c.stop_byte - c.start_byte for c in work) for work in lists] == [1024] * 4
    assert [c for work in lists for c in work] == list(made.copies)
    assert made.work_lists(1) == [made.copies]
    assert _plan(Box((3,), (3,)), _map((1024,), Box.full((1024,)))).work_lists(1) == []


def test_a_region_that_no_rank_holds_is_named() -> None:
    """And whether the tensor is unknown or only a part is missing."""
    have = _map((8,), Box((0,), (4,)))

    with pytest.raises(UncoveredRegionError, match=r"w \(weight\): box \[4:6\] is in no file"):
        _plan(Box((2,), (6,)), have)
    part = Part(TensorKey("v", "weight"), "F32", (8,), Box.full((8,)))
    with pytest.raises(UncoveredRegionError, match=r"v \(weight\): is not in the checkpoint"):
        plan([part], [have], span_bytes_max=64)


@pytest.mark.parametrize(("dtype", "shape"), [("BF16", (8,)), ("F32", (4, 2))])
def test_another_dtype_or_shape_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """Bytes of another type load without complaint and train to nonsense."""
    with pytest.raises(CheckpointCorruptError, match="load it with the model that saved it"):
        plan(
            [Part(KEY, dtype, shape, Box.full(shape))],
            [_map((8,), Box.full((8,)))],
            span_bytes_max=64,
        )


@pytest.mark.parametrize("dim", [0, 1])
def test_planning_for_a_rank_stays_quick_with_thousands_of_ranks(dim: int) -> None:
    """405 B parameters have about 3400 tensors with optimizer slots: 1 ms each is 3.4 s."""
    shape = (16384, 16384)
    work = {}
    for num_ranks in (1024, 2048):
        have = _map(shape, *Box.full(shape).split(dim, num_ranks))
        need = Box.full(shape).split(dim, num_ranks // 2)[77]
        assert len(_plan(need, have).copies) == 2
        work[num_ranks] = num_lines(partial(_plan, need, have))

    # Planning looks at every fragment once, and never at two of them together.
    assert work[2048] < 2.5 * work[1024]
    assert work[2048] < 100 * 2048


def test_runs_far_apart_are_one_copy_and_only_they_are_counted() -> None:
    """A copy of its own for each of 8,192 rows took longer to plan than to read."""
    shape, columns = (512, 4096), Box((0, 0), (512, 1024))
    fragment = Fragment(Box.full(shape), "f", 0, 4 * 512 * 4096, None, ())
    have = StateMap(
        entries={KEY: TensorEntry(key=KEY, dtype="F32", shape=shape, fragments=(fragment,))},
        block_bytes=1 << 20,
    )
    part = Part(KEY, "F32", shape, columns)

    made = plan([part], [have], span_bytes_max=1 << 20, run_gap_bytes_min=12 << 10)
    nearer = plan([part], [have], span_bytes_max=1 << 20, run_gap_bytes_min=(12 << 10) + 1)

    assert [copy.run_bytes for copy in made.copies] == [1 << 20, 1 << 20]
    assert [copy.box.start for copy in made.copies] == [(0, 0), (256, 0)]
    assert made.read_bytes == made.needed_bytes == 4 * 512 * 1024
    assert [len(copies) for copies in made.work_lists(2)] == [1, 1]
    assert all(copy.run_bytes < 0 for copy in nearer.copies)
    assert nearer.read_bytes > 3 * nearer.needed_bytes


def test_parts_of_tensors_that_are_cut_alike_are_planned_as_each_alone() -> None:
    """Every layer has its own bytes, and its own checksums or none."""
    shape = (8, 4)
    whole = Box.full(shape)
    entries = {}
    for number, (parts, checksum) in enumerate([(4, 0), (4, 0), (2, 0), (4, None), (4, 0)]):
        key = TensorKey(f"layer{number}", "weight")
        fragments = tuple(
            Fragment(box, f"r{number}-{rank}", 100 * number, 128 // parts, checksum, ())
            for rank, box in enumerate(whole.split(0, parts))
        )
        entries[key] = TensorEntry(key=key, dtype="F32", shape=shape, fragments=fragments)
    have = [StateMap(entries=entries, block_bytes=16)]
    boxes = [Box((1, 0), (7, 4)), Box((0, 1), (8, 3))]
    need = [Part(key, "F32", shape, box) for box in boxes for key in entries]

    together = plan(need, have, span_bytes_max=64, gap_bytes_max=4)
    alone = [plan([part], have, span_bytes_max=64, gap_bytes_max=4) for part in need]

    copies = [copy._replace(part=n) for n, made in enumerate(alone) for copy in made.copies]
    assert sorted(together.copies, key=repr) == sorted(copies, key=repr)
    assert together.read_bytes == sum(made.read_bytes for made in alone)


def test_one_tensor_of_another_dtype_is_refused_behind_others_that_are_cut_alike() -> None:
    """Facts about one layer must not let the next one pass."""
    entries = {TensorKey(name, "weight"): _map((8,), Box.full((8,))).entries[KEY] for name in "ab"}
    parts = [Part(key, "F32", (8,), Box.full((8,))) for key in entries]

    with pytest.raises(CheckpointCorruptError, match=r"b \(weight\): the checkpoint has F32"):
        plan(
            [parts[0], parts[1]._replace(dtype="I32")],
            [StateMap(entries=entries, block_bytes=64)],
            span_bytes_max=64,
        )
