"""A writer that is killed at any operation leaves the whole checkpoint, or what no reader takes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.failing_store import How, MemoryWorld
from tests.support.training_states import adam_state
from ucp_core.errors import UcpError
from ucp_core.formats import open_source
from ucp_core.formats.dcp import writer as dcp
from ucp_core.formats.deepspeed import universal_writer as deepspeed_universal
from ucp_core.formats.deepspeed import writer as deepspeed
from ucp_core.formats.huggingface import writer as huggingface
from ucp_core.inspection import diff
from ucp_core.storage import MemoryStore

#: Writers, with options that make several files of a small state.
WRITERS: dict[str, Callable[..., object]] = {
    "huggingface": partial(huggingface.write, shard_bytes=20),
    "dcp": dcp.write,
    "deepspeed": partial(deepspeed.write, stage=3, dp=2),
    "deepspeed-universal": deepspeed_universal.write,
}
DOCUMENTS = {"config.json": {"model_type": "x"}, "generation_config.json": {}}


@pytest.mark.parametrize("how", [How.BEFORE, How.AFTER])
@pytest.mark.parametrize("target", WRITERS)
def test_a_killed_export_is_whole_or_refused(target: str, how: How, tmp_path: Path) -> None:
    """At every operation in turn; what is left must not look like a smaller checkpoint.

    Without the claim that ``export`` lays beside it: other tools do not know what it means.
    """
    state = adam_state({"a": (3, 2), "b": (4,)}, num_groups=2)
    del state.slots["exp_avg_sq"]
    state.extra = {"huggingface": DOCUMENTS}
    source = state.save(MemoryStore(), "source")
    slots = ["weight"] if target == "huggingface" else None
    dead, operations = True, 0
    while dead:
        world = MemoryWorld(tmp_path)
        world.fate.die(operations, how)
        write = partial(WRITERS[target], source, world.store, "out", memory_bytes=32 << 20)
        with patch.object(dcp, "FILE_BYTES", 40):
            dead = not world.run(write)
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

    assert operations > 9, "the export was too small to be cut anywhere"
