"""Differences are found, counted and placed; equal values are not, whatever their layout."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import ROOT, State, Whole, random_sharding, save, small_state
from ucp_core.conversion import convert
from ucp_core.errors import ChecksumMismatchError, UcpError
from ucp_core.formats import open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.geometry import TensorKey
from ucp_core.inspection import TensorDiff, Tolerance, diff
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import MemoryStore

W = TensorKey("w", "weight")


def _checkpoint(state: State, *, world_size: int = 2, **changes: Any) -> Checkpoint:
    store = MemoryStore()
    sharding = random_sharding(random.Random(world_size), state, world_size)
    save(store, state, step=7, world_size=world_size, sharding=sharding)
    opened = open_checkpoint(store, f"{ROOT}/step-00000007")
    groups = [{"params": ["a", "b"], "lr": 0.1}]
    manifest = replace(opened.manifest, **({"param_groups": groups} | changes))
    return replace(opened, manifest=manifest)


def _one(values: Any, dtype: str = "F32") -> Checkpoint:
    array = np.asarray(values)
    return _checkpoint({W: Whole(dtype=dtype, shape=array.shape, data=array.tobytes())})


def _difference(one: Any, two: Any, dtype: str = "F32", **options: Any) -> TensorDiff:
    (found,) = diff(_one(one, dtype), _one(two, dtype), **options).tensors
    return found


def test_equal_checksums_are_not_read() -> None:
    """A terabyte is compared with its copy by its manifests, in either form of it."""
    state = small_state()
    store = MemoryStore()
    sharding = [{key: [box] for key, box in _rows(state, rank)} for rank in range(2)]
    save(store, state, step=7, sharding=sharding)
    native = open_checkpoint(store, f"{ROOT}/step-00000007")
    convert(native, store, "universal", memory_bytes=8 << 20, processes=1)

    report = diff(native, open_checkpoint(store, "universal"))

    assert report.equal
    assert report.num_proven == report.num_equal == len(state)
    assert report.compared_bytes == 0
    everything = diff(native, open_checkpoint(store, "universal"), read_all=True)
    assert everything.num_proven == 0
    assert everything.compared_bytes == native.state_map.num_bytes


def _rows(state: State, rank: int) -> list[tuple[TensorKey, Any]]:
    from ucp_core.geometry import Box

    found = []
    for key, tensor in state.items():
        boxes = Box.full(tensor.shape).split(0, 2) if tensor.shape else (Box((), ()),) * 2
        if tensor.shape or rank == 0:
            found.append((key, boxes[rank]))
    return found


def test_bytes_that_rotted_are_found_when_everything_is_read() -> None:
    """Checksums of manifests say what was written, not what is there."""
    state = small_state()
    a, b = _checkpoint(state, world_size=1), _checkpoint(state, world_size=1)
    entry = b.state_map.entries[TensorKey("wte", "weight")]
    path = f"{b.directory}/{entry.fragments[0].file}"
    data = bytearray(b.store.read(path))
    data[entry.fragments[0].offset_bytes] ^= 1
    b.store.write_atomic(path, bytes(data), fsync=False)

    assert diff(a, b).equal
    with pytest.raises(ChecksumMismatchError, match="wte"):
        diff(a, b, read_all=True)


def test_a_flipped_bit_of_a_torch_file_is_damage_and_no_difference() -> None:
    """Its record has a checksum of its own, which the whole of it has to be read for."""
    store = MemoryStore()
    source = _checkpoint(small_state())
    dcp_writer.write(source, store, "dcp", memory_bytes=8 << 20)
    opened = open_source(store, "dcp")
    assert diff(source, opened, slots=["weight"]).equal
    (fragment,) = opened.state_map.entries[TensorKey("wte", "weight")].fragments
    data = bytearray(store.read(f"dcp/{fragment.file}"))
    data[fragment.offset_bytes + 5] ^= 4
    store.write_atomic(f"dcp/{fragment.file}", bytes(data), fsync=False)

    with pytest.raises(ChecksumMismatchError, match="wte"):
        diff(source, open_source(store, "dcp"))
    with pytest.raises(ChecksumMismatchError, match="wte"):
        dcp_writer.write(open_source(store, "dcp"), store, "again", memory_bytes=8 << 20)
    assert store.list("again") == ()


def test_a_difference_is_counted_and_placed() -> None:
    """Its index is in the whole tensor, in whatever piece it was found."""
    one = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    two = one.copy()
    two[1, 0, 2] += 0.5
    two[1, 2, 3] = -1

    found = _difference(one, two)

    assert (found.kind, found.num_elements, found.num_different) == ("values", 24, 2)
    assert found.first_index == (1, 0, 2)
    assert found.first_values == (14.0, 14.5)
    assert found.max_abs == 24.0
    assert found.num_nan == 0


def test_the_place_is_right_behind_the_first_piece_and_the_first_chunk() -> None:
    """Large tensors are compared in many pieces by several threads."""
    one = np.zeros((3000, 1000), dtype=np.float32)
    two = one.copy()
    two[2500, 123] = two[2999, 999] = 1

    found = _difference(one, two, memory_bytes=16 << 20, threads=2)

    assert found.first_index == (2500, 123)
    assert found.num_different == 2
    assert found.max_ulp == 0x3F800000


@pytest.mark.parametrize(
    ("one", "two", "dtype", "max_abs", "max_ulp"),
    [
        pytest.param(np.float32(1), np.nextafter(np.float32(1), 2), "F32", 2**-23, 1, id="ulp"),
        pytest.param(np.float32(0), np.float32(-0.0), "F32", 0.0, 0, id="two zeros"),
        pytest.param(np.float64(-5e-324), np.float64(5e-324), "F64", 1e-323, 2, id="over zero"),
        pytest.param(np.uint16(0x3F80), np.uint16(0x3F81), "BF16", 2**-7, 1, id="bfloat16"),
        pytest.param(np.float16(1), np.float16(2), "F16", 1.0, 1024, id="float16"),
        pytest.param(np.int64(-(2**63)), np.int64(2**63 - 1), "I64", 2.0**64, None, id="int64"),
        pytest.param(np.uint8(3), np.uint8(250), "U8", 247.0, None, id="uint8"),
        pytest.param(np.bool_(0), np.bool_(1), "BOOL", 1.0, None, id="truth"),
        pytest.param(np.complex64(1j), np.complex64(1), "C64", math.sqrt(2), None, id="complex"),
        pytest.param(np.float32(3), np.float32(np.inf), "F32", np.inf, None, id="infinity"),
        pytest.param(np.uint8(1), np.uint8(2), "F8_E8M0", None, None, id="opaque"),
        pytest.param(np.uint8(0x38), np.uint8(0x40), "F8_E4M3", 1.0, None, id="float8"),
    ],
)
def test_distances_are_exact_in_every_dtype(
    one: Any, two: Any, dtype: str, max_abs: float | None, max_ulp: int | None
) -> None:
    """Signed distances overflow, and floats are not in the order of their bits below zero."""
    found = _difference([one, one], [one, two], dtype)

    assert found.num_different == 1
    assert found.first_index == (1,)
    assert found.max_abs == (pytest.approx(max_abs) if max_abs is not None else None)
    if dtype != "F32" or np.isfinite(two):
        assert found.max_ulp == max_ulp


def test_nan_equals_itself_and_counts_apart() -> None:
    """Resumed runs are compared bit by bit; one NaN must not hide the largest distance."""
    nan = np.float32(np.nan)
    one = np.array([nan, nan, 1, 2], dtype=np.float32)

    assert diff(_one(one), _one(one)).equal
    found = _difference(one, np.array([nan, 3, nan, 2.5], dtype=np.float32))
    assert (found.num_different, found.num_nan, found.max_abs) == (3, 2, 0.5)
    only_nan = _difference(one[:1], np.zeros(1, dtype=np.float32))
    assert (only_nan.num_nan, only_nan.max_abs, only_nan.max_ulp) == (1, None, None)


def test_what_is_within_the_tolerance_does_not_count() -> None:
    """Absolute for small numbers, relative for large; infinity allows nothing."""
    one = np.array([1.0, 100.0, np.nan, np.inf, np.inf, 5.0], dtype=np.float32)
    other_nan = np.uint32(0x7FC00001).view(np.float32)
    two = np.array([1.0009, 100.9, other_nan, np.inf, 7.0, np.inf], dtype=np.float32)

    found = _difference(one, two, tolerance=Tolerance(1e-3, 1e-2))
    assert (found.num_different, found.first_index) == (2, (4,))
    assert diff(_one(one[:4]), _one(two[:4]), tolerance=Tolerance(1e-3, 1e-2)).equal
    absolute = _difference(one[:3], two[:3], tolerance=Tolerance(absolute=1e-3))
    assert (absolute.num_different, absolute.first_index) == (1, (1,))


def test_dtypes_are_compared_after_casting_only_if_asked() -> None:
    """A float32 master and the bfloat16 made from it hold the same, one of them less of it."""
    wide = np.array([1.0, 1.001, 3.14159], dtype=np.float32)
    bits = wide.view(np.uint32)
    narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    a, b = _one(wide), _one(narrow, "BF16")

    (found,) = diff(a, b).tensors
    assert (found.kind, found.dtypes) == ("dtype", ("F32", "BF16"))
    assert diff(a, b, cast=True).equal
    assert diff(b, a, cast=True).equal
    narrow[2] += 1
    (found,) = diff(a, _one(narrow, "BF16"), cast=True).tensors
    assert (found.num_different, found.first_index, found.max_ulp) == (1, (2,), 1)
    halves = _one(np.array([1.0, 2.0, 0.5], dtype=np.float16), "F16")
    brain = _one(np.array([0x3F80, 0x4000, 0x3F00], dtype=np.uint16), "BF16")
    assert diff(halves, brain, cast=True).equal


def test_missing_tensors_and_other_shapes_are_named() -> None:
    """They are no difference of values, and nothing is read for them."""
    state = small_state()
    other = dict(state)
    del other[TensorKey("norm", "exp_avg")]
    other[TensorKey("more", "weight")] = other[TensorKey("norm", "weight")]
    other[TensorKey("head", "weight")] = replace(other[TensorKey("head", "weight")], shape=(5, 3))

    report = diff(_checkpoint(state), _checkpoint(other))

    assert [(t.fqn, t.slot, t.kind) for t in report.tensors] == [
        ("head", "weight", "shape"),
        ("more", "weight", "only in b"),
        ("norm", "exp_avg", "only in a"),
    ]
    assert report.tensors[0].shapes == ((3, 5), (5, 3))
    assert report.tensors[1].shapes == (None, (4,))


def test_a_tied_name_is_its_owner() -> None:
    """Some formats store it twice; the numbers are the same."""
    state = small_state()
    twice = state | {TensorKey("tied", "weight"): state[TensorKey("wte", "weight")]}

    report = diff(_checkpoint(state, ties={"tied": "wte"}), _checkpoint(twice))

    assert report.tensors == ()
    assert [(v.path, v.only_in) for v in report.values] == [("ties.tied", "a")]


def test_small_values_are_compared_leaf_by_leaf() -> None:
    """A learning rate that was lost spoils a run as surely as a tensor."""
    state = small_state()
    a = _checkpoint(state, extra={"rng": {"seed": 1, "x": [1, 2]}, "on": True})
    b = _checkpoint(
        state,
        extra={"rng": {"seed": 2, "x": [1]}, "on": 1},
        param_groups=[{"params": ["b", "c"], "lr": 0.2}],
        roles={"wte": "frozen"},
        step=8,
    )

    found = {value.path: (value.in_a, value.in_b) for value in diff(a, b).values}

    assert found == {
        "param_groups[0].params.a": (True, None),
        "param_groups[0].params.c": (None, True),
        "param_groups[0].lr": (0.1, 0.2),
        "extra.rng.seed": (1, 2),
        "extra.rng.x[1]": (2, None),
        "extra.on": (True, 1),
        "roles.wte": (None, "frozen"),
        "step": (7, 8),
    }
    assert diff(a, b, slots=["weight"]).equal
    assert diff(a, b, names="wte").equal


def test_only_what_was_asked_for_is_compared() -> None:
    """One layer of a large model, or the weights alone."""
    state = small_state()
    other = {key: replace(t, data=bytes(len(t.data))) for key, t in state.items()}
    a, b = _checkpoint(state), _checkpoint(other)

    keys = [(t.fqn, t.slot) for t in diff(a, b, names="^w", slots={"exp_avg"}).tensors]
    assert keys == [("wte", "exp_avg")]
    assert len(diff(a, b, names="head|norm").tensors) == 4
    with pytest.raises(UcpError, match="not a regular expression"):
        diff(a, b, names="(")


def test_the_report_is_json() -> None:
    """NaN and infinity are none."""
    a = _one(np.array([1, np.inf], dtype=np.float32))
    b = _one(np.array([np.nan, 1], dtype=np.float32))

    document = json.loads(json.dumps(diff(a, b).to_json(), allow_nan=False))

    assert document["equal"] is False
    assert document["tensors"][0]["first_values"] == [1.0, "nan"]
    assert document["tensors"][0]["max_abs"] == "inf"
