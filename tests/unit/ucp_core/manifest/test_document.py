"""Documents that are wrong: every problem at once, each with its place."""

import copy
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import ROOT, save, small_state
from ucp_core.conversion import convert
from ucp_core.errors import (
    CheckpointCorruptError,
    UcpError,
    UnsupportedVersionError,
)
from ucp_core.geometry import StateMap, TensorKey
from ucp_core.manifest import Item, Kind, Manifest, from_bytes, merge, to_bytes, to_json
from ucp_core.manifest.document import parse, validate
from ucp_core.native import open_checkpoint
from ucp_core.numerics import crc32
from ucp_core.storage import LocalStore, MemoryStore

DIRECTORY = f"{ROOT}/step-00000007"
ROOT_FOLDER = Path(__file__).parents[4]
WTE = TensorKey("wte", "weight")


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    save(made, small_state(), step=7)
    convert(open_checkpoint(made, DIRECTORY), made, "universal", memory_bytes=8 << 20, processes=1)
    return made


@pytest.fixture
def native(store: MemoryStore) -> dict[str, Any]:
    return to_json(open_checkpoint(store, DIRECTORY).manifest)


def _sealed(body: bytes) -> bytes:
    return body + b',"crc32":"%08x"}\n' % crc32(body)


def test_every_problem_is_reported_at_once(native: dict[str, Any]) -> None:
    """One at a time would mean one run of the program for each."""
    fragment = native["tensors"]["wte"]["slots"]["weight"]["fragments"][0]
    native["step"] = -1
    native["tensors"]["norm"]["slots"]["weight"]["dtype"] = "F33"
    native["tensors"]["head"]["shape"] = [3, "5"]
    fragment["box"][0] = [0, 99]
    fragment["file"] = "a0001-r00009.bin"
    fragment["nbytes"] = True
    native["param_groups"][0]["params"] = [3]
    native["files"]["../../etc/passwd"] = {"nbytes": 1, "crc32": 1 << 32}

    paths = {problem.path for problem in validate(native)}

    assert paths == {
        "step",
        "tensors.norm.slots.weight.dtype",
        "tensors.head.shape[1]",
        "tensors.wte.slots.weight.fragments[0].box",
        "tensors.wte.slots.weight.fragments[0].file",
        "tensors.wte.slots.weight.fragments[0].nbytes",
        "param_groups[0].params[0]",
        "files.../../etc/passwd",
        "files.../../etc/passwd.crc32",
    }


def test_the_error_lists_the_problems(native: dict[str, Any]) -> None:
    """In its text for people and in its facts for programs."""
    native["step"] = native["attempt"] = None

    with pytest.raises(
        CheckpointCorruptError, match=r"x.json is not valid: step: .*; attempt: "
    ) as e:
        parse(native, where="x.json")
    assert [problem.path for problem in e.value.facts["problems"]] == ["step", "attempt"]


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "a/b", "extra/../x", "..", ".", "", "a\\b", "x\0", "extra/"],
)
def test_a_file_outside_of_the_directory_is_refused(name: str, native: dict[str, Any]) -> None:
    """A manifest from somebody else must not make us read or overwrite anything of ours."""
    native["files"][name] = {"nbytes": 0, "crc32": 0}

    assert [problem.path for problem in validate(native)] == [f"files.{name}"]


def test_a_fragment_behind_the_end_of_its_file_is_refused(native: dict[str, Any]) -> None:
    """Before anything is read: the manifest contradicts itself."""
    native["files"]["a0001-r00000.bin"]["nbytes"] = 3

    assert any("ends at byte" in problem.message for problem in validate(native))


def test_wrong_numbers_of_blocks_and_strides_are_refused(native: dict[str, Any]) -> None:
    """Blocks that are not there would not be verified; strides belong to a later version."""
    fragment = native["tensors"]["wte"]["slots"]["weight"]["fragments"][0]
    fragment["blocks"] = [1, 2]
    fragment["strides"] = [1, 4]

    assert sorted(problem.path.rsplit(".")[-1] for problem in validate(native)) == [
        "blocks",
        "strides",
    ]


def test_an_unknown_key_is_allowed(native: dict[str, Any]) -> None:
    """A later writer of version 1 may add some; a reader of today goes on."""
    native["later"] = {"x": 1}
    native["tensors"]["wte"]["colour"] = ["head"]

    assert validate(native) == []


def test_a_newer_version_is_said_to_be_newer(native: dict[str, Any]) -> None:
    """Its other "problems" would only confuse."""
    native["version"] = 2
    native["tensors"] = "something else"

    with pytest.raises(UnsupportedVersionError, match="update everstep"):
        parse(native)


@pytest.mark.parametrize("document", [None, 3, [], "x", {}], ids=repr)
def test_what_is_no_manifest_at_all_is_our_error(document: object) -> None:
    """For instance the JSON of another tool."""
    with pytest.raises(CheckpointCorruptError):
        parse(document)


def test_what_json_cannot_hold_is_refused_when_saving() -> None:
    """NaN is no JSON: another reader would stumble over it later, when the state is gone."""
    for bad in (float("nan"), object(), {1: 2}.keys()):
        manifest = Manifest(
            kind=Kind.DISTRIBUTED,
            step=1,
            attempt=1,
            state_map=StateMap(entries={}, block_bytes=1),
            files={},
            extra={"loss": bad},
            world_size=1,
        )
        with pytest.raises(UcpError, match="cannot be kept as JSON"):
            to_bytes(manifest)


def test_extra_of_a_universal_manifest_names_known_files(store: MemoryStore) -> None:
    """Otherwise it is a way to read any file."""
    document = to_json(open_checkpoint(store, "universal").manifest)
    broken = copy.deepcopy(document)
    broken["extra"]["cursor"] = "../secret.json"

    assert validate(document) == []
    assert [problem.path for problem in validate(broken)] == ["extra.cursor"]


def test_the_manifest_is_plain_json(store: MemoryStore) -> None:
    """The seal is a member of the object, so that any tool reads the document."""
    document = json.loads(store.read("universal/manifest.json"))

    assert document["format"] == "everstep-universal"
    assert list(document)[-1] == "crc32"
    assert document["tensors"]["wte"]["shape"] == [8, 4]
    assert set(document["tensors"]["wte"]["slots"]["exp_avg"]) == {
        "dtype",
        "file",
        "offset",
        "nbytes",
        "crc32",
    }
    assert "world_size" not in document


def test_ties_roles_and_items_are_kept(store: MemoryStore) -> None:
    """Lost, an alias would load as a tensor of its own, and a frozen one would be trained."""
    manifest = replace(
        open_checkpoint(store, "universal").manifest,
        ties={"lm_head": "wte", "other": "wte"},
        roles={"norm": "frozen", "step": "buffer"},
        items={"rng": Item("reseed", "one stream a rank"), "args": Item("drop", "")},
    )

    read = from_bytes(to_bytes(manifest))

    assert (read.ties, read.roles, read.items) == (manifest.ties, manifest.roles, manifest.items)


def test_patterns_are_kept_slot_by_slot(store: MemoryStore) -> None:
    """Adafactor's slots are cut in ways of their own, and a step count was in no shard."""
    manifest = open_checkpoint(store, "universal").manifest
    keys = sorted(manifest.state_map.entries)
    choices = ["replicated", {"cut": 0}, None, {"cut": {"dim": 0, "parts": [4, 1, 1]}}]
    for shift in range(len(choices)):
        found = {key: choices[(i + shift) % len(choices)] for i, key in enumerate(keys)}
        patterns = {key: pattern for key, pattern in found.items() if pattern is not None}

        read = from_bytes(to_bytes(replace(manifest, patterns=patterns)))

        assert read.patterns == patterns


def test_one_pattern_is_written_once_a_tensor(store: MemoryStore) -> None:
    """Once for each slot would make every manifest of a converted checkpoint larger."""
    manifest = open_checkpoint(store, "universal").manifest
    entries = manifest.state_map.entries
    alike = [key for key in entries if entries[key].shape == entries[WTE].shape]
    patterns = {key: {"cut": 0} for key in alike if key.fqn == WTE.fqn}

    document = to_json(replace(manifest, patterns=patterns))

    assert len(patterns) > 1
    assert json.dumps(document).count('"pattern"') == 1
    assert document["tensors"]["wte"]["pattern"] == {"cut": 0}


def test_ties_of_all_ranks_are_merged(store: MemoryStore) -> None:
    """A pipeline stage knows only its own."""
    records = [
        from_bytes(store.read(f"{DIRECTORY}/a0001-r0000{rank}.json"), where="record")
        for rank in range(2)
    ]
    merged = merge(
        [
            replace(records[0], ties={"a": "wte"}),
            replace(records[1], roles={"norm": "buffer"}),
        ]
    )

    assert (merged.ties, merged.roles) == ({"a": "wte"}, {"norm": "buffer"})


def test_a_tie_to_nothing_is_not_written(store: MemoryStore) -> None:
    """It would be lost without a word."""
    manifest = replace(open_checkpoint(store, "universal").manifest, ties={"a": "absent"})

    with pytest.raises(UcpError, match="absent is tied"):
        to_bytes(manifest)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ties": ["norm"]}, "tensors.wte.ties[0]"),
        ({"ties": ["x", "x"]}, "tensors.wte.ties[1]"),
        ({"ties": "x"}, "tensors.wte.ties"),
        ({"ties": ["\ud800"]}, "tensors.wte.ties[0]"),
        ({"role": "spare"}, "tensors.wte.role"),
        ({"pattern": ["cut", 0]}, "tensors.wte.pattern"),
        ({"pattern": {"cut": 0, "grid": 1}}, "tensors.wte.pattern"),
    ],
)
def test_wrong_relations_are_problems(
    native: dict[str, Any], change: dict[str, Any], path: str
) -> None:
    """An alias has one owner and no data of its own."""
    native["tensors"]["wte"] |= change

    assert [problem.path for problem in validate(native)] == [path]


def test_an_item_without_a_policy_is_a_problem(native: dict[str, Any]) -> None:
    """Nothing passes unclassified."""
    native["items"] = {"rng": {"note": "?"}}

    assert [problem.path for problem in validate(native)] == ["items.rng.policy"]


def test_foreign_is_no_format_of_a_document(native: dict[str, Any]) -> None:
    """It exists in memory only; on a disk its content would be unverified."""
    native["format"] = "foreign"

    with pytest.raises(CheckpointCorruptError, match="format: must be one of"):
        parse(native)


@pytest.mark.parametrize("body", [b'{"step":1,"step":2', b'{"step":NaN', b'{"step":-Infinity'])
def test_json_that_readers_disagree_on_is_refused(body: bytes) -> None:
    """Some parsers take the first of two members of one name; NaN is no JSON at all."""
    with pytest.raises(CheckpointCorruptError, match=r"is not JSON: .*(twice|not a JSON number)"):
        from_bytes(_sealed(body))


def test_the_example_of_the_specification_is_a_manifest() -> None:
    """An author of a second reader begins with it: its checksums are those of the real bytes."""
    page = (ROOT_FOLDER / "ucp_core/SPEC.md").read_text(encoding="utf-8")
    text = page.partition("<!-- example -->\n```\n")[2].partition("```")[0]

    manifest = from_bytes(text.replace("\n", "").encode() + b"\n")

    assert to_bytes(manifest).decode() == text.replace("\n", "") + "\n"
    manifest.state_map.prove_coverage()
    norm, proj = struct.pack("<2f", 1, 1), struct.pack("<4f", *range(4))
    assert manifest.files["a0001-r00000.bin"].crc32 == crc32(
        struct.pack("<4f", *[0.5] * 4) + norm + proj
    )


def test_a_sealed_manifest_of_millions_of_entries_is_refused() -> None:
    """To parse one of 300 MB took a minute and 1.5 GB before anybody learned of it."""
    body = b'{"format":"everstep-universal","tensors":[' + b'"crc32",' * (1 << 20) + b'"crc32"]'

    with pytest.raises(
        CheckpointCorruptError, match=r"has 1048578 entries .* may have at most 1048576"
    ):
        from_bytes(_sealed(body))


def test_a_gigantic_manifest_is_not_read(tmp_path: Path) -> None:
    """A size in the directory costs nothing, reading it could take all memory."""
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(CheckpointCorruptError, match="a manifest has at most"):
        open_checkpoint(LocalStore(), str(tmp_path))
