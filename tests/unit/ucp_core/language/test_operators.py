"""The paper's operators on descriptions: what they say of files, and what they refuse."""

import re
from dataclasses import replace

import pytest

from ucp_core.errors import PatternError
from ucp_core.geometry import Box, StateMap, TensorEntry, TensorKey
from ucp_core.language import (
    Cut,
    Pattern,
    Replicated,
    Rules,
    builtin_rules,
    extract,
    place,
    rename,
    strip_padding,
    target_map,
    tie,
    union,
)
from ucp_core.language.rules import Rule, Stages
from ucp_core.layout import ParallelLayout
from ucp_core.manifest import Item, Kind, Manifest

KEY = TensorKey("w", "weight")


def test_a_column_shard_is_read_as_it_lies() -> None:
    """Its box is C-contiguous in its own file, and a part of each row in the tensor."""
    placement = place(Cut(1), [(4, 3), (4, 3)])

    [fragment] = extract(KEY, "BF16", placement, 1, file="f", offset_bytes=10, crc32=7, blocks=(7,))

    assert fragment.box == Box((0, 3), (4, 6))
    assert (fragment.offset_bytes, fragment.num_bytes) == (10, 24)
    assert (fragment.strides, fragment.crc32, fragment.blocks) == (None, 7, (7,))


def test_parts_along_the_last_dim_are_strided() -> None:
    """The two parts of GPT-2's c_attn take turns in every row of a shard."""
    placement = place(Cut(1, ratio=(1, 1)), [(4, 6), (4, 6)])

    one, two = extract(KEY, "F32", placement, 0, file="f", offset_bytes=0, crc32=7, blocks=(7,))

    assert (one.box, one.strides, one.num_bytes) == (Box((0, 0), (4, 3)), (24, 4), 3 * 24 + 12)
    assert (two.box, two.offset_bytes) == (Box((0, 6), (4, 9)), 12)
    assert (one.crc32, one.blocks) == (None, ())


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


SHAPES = {
    TensorKey(fqn, "weight"): ("F32", shape)
    for fqn, shape in {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.1.mlp.down_proj.weight": (4, 6),
        "model.norm.weight": (4,),
        "lm_head.weight": (10, 4),
    }.items()
}


def test_a_target_rank_needs_its_stage_its_columns_and_its_rows() -> None:
    """Rank 6 of pp=2 x dp_shard=2 x tp=2: second stage, second half of rows, first of columns."""
    layout = ParallelLayout(pp=2, dp_shard=2, tp=2)

    parts = target_map(SHAPES, builtin_rules("llama"), layout, 6)

    assert {part.key.fqn: part.box for part in parts} == {
        "model.layers.1.mlp.down_proj.weight": Box((2, 0), (4, 3)),
        "model.norm.weight": Box((2,), (4,)),
        "lm_head.weight": Box((3, 0), (5, 4)),
    }


@pytest.mark.parametrize(
    ("rules", "layout", "problem"),
    [
        (Rules(), ParallelLayout(tp=2), "no rule says how 2 tensor-parallel ranks hold it"),
        (Rules(), ParallelLayout(pp=2), "do not say which pipeline stage"),
        (Rules(), ParallelLayout(dp_shard=2, ep=2), "a target with ep=2 is not described by rules"),
        (
            Rules((Rule(".*", Cut(0, parts=(7, 3))),)),
            ParallelLayout(tp=2),
            "model.embed_tokens.weight (weight): a part of 7 cannot be divided evenly over 2",
        ),
        (
            Rules(stages=Stages(r"model\.layers\.(\d+)\..*", first=(".*embed.*",))),
            ParallelLayout(pp=2),
            "no rule says which of 2 pipeline stages has it",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(
    rules: Rules, layout: ParallelLayout, problem: str
) -> None:
    """A tensor that is put somewhere by a guess trains wrongly."""
    with pytest.raises(PatternError, match=re.escape(problem)):
        target_map(SHAPES, rules, layout, 0)


def test_scalars_are_on_every_rank() -> None:
    """Adam's step is a 0-d tensor; nothing can cut it and no rule names it."""
    key = TensorKey("w", "step")
    layout = ParallelLayout(dp_shard=2, tp=2)

    for rank in range(4):
        [part] = target_map({key: ("F32", ())}, Rules(), layout, rank)
        assert part.box == Box((), ())


def test_a_slot_of_another_shape_has_a_rule_of_its_own() -> None:
    """Adafactor keeps a sum over rows: what is dim 1 of the weight is its only dim."""
    col = TensorKey("model.layers.1.mlp.down_proj.weight", "exp_avg_sq_col")
    patterns: list[tuple[str | None, Pattern]] = [(None, Cut(1)), (col.slot, Cut(0))]
    rules = Rules(tuple(Rule(".*", pattern, slot) for slot, pattern in patterns))

    [part] = target_map({col: ("F32", (6,))}, rules, ParallelLayout(tp=2), 1)

    assert part.box == Box((3,), (6,))
