"""A writer that is killed at any operation leaves the whole checkpoint, or what no reader takes."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.failing_store import How, MemoryWorld
from tests.support.training_states import adam_state
from ucp_core.errors import UcpError
from ucp_core.formats import export, open_source
from ucp_core.formats.dcp import writer as dcp_writer
from ucp_core.inspection import diff
from ucp_core.storage import MemoryStore

#: Formats, with options that make several files of a small state.
TARGETS: dict[str, dict[str, Any]] = {
    "huggingface": {"shard_bytes": 20},
    "dcp": {},
    "deepspeed": {"stage": 3, "dp": 2},
    "deepspeed-universal": {},
}
DOCUMENTS = {"config.json": {"model_type": "x"}, "generation_config.json": {}}


@pytest.mark.parametrize("how", [How.BEFORE, How.AFTER])
@pytest.mark.parametrize("target", TARGETS)
def test_a_killed_export_is_whole_or_refused(target: str, how: How, tmp_path: Path) -> None:
    """At every operation in turn; what is left must not look like a smaller checkpoint."""
    state = adam_state({"a": (3, 2), "b": (4,)}, num_groups=2)
    del state.slots["exp_avg_sq"]
    state.extra = {"huggingface": DOCUMENTS}
    source = state.save(MemoryStore(), "source")
    slots = ["weight"] if target == "huggingface" else None
    dead, operations = True, 0
    while dead:
        world = MemoryWorld(tmp_path)
        world.fate.die(operations, how)
        options = {"format": target, "memory_bytes": 32 << 20, **TARGETS[target]}
        with patch.object(dcp_writer, "FILE_BYTES", 2000):
            dead = not world.run(partial(export, source, world.store, "out", **options))
        world.fate.revive()
        operations += 1
        try:
            found = open_source(world.store, "out")
        except UcpError:
            assert dead
            continue
        report = diff(source, found, slots=slots)
        assert report.tensors == (), f"killed at operation {operations}"
        assert not [v for v in report.values if v.path.startswith("param_groups")]

    assert operations > 10, "the export was too small to be cut anywhere"
