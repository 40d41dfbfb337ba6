"""A universal checkpoint says how the shards of several ranks made up each tensor."""

import json
from pathlib import Path

from tests.support.commands import ucp
from tests.support.deepspeed_folders import Param, native
from ucp_core.conversion import convert
from ucp_core.formats import open_source
from ucp_core.geometry import TensorKey
from ucp_core.language import Cut, Replicated, load_rules
from ucp_core.native import Checkpoint, open_checkpoint
from ucp_core.storage import LocalStore

MODEL = [
    Param("embed.weight", (6, 4), 0),
    Param("down.weight", (4, 6), 1),
    Param("norm.weight", (4,), group=1),
    Param("scale", (3,), role="buffer"),
]
RULES = """
rules:
- {match: 'embed\\.weight', pattern: {cut: {dim: 0, widths: [3, 3]}}}
- {match: 'down\\.weight', pattern: {cut: -1}}
- {match: '(norm\\.weight|scale)', pattern: {replicated: {check: first}}}
"""
TOLD = {
    "embed.weight": {"cut": {"dim": 0, "widths": [3, 3]}},
    "down.weight": {"cut": -1},
    "norm.weight": {"replicated": {"check": "first"}},
}


def _converted(tmp_path: Path, tp: int) -> Checkpoint:
    source = native(MODEL, tp=tp, dp=2).write(tmp_path / "source")
    opened = open_source(LocalStore(), str(source), rules=load_rules(RULES, "rules"))
    out = str(tmp_path / "out")
    convert(opened, LocalStore(), out, memory_bytes=32 << 20, processes=1)
    return open_checkpoint(LocalStore(), out)


def test_a_manifest_has_what_the_rules_said_of_every_slot(tmp_path: Path) -> None:
    """Afterwards no file shows whether a tensor was put together as its model had it."""
    patterns = _converted(tmp_path, 2).manifest.patterns

    for fqn, pattern in TOLD.items():
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            assert patterns[TensorKey(fqn, slot)] == pattern
    assert TensorKey("norm.weight", "step") not in patterns, "it was in no shard"


def test_patterns_of_a_manifest_can_be_given_as_rules_again(tmp_path: Path) -> None:
    """Words of its own would have to be translated by whoever wants to convert more."""
    patterns = _converted(tmp_path, 2).manifest.patterns
    told = [{"match": key.fqn, "pattern": p} for key, p in patterns.items() if key.slot == "weight"]

    rules = load_rules(json.dumps({"rules": told}), "told")

    assert rules.match("embed.weight", "weight") == Cut(0, widths=(3, 3))
    assert rules.match("norm.weight", "exp_avg") == Replicated("first")


def test_tensors_that_one_rank_held_have_no_pattern(tmp_path: Path) -> None:
    """A word for each of them would say nothing."""
    assert _converted(tmp_path, 1).manifest.patterns == {}


def test_inspect_shows_patterns_and_ties(tmp_path: Path) -> None:
    """For programs: of every tensor, also where there is nothing to tell."""
    made = _converted(tmp_path, 2)

    found = json.loads(ucp("inspect", made.directory, "--json").stdout)["tensors"]

    told = {item["fqn"]: item["pattern"] for item in found if item["slot"] == "weight"}
    assert told.items() >= TOLD.items()
    assert all(item["ties"] == [] for item in found)


def test_a_manifest_has_what_the_source_says_of_itself_with_the_padding(tmp_path: Path) -> None:
    """A vocabulary that was padded has fewer rows than its shards together."""
    info = {
        "universal_checkpoint_version": 0.2,
        "vocabulary_parameter_patterns": [r"embed\.weight"],
        "original_vocab_size": 5,
        "parameter_with_row_parallelism_patterns": [r"down\.weight"],
        "tp_replicated_parameter_patterns": [r"norm\.weight"],
    }
    source = native(MODEL, tp=2, dp=1, info=info).write(tmp_path)

    patterns = open_source(LocalStore(), str(source)).manifest.patterns

    told = {key.fqn: pattern for key, pattern in patterns.items() if key.slot == "exp_avg"}
    assert told == {
        "embed.weight": {"cut": {"dim": 0, "unpadded": 5}},
        "down.weight": {"cut": 1},
        "norm.weight": "replicated",
    }
