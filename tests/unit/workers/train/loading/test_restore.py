import pytest

from tests.support.made import assignment_of
from ucp_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ChecksumMismatchError,
    StorageError,
    UcpError,
    UncoveredRegionError,
)
from ucp_core.geometry import TensorKey
from workers.protocol import stored_source
from workers.train.loading.restore import _found, without_optimizer_state

RESUMED = stored_source(7, 2)
ASSIGNMENT = assignment_of(attempt=3, resume=(7, 2), lineage=((1, 0), (2, 3), (3, 7)))


@pytest.mark.parametrize(
    ("error", "damaged", "unread"),
    [
        (ChecksumMismatchError("bytes"), (RESUMED,), ()),
        (UncoveredRegionError("box"), (RESUMED,), ()),
        (StorageError("no such file", missing=True), (RESUMED,), ()),
        # The next attempt may find it, or reach it.
        (CheckpointNotFoundError("no manifest"), (), (RESUMED,)),
        (StorageError("the password has expired"), (), (RESUMED,)),
        # The share's owner says what it is.
        (CheckpointCorruptError("rank 1 could not read its share", peer=1), (), ()),
    ],
    ids=lambda value: str(value) if isinstance(value, UcpError) else "",
)
def test_a_version_in_storage_is_only_bad_if_that_is_proven(
    error: UcpError, damaged: object, unread: object
) -> None:
    """A store that is away for a minute must not cost the newest version."""
    found = _found(ASSIGNMENT, error)

    assert (found.damaged, found.unread) == (damaged, unread)
    assert found.reasons == (f"step-00000007: {type(error).__name__}: {error}",)


def test_a_parameter_that_the_optimizer_kept_nothing_of_is_loaded_without() -> None:
    """It was frozen; asked for its moments, every version would count as damaged."""
    moments = [TensorKey("used", "exp_avg"), TensorKey("used", "exp_avg_sq")]
    weights = [TensorKey("frozen", "weight"), TensorKey("used", "weight")]

    assert without_optimizer_state([*moments, *weights]) == {"frozen"}


def test_a_version_of_an_optimizer_that_kept_nothing_at_all_is_no_frozen_model() -> None:
    """Plain SGD made it: another optimizer that goes on from it has to hear what is missing."""
    assert without_optimizer_state(TensorKey(name, "weight") for name in "ab") == frozenset()
