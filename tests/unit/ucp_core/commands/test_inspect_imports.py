"""Imports of ``ucp inspect``, which take most of its time."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.commands import ucp
from tests.support.megatron_files import state, write_checkpoint
from tests.support.training_states import adam_state
from ucp_core.storage import LocalStore

#: Each takes 50 ms or more.
LARGE = {"torch", "ray", "rich", "fsspec", "yaml", "numpy", "pydantic"}

PROBE = """
import json, sys
from ucp_core.cli import main
sys.argv = ["ucp", "inspect", sys.argv[1]]
try:
    main()
except SystemExit:
    pass
print(json.dumps(list(sys.modules)))
"""


def _native(directory: Path) -> None:
    adam_state({"a.w": (4, 2), "b.w": (5,)}).save(LocalStore(), str(directory))


def _exported(*options: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        source = directory.with_name("source")
        _native(source)
        done = ucp("export", str(source), str(directory), "--format", *options)
        assert done.returncode == 0, done.stderr

    return make


def _megatron(directory: Path) -> None:
    """As Megatron-LM writes them: with the state of numpy's generator."""
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    tree = {
        "args": argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": {"decoder.final_layernorm.weight": torch.ones(4)},
        "rng_state": [{"np_rng_state": np.random.RandomState(1).get_state()}],
    }
    torch.save(tree, path)


def _megatron_core(directory: Path) -> None:
    """With flat buffers, in which parameters are found by their rounded masters."""
    write_checkpoint(LocalStore(), str(directory), state(), buffers=True)


@pytest.mark.parametrize(
    ("reader", "make"),
    [
        (None, _native),
        (None, _exported("universal")),
        ("deepspeed", _exported("deepspeed", "--stage", "1", "--dp", "2")),
        ("deepspeed", _exported("deepspeed-universal")),
        ("megatron", _megatron),
        ("megatron_core", _megatron_core),
        ("dcp", _exported("dcp")),
        ("huggingface", _exported("huggingface")),
    ],
    ids=[
        "native",
        "universal",
        "deepspeed",
        "deepspeed-universal",
        "megatron",
        "megatron-core",
        "dcp",
        "huggingface",
    ],
)
def test_inspect_imports_nothing_large_and_only_the_reader_of_the_format(
    reader: str | None, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """numpy takes 0.1 s, and the readers of all formats 0.05 s."""
    make(tmp_path / "checkpoint")

    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "checkpoint")],
        capture_output=True,
        check=True,
        text=True,
    )

    *shown, last = done.stdout.splitlines()
    loaded = set(json.loads(last))
    assert shown, done.stderr
    assert shown[0].split() == ["checkpoint", str(tmp_path / "checkpoint")]
    # A family of rules says how Megatron cuts its tensors: YAML, which pydantic reads. Masters in
    # Megatron-core's flat buffers are compared with the weights by numpy.
    needed = {"megatron": {"yaml", "pydantic"}, "megatron_core": {"numpy"}}
    assert loaded & LARGE == needed.get(reader or "", set())
    readers = {name for name in loaded if re.fullmatch(r"ucp_core\.formats\.\w+\.reader", name)}
    assert readers == ({f"ucp_core.formats.{reader}.reader"} if reader else set())
