"""Small values of pickles as JSON: bounded, whatever a pickle shares with itself."""

import pytest

from ucp_core.errors import MemoryBudgetError
from ucp_core.formats.shared import json_value
from ucp_core.storage import MemoryStore
from ucp_core.torch_files import TensorRef, reading_within


def test_a_tensor_that_repeats_is_not_read_for_ever() -> None:
    """Each mention of it would be read and encoded again."""
    store = MemoryStore()
    store.write_atomic("d/f", bytes(60_000), fsync=False)
    ref = TensorRef("U8", (60_000,), (1,), "f", 0, None)

    with reading_within(64 << 20), pytest.raises(MemoryBudgetError, match="d/f: mine"):
        json_value([ref] * 2000, store, "d", "f: mine")
