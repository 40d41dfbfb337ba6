"""Conversion over the nodes of a cluster: the same bytes, also when a node dies meanwhile."""

import json
import random
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import State, Whole, save
from ucp_core.conversion import convert
from ucp_core.errors import ChecksumMismatchError
from ucp_core.geometry import TensorKey
from ucp_core.inspection import verify
from ucp_core.native import checkpoint_name, open_checkpoint
from ucp_core.storage import LocalStore

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

EVERSTEP = (sys.executable, "-c", "from orchestrator.cli.main import main; main()")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of 96 MiB, of which a batch is a small part."""
    root = tmp_path_factory.mktemp("source")
    rng = random.Random(1)
    state: State = {}
    for index in range(12):
        shape = (1024 + index, 2048)
        data = rng.randbytes(4 * prod(shape))
        state[TensorKey(f"layers.{index}.w", "weight")] = Whole(dtype="F32", shape=shape, data=data)
    save(LocalStore(), state, step=7, world_size=3, root=str(root))
    return root / checkpoint_name(7)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def _expected(source: Path, out: Path) -> dict[str, bytes]:
    opened = open_checkpoint(LocalStore(), str(source))
    convert(opened, LocalStore(), str(out), memory_bytes=64 << 20, processes=1)
    return _files(out)


def test_the_command_makes_what_one_machine_makes(nodes: Any, source: Path, tmp_path: Path) -> None:
    """Spread over two nodes, committed by one process."""
    command = [*EVERSTEP, "convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--address", nodes.address, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["read_bytes"] == found["bytes"]
    assert _files(tmp_path / "out") == _expected(source, tmp_path / "one")


def test_a_node_that_dies_meanwhile_costs_only_its_batches(
    nodes: Any, source: Path, tmp_path: Path
) -> None:
    """Its tasks are done again elsewhere; what they had written is written over."""
    from orchestrator.driver.convert import convert_on_cluster

    killed: list[str] = []

    def kill(done: int, total: int) -> None:
        if not killed and done < total:
            killed.append(nodes.nodes()[0])
            nodes.kill_node(killed[0])

    opened = open_checkpoint(LocalStore(), str(source))
    result = convert_on_cluster(opened, str(tmp_path / "out"), memory_bytes=64 << 20, progress=kill)

    assert killed
    assert verify(result.checkpoint) == []
    assert _files(tmp_path / "out") == _expected(source, tmp_path / "one")


@pytest.mark.usefixtures("nodes")
def test_damage_found_by_a_task_is_the_error_of_the_whole(source: Path, tmp_path: Path) -> None:
    """Not a Ray error with a traceback of another machine; and nothing is committed."""
    from orchestrator.driver.convert import convert_on_cluster

    opened = open_checkpoint(LocalStore(), str(source))
    path = source / "a0001-r00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(ChecksumMismatchError, match=r"a0001-r00001\.bin is damaged"):
            convert_on_cluster(opened, str(tmp_path / "out"), memory_bytes=64 << 20)
    finally:
        path.write_bytes(data)
    assert not (tmp_path / "out").exists()
