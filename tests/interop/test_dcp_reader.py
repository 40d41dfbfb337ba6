"""What torch saved on several processes is read bit for bit, however it was sharded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.foreign_reading import unequal
from ucp_core.checkpoint import verify
from ucp_core.converters import open_source
from ucp_core.storage import LocalStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["fsdp2", "fsdp2_tp2", "hsdp", "sharded_tensors", "no_collectives"]
)
def test_sharded_states_are_read_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Two dims of chunks, strided shards, replicas, metadata of each rank: torch's own doing."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "tests.support.save_dcp", kind, str(tmp_path / "c")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint = open_source(LocalStore(), str(tmp_path / "c"))
    expected = load_file(tmp_path / "expected.safetensors")
    assert len(expected) == 25
    assert unequal(checkpoint, expected) == []
    assert len(checkpoint.state_map.entries) == len(expected)
    assert checkpoint.step == 3
    assert checkpoint.manifest.roles == {"seen": "buffer"}
    assert verify(checkpoint) == []
