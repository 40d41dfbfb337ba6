"""Checkpoints that released formats wrote, which must load for ever."""

from pathlib import Path

import pytest

from tests.support.checkpoints import assert_loaded, small_state, whole_need
from ucp_core.inspection import verify
from ucp_core.native import find_committed, load, open_checkpoint
from ucp_core.storage import LocalStore

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", ["v1"])
@pytest.mark.parametrize("kind", ["native/step-00000007", "universal"])
def test_a_checkpoint_of_a_released_format_loads(version: str, kind: str) -> None:
    """Written by that version, kept as bytes; values are those of ``small_state``.

    The native one: step 7, attempt 2, 3 ranks, cut as ``random_sharding`` cut seed 7.
    """
    opened = open_checkpoint(LocalStore(), str(HERE / version / kind))
    state = small_state()
    need = whole_need(state)

    load(opened, need)

    assert_loaded(state, need)
    assert (opened.step, opened.attempt) == (7, 2)
    assert opened.extra == {"cursor": {"step": 7}}
    assert opened.param_groups[0]["lr"] == 0.1
    assert verify(opened) == []


@pytest.mark.parametrize("version", ["v1"])
def test_a_run_of_a_released_format_resumes(version: str) -> None:
    """The commit rule is part of the format."""
    found = find_committed(
        LocalStore(), str(HERE / version / "native"), lineage=[(1, 0), (2, 3), (3, 7)]
    )

    assert found is not None
    assert (found.step, found.attempt, found.skipped) == (7, 2, ())
