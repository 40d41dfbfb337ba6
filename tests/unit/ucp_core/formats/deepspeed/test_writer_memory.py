"""Writing for DeepSpeed takes the memory that it was given, whatever the state is."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_states import adam_state
from ucp_core.formats.deepspeed import universal_writer as deepspeed_universal_writer
from ucp_core.formats.deepspeed import writer as deepspeed_writer
from ucp_core.language import Cut, Rules
from ucp_core.language.rules import Rule
from ucp_core.storage import LocalStore

MEMORY_BYTES = 16 << 20


@pytest.mark.parametrize(
    "target",
    [
        {"stage": 1, "dp": 2, "dtype": "bf16"},
        {"stage": 3, "dp": 3, "dtype": "fp16"},
        {"stage": 1, "dp": 1, "tp": 2, "rules": Rules((Rule(".*", Cut(1)),))},
        None,
    ],
    ids=["zero1-bf16", "zero3-fp16", "zero1-tp2", "universal"],
)
def test_memory_stays_under_the_bound(target: dict[str, Any] | None, tmp_path: Path) -> None:
    """Casts and gathered shards take memory beside the slab that is read."""
    state = adam_state({"wte": (5000, 512), "head": (2100, 512), "b": (512, 2)})
    source = state.save(LocalStore(), str(tmp_path / "source"))
    assert source.state_map.num_bytes > 2.5 * MEMORY_BYTES
    out = str(tmp_path / "out")

    tracemalloc.start()
    try:
        if target is None:
            deepspeed_universal_writer.write(
                source, LocalStore(), out, memory_bytes=MEMORY_BYTES, fsync=False
            )
        else:
            deepspeed_writer.write(
                source, LocalStore(), out, memory_bytes=MEMORY_BYTES, fsync=False, **target
            )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < MEMORY_BYTES
