"""Checkpoints that torch saved on several processes are read bit for bit, with any sharding."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.foreign_reading import unequal
from tests.support.forked_commands import ForkedCommands
from ucp_core.errors import UnsupportedVersionError
from ucp_core.formats import open_source
from ucp_core.inspection import verify
from ucp_core.storage import LocalStore

SCRIPT = "tests.support.save_dcp"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with ForkedCommands([SCRIPT], tmp_path_factory.mktemp("commands") / "log") as commands:
        yield commands


@pytest.mark.parametrize(
    "kind",
    ["fsdp1_sharded", "fsdp2", "fsdp2_tp2", "hsdp", "sharded_tensors", "no_collectives"],
)
def test_sharded_states_are_read_bit_for_bit(
    commands: ForkedCommands, tmp_path: Path, kind: str
) -> None:
    """Two dims of chunks, strided shards, replicas, metadata of each rank: torch's own doing."""
    commands.run(SCRIPT, [kind, str(tmp_path / "c")], num_ranks=4)
    checkpoint = open_source(LocalStore(), str(tmp_path / "c"))
    expected = load_file(tmp_path / "expected.safetensors")
    assert len(expected) == 25
    assert unequal(checkpoint, expected) == []
    assert len(checkpoint.state_map.entries) == len(expected)
    assert checkpoint.step == 3
    assert checkpoint.manifest.roles == {"seen": "buffer"}
    assert verify(checkpoint) == []


@pytest.mark.parametrize("kind", ["fsdp1_local", "fsdp1_local_original"])
def test_flat_parameters_of_the_first_fsdp_are_refused(
    commands: ForkedCommands, tmp_path: Path, kind: str
) -> None:
    """Under a parameter's own name torch keeps only one rank's part."""
    commands.run(SCRIPT, [kind, str(tmp_path / "c")], num_ranks=4)

    with pytest.raises(UnsupportedVersionError, match=r"_flat_param.*SHARDED_STATE_DICT") as raised:
        open_source(LocalStore(), str(tmp_path / "c"))

    assert raised.value.facts["key"] == "model._flat_param"
