"""Small values of pickles as JSON: bounded, whatever a pickle shares with itself."""

import pytest

from ucp_core.errors import MemoryBudgetError
from ucp_core.formats.shared import json_value
from ucp_core.storage import MemoryStore
from ucp_core.torch_files import TensorRef, reading_within


def test_shared_lists_do_not_expand_for_ever() -> None:
    """Thirty lists of ten mentions each are a client state of a kilobyte, and 10^30 values."""
    value: list[object] = [0]
    for _ in range(30):
        value = [value] * 10

    with reading_within(64 << 20), pytest.raises(MemoryBudgetError, match="d/f: mine"):
        json_value({"mine": value}, MemoryStore(), "d", "f: mine")


def test_a_tensor_that_repeats_is_not_read_for_ever() -> None:
    """Each mention of it would be read and encoded again."""
    store = MemoryStore()
    store.write_atomic("d/f", bytes(60_000), fsync=False)
    ref = TensorRef("U8", (60_000,), (1,), "f", 0, None)

    with reading_within(64 << 20), pytest.raises(MemoryBudgetError, match="d/f: mine"):
        json_value([ref] * 2000, store, "d", "f: mine")


def test_a_long_text_that_repeats_is_not_kept_for_ever() -> None:
    """A pickle mentions it by a number of its memo."""
    with reading_within(64 << 20), pytest.raises(MemoryBudgetError, match="d/f: mine"):
        json_value(["x" * (1 << 20)] * 2000, MemoryStore(), "d", "f: mine")
