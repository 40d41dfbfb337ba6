"""A repeated failure is reported once, and counted."""

import logging

import pytest

from workers.repeated import Repeated


def test_what_fails_often_is_said_at_its_first_failure_and_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk wrote ``not_stored`` twenty-seven times, without what and why."""
    failures = Repeated(logging.getLogger("test"))

    failures.passed()
    for _ in range(27):
        failures.failed("step 4 is not stored", "the disk is full")
    failures.passed()
    failures.failed("step 5 is not stored", "a timeout")
    failures.passed()

    assert caplog.messages == [
        "step 4 is not stored: the disk is full; it is tried again",
        "step 4 is not stored, 27 times; it is done now",
        "step 5 is not stored: a timeout; it is tried again",
    ]
