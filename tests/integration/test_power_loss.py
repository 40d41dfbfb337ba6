"""With ``fsync``, a manifest that survives a loss of power promises nothing that does not."""

import random
from pathlib import Path

import pytest

from tests.support.checkpoints import local_tensors, random_sharding, save, small_state
from tests.support.made import save_part
from tests.support.power import PowerLog
from ucp_core.conversion import convert
from ucp_core.native import open_checkpoint
from ucp_core.storage import LocalStore, join

STATE = small_state()


def save_durably(root: Path, *, fsync: bool) -> None:
    sharding = random_sharding(random.Random(7), STATE, 2)
    for rank in (0, 1):
        save_part(
            LocalStore(),
            str(root / "run/checkpoints/step-00000007"),
            local_tensors(STATE, sharding[rank]),
            step=7,
            rank=rank,
            world_size=2,
            fsync=fsync,
        )


@pytest.mark.parametrize("fsync", [True, False])
def test_a_saved_checkpoint_is_durable_before_its_manifest(fsync: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Bytes and names, up to the directory of the run; without fsync the log must see the gap."""
    log = PowerLog(tmp_path)

    with log.watching():
        save_durably(tmp_path, fsync=fsync)

    assert log.num_commits == 1
    assert (log.lost == []) is fsync


@pytest.mark.parametrize("fsync", [True, False])
def test_a_converted_checkpoint_is_durable_before_its_manifest(fsync: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Its files are renamed at the end, all together."""
    save(LocalStore(), STATE, step=7, root=str(tmp_path))
    source = open_checkpoint(LocalStore(), join(str(tmp_path), "step-00000007"))
    log = PowerLog(tmp_path)

    with log.watching():
        convert(
            source,
            LocalStore(),
            str(tmp_path / "a/made"),
            memory_bytes=32 << 20,
            processes=1,
            fsync=fsync,
        )

    assert log.num_commits == 1
    assert (log.lost == []) is fsync
