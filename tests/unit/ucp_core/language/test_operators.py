"""The paper's operators on descriptions: what they say of files, and what they refuse."""

import re
from dataclasses import replace

import pytest

from ucp_core.errors import PatternError
from ucp_core.geometry import Box, StateMap, TensorEntry, TensorKey
from ucp_core.language import (
    Cut,
    Replicated,
    extract,
    place,
    rename,
    strip_padding,
    tie,
    union,
)
from ucp_core.manifest import Item, Kind, Manifest

KEY = TensorKey("w", "weight")


def test_a_column_shard_is_read_as_it_lies() -> None:
    """Its box is C-contiguous in its own file, and a part of each row in the tensor."""
    placement = place(Cut(1), [(4, 3), (4, 3)])

    [fragment] = extract(KEY, "BF16", placement, 1, file="f", offset_bytes=10)

    assert fragment.box == Box((0, 3), (4, 6))
    assert (fragment.offset_bytes, fragment.num_bytes) == (10, 24)
    assert fragment.strides is None


def test_a_zero_range_with_padding_is_cut_at_the_end_of_the_shard() -> None:
    """ZeRO-3 gives the last rank ceil(numel / dp) elements, whether they exist or not."""
    placement = place(Cut(0), [(2, 5)])

    fragments = extract(KEY, "F32", placement, 0, file="f", offset_bytes=100, flat=(8, 12))

    assert [(f.box, f.offset_bytes, f.num_bytes) for f in fragments] == [
        (Box((1, 3), (2, 5)), 100, 8)
    ]
    assert extract(KEY, "F32", placement, 0, file="f", offset_bytes=0, flat=(12, 16)) == []


def test_ranges_that_cannot_be_are_refused() -> None:
    """A rank file of another run, or a mapping that was damaged."""
    placement = place(Cut(0), [(2, 5)])

    with pytest.raises(PatternError, match=re.escape("w (weight): flat range [4, 2) in f")):
        extract(KEY, "F32", placement, 0, file="f", offset_bytes=0, flat=(4, 2))
    with pytest.raises(PatternError, match=re.escape("w (weight): rank 1 of 1 in f")):
        extract(KEY, "F32", placement, 1, file="f", offset_bytes=0)


def test_replicas_are_kept_to_be_compared_or_left_out() -> None:
    """``check: first`` is for copies that are known to differ."""
    for check, count in (("equal", 3), ("first", 1)):
        placement = place(Replicated(check), [(4,)] * 3)  # type: ignore[arg-type]
        found = [
            f
            for rank in (2, 1, 0)
            for f in extract(KEY, "F32", placement, rank, file=f"{rank}", offset_bytes=0)
        ]
        entry = union(KEY, "F32", placement, found)
        assert len(entry.fragments) == count
        assert (entry.fragments[0].file, entry.fragments[0].replica) == ("0", False)


def test_padding_is_stripped_only_off_a_larger_tensor() -> None:
    """A wrong vocabulary size must not invent rows."""
    placement = place(Cut(0), [(4, 2)])
    found = extract(KEY, "F32", placement, 0, file="f", offset_bytes=0)
    entry = union(KEY, "F32", placement, found)

    assert strip_padding(entry, (4, 2)) == entry
    assert strip_padding(entry, (3, 2)).fragments[0].num_bytes == 24
    for shape in ((5, 2), (4,)):
        with pytest.raises(PatternError, match=r"w \(weight\): has shape \[4, 2\], which padding"):
            strip_padding(entry, shape)


def _manifest(*fqns: str) -> Manifest:
    entries = {
        TensorKey(fqn, slot): TensorEntry(
            key=TensorKey(fqn, slot), dtype="F32", shape=(0,), fragments=()
        )
        for fqn in fqns
        for slot in ("weight", "exp_avg")
    }
    return Manifest(
        kind=Kind.FOREIGN,
        step=0,
        attempt=0,
        state_map=StateMap(entries=entries, block_bytes=1),
        files={},
        param_groups=[{"params": list(fqns), "lr": 0.1}, {"lr": 0.2}],
        ties={"head": "a"},
        roles={"b": "frozen"},
        items={"rng": Item("reseed", "")},
        patterns={TensorKey("b", "weight"): "replicated"},
    )


def test_a_new_name_counts_in_every_slot_group_tie_and_role() -> None:
    """An optimizer whose names did not follow would load moments of nothing."""
    renamed = rename(_manifest("a", "b"), {"a": "b", "b": "c", "head": "out"})

    assert {str(key) for key in renamed.state_map.entries} == {
        "b (weight)",
        "b (exp_avg)",
        "c (weight)",
        "c (exp_avg)",
    }
    assert all(key == entry.key for key, entry in renamed.state_map.entries.items())
    assert renamed.param_groups == [{"params": ["b", "c"], "lr": 0.1}, {"lr": 0.2}]
    assert (renamed.ties, renamed.roles) == ({"out": "b"}, {"c": "frozen"})
    assert renamed.patterns == {TensorKey("c", "weight"): "replicated"}
    assert rename(renamed, {}) == replace(
        renamed,
        state_map=replace(
            renamed.state_map, entries=dict(sorted(renamed.state_map.entries.items()))
        ),
    )


def test_names_that_would_meet_are_refused() -> None:
    """One of the two tensors would be lost."""
    with pytest.raises(PatternError, match="c: would be the new name of both a and b"):
        rename(_manifest("a", "b"), {"a": "c", "b": "c"})
    with pytest.raises(PatternError, match="b: would be the new name of both a and b"):
        rename(_manifest("a", "b"), {"a": "b"})
    with pytest.raises(PatternError, match=r"x: to be renamed, but .* no such tensor \(1 such"):
        rename(_manifest("a"), {"x": "y"})


def _held(fqn: str, slot: str, shape: tuple[int, ...], file: str) -> TensorEntry:
    placement = place(Cut(0), [shape])
    key = TensorKey(fqn, slot)
    return union(
        key, "F32", placement, extract(key, "F32", placement, 0, file=file, offset_bytes=0)
    )


def test_the_bytes_of_an_alias_become_a_replica() -> None:
    """The first and the last stage hold a tied embedding each, and they must be equal."""
    entries = [
        _held("embed", "weight", (4,), "stage0"),
        _held("head", "weight", (4,), "stage1"),
        _held("other", "weight", (4,), "stage1"),
    ]
    manifest = replace(
        _manifest(),
        state_map=StateMap(entries={e.key: e for e in entries}, block_bytes=1),
        param_groups=[{"params": ["embed", "head", "other"]}],
        ties={},
        roles={"head": "frozen", "other": "frozen"},
    )

    tied = tie(manifest, {"head": "embed", "unsaved": "embed"})

    assert [str(key) for key in tied.state_map.entries] == ["embed (weight)", "other (weight)"]
    fragments = tied.state_map.entries[TensorKey("embed", "weight")].fragments
    assert [(f.file, f.replica) for f in fragments] == [("stage0", False), ("stage1", True)]
    assert tied.param_groups == [{"params": ["embed", "other"]}]
    assert tied.ties == {"head": "embed", "unsaved": "embed"}
    assert tied.roles == {"other": "frozen"}
    tied.state_map.prove_coverage()


def test_ties_that_cannot_be_are_refused() -> None:
    """Two tensors of different shapes are no aliases of each other."""
    entries = [_held("a", "weight", (4,), "f"), _held("b", "weight", (5,), "f")]
    manifest = replace(
        _manifest(), state_map=StateMap(entries={e.key: e for e in entries}, block_bytes=1)
    )

    for ties, problem in (
        ({"a": "c"}, "a: tied to c, which the checkpoint does not have"),
        ({"a": "b", "b": "a"}, "a: tied to b, which is tied itself"),
        ({"b": "a"}, "b (weight): tied to a, but it has F32[5] and a F32[4]"),
    ):
        with pytest.raises(PatternError, match=re.escape(problem)):
            tie(manifest, ties)
