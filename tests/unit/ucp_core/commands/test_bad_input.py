"""A bad source gives one error that names it, and nothing is written.

One row for each kind of bad input; what else can be wrong with each format is tested beside its
reader.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.checkpoints import save, small_state
from tests.support.commands import ucp
from tests.support.deepspeed_folders import Folder, Param, native, optim_name
from tests.support.hostile_pickles import Payload, dumps, torch_zip
from ucp_core.numerics import crc32
from ucp_core.storage import LocalStore

MODEL = [Param("up.weight", (7, 6)), Param("up.bias", (7,))]
SHARDED = [Param("up.weight", (8, 6), 0), Param("norm.weight", (6,))]
MODEL_FILE = "mp_rank_00_model_states.pt"
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


class Bad(NamedTuple):
    """A bad source."""

    make: Callable[[Path], list[str]]  #: Writes it into a folder; returns options of the command.
    named: tuple[str, ...]  #: The text that the error must contain.


def _deepspeed(spoil: Callable[[Folder], None], params: list[Param], **layout: Any) -> Any:
    def make(path: Path) -> list[str]:
        folder = native(params, **layout)
        spoil(folder)
        folder.write(path)
        return []

    return make


def _lacking(folder: Folder) -> None:
    del folder.trees[optim_name(1, 0)]


def _of_another_step(folder: Folder) -> None:
    folder.trees[optim_name(1, 0)] = native(MODEL, dp=2, step=6).trees[optim_name(1, 0)]


def _of_wrong_degree(folder: Folder) -> None:
    for name, tree in folder.trees.items():
        if name.endswith("model_states.pt"):
            tree["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 4}


def _cut_short(path: Path) -> list[str]:
    native(MODEL, dp=2).write(path)
    file = path / optim_name(1, 0)
    file.write_bytes(file.read_bytes()[:-100])
    return []


def _foreign_class(path: Path) -> list[str]:
    native(MODEL, dp=2).write(path)
    call = Payload(os.mkdir, str(path.parent / "executed"))
    (path / MODEL_FILE).write_bytes(torch_zip(dumps({"module": call})))
    return []


def _unknown_pattern(path: Path) -> list[str]:
    native(SHARDED, tp=2, dp=1).write(path)
    rules = path.parent / "model.yaml"
    rules.write_text("rules:\n- match: up[.]weight\n  pattern: sharded\n")
    return ["--rules", str(rules)]


def _unknown_cut(path: Path) -> list[str]:
    native(SHARDED, tp=2, dp=1).write(path)
    return []


def _leading_out(path: Path) -> list[str]:
    save(LocalStore(), small_state(), step=7, root=str(path.parent / "run"))
    (path.parent / "run" / "step-00000007").rename(path)
    document = json.loads((path / "manifest.json").read_bytes())
    name = next(iter(document["files"]))
    text = json.dumps(document).replace(name, f"../{name}")
    (path / "manifest.json").write_bytes(_sealed(json.loads(text)))
    return []


def _sealed(document: Any) -> bytes:
    """Return a document as it is in a file: its checksum is right."""
    del document["crc32"]
    body = json.dumps(document).encode()[:-1]
    return body + b',"crc32":"%08x"}\n' % crc32(body)


def _safetensors(header: bytes, length: int | None = None) -> Callable[[Path], list[str]]:
    def make(path: Path) -> list[str]:
        path.mkdir()
        size = struct.pack("<Q", len(header) if length is None else length)
        (path / "model.safetensors").write_bytes(size + header + bytes(8))
        return []

    return make


BAD = {
    "missing rank file": Bad(_deepspeed(_lacking, MODEL, dp=2), (optim_name(1, 0),)),
    "missing rank file of stage 3": Bad(
        _deepspeed(_lacking, MODEL, dp=2, stage=3), (optim_name(1, 0),)
    ),
    "truncated file": Bad(_cut_short, (optim_name(1, 0),)),
    "mixed steps": Bad(
        _deepspeed(_of_another_step, MODEL, dp=2), (optim_name(1, 0), "another step")
    ),
    "wrong tp count": Bad(_deepspeed(_of_wrong_degree, SHARDED, tp=2, dp=1), ("mp_rank_",)),
    "unknown cut": Bad(_unknown_cut, ("up.weight", "--rules")),
    "foreign class": Bad(_foreign_class, (MODEL_FILE, "mkdir")),
    "unknown pattern": Bad(_unknown_pattern, ("model.yaml:3:", "sharded")),
    "path traversal": Bad(_leading_out, ("manifest.json", "../")),
    "gigantic header": Bad(_safetensors(b"{}", 2**62), ("model.safetensors",)),
    "NaN shape": Bad(
        _safetensors(json.dumps({"x": TENSOR | {"shape": [float("nan")]}}).encode()),
        ("model.safetensors", "'x'"),
    ),
    "duplicate name": Bad(
        _safetensors(b'{"x": %b, "x": %b}' % ((json.dumps(TENSOR).encode(),) * 2)),
        ("model.safetensors", "'x'"),
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_error_that_names_it_and_writes_nothing(tmp_path: Path, kind: str) -> None:
    """A person has to find the file; a program must not find half a checkpoint."""
    bad = BAD[kind]
    source, out = tmp_path / "source", tmp_path / "out"
    options = bad.make(source)

    done = ucp("export", str(source), str(out), "--format", "universal", *options)

    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in bad.named), done.stderr
    assert not out.exists()
    assert not (tmp_path / "executed").exists()
