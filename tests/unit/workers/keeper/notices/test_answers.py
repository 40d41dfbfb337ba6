"""Answers of providers, as their documents show them."""

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from workers.keeper.notices import answers
from workers.protocol import Notice

AT_S = datetime(2026, 11, 25, 8, 22, tzinfo=UTC).timestamp()
AZURE = {
    "EventId": "C7061BAC",
    "EventStatus": "Scheduled",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["spot_0", "spot_1"],
    "NotBefore": "Wed, 25 Nov 2026 08:22:00 GMT",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}


def _azure(*events: dict[str, object], machine: str = "spot_1") -> Notice | None:
    document = json.dumps({"DocumentIncarnation": 1, "Events": list(events)})
    return answers.azure(document, machine=machine)


def test_a_spot_instance_is_taken_at_the_time_that_is_named() -> None:
    """It comes beside a recommendation, which names no time: the nearer end counts."""
    action = '{"action": "terminate", "time": "2026-11-25T08:22:00Z"}'
    rebalance = '{"noticeTime": "2026-11-25T08:16:02Z"}'
    found = answers.aws(action, rebalance)
    assert found == Notice(what="aws: spot instance, terminate", deadline_s=AT_S)
    likely = answers.aws(None, rebalance)
    assert likely is not None
    assert likely.deadline_s == math.inf
    assert answers.aws(None, None) is None


def test_a_preempted_machine_has_half_a_minute() -> None:
    """Google names no time; before maintenance a machine with GPUs has an hour."""
    stop = "TERMINATE_ON_HOST_MAINTENANCE"
    assert answers.gcp("TRUE", "", has_gpus=True) == ("gcp: preempted", 30.0)
    for has_gpus, left_s in ((True, 3600.0), (False, 60.0)):
        found = answers.gcp("FALSE\n", stop, has_gpus=has_gpus)
        assert found == ("gcp: stopped for maintenance of its host", left_s)


@pytest.mark.parametrize("maintenance", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"])
def test_a_machine_that_is_migrated_stays(maintenance: str) -> None:
    """It runs on elsewhere; to leave it would cost a pause for nothing."""
    assert answers.gcp("FALSE", maintenance, has_gpus=False) is None


def test_an_event_of_another_machine_of_the_group_is_none() -> None:
    """Azure tells every machine of a scale set the events of all."""
    assert _azure(AZURE) == Notice(what="azure: Preempt, event C7061BAC", deadline_s=AT_S)
    assert _azure(AZURE, machine="spot_7") is None
    assert _azure() is None


def test_the_first_of_several_events_counts_and_one_that_has_begun_is_over() -> None:
    """It no longer names a time; a time from each look would be news at each look."""
    begun = {**AZURE, "EventId": "F1", "EventType": "Reboot", "NotBefore": ""}
    assert _azure(AZURE, begun) == Notice(what="azure: Reboot, event F1", deadline_s=0.0)


@pytest.mark.parametrize(
    ("text", "deadline_s", "what"),
    [
        ("2026-11-25T08:22:00Z rack 7 goes", AT_S, "rack 7 goes"),
        ("2026-11-25T08:22:00", AT_S, "the machine's own notice"),
        ("2026-11-25 08:22:00", AT_S, "the machine's own notice"),
        ("2026-11-25 09:22:00+01:00\track 7\ngoes", AT_S, "rack 7 goes"),
        ("2026-11-25 08:22 rack 7 goes", AT_S, "rack 7 goes"),
        ("Wed Nov 25 08:22:00 UTC 2026\n", AT_S, "the machine's own notice"),
        ("Wed, 25 Nov 2026 09:22:00 +0100 rack 7 goes", AT_S, "rack 7 goes"),
        ("30\n", 130.0, "the machine's own notice"),
        ("30\nwhy", 130.0, "why"),
        ("30\tpower goes", 130.0, "power goes"),
        ("0", 100.0, "the machine's own notice"),
    ],
)
def test_a_text_of_ones_own_is_a_time_or_seconds(text: str, deadline_s: float, what: str) -> None:
    """An administrator's script knows one or the other."""
    assert answers.own(text, told_s=100.0) == Notice(what=what, deadline_s=deadline_s)


def test_an_empty_file_is_no_notice_yet() -> None:
    """It is empty for a moment while it is written; the node would be left at once."""
    assert answers.own(" \n", told_s=100.0) is None


@pytest.mark.parametrize(
    "text",
    ["tomorrow", "nan", "inf", "1e400 why", "90s", "2026-11-25", "2026-11-25 8:22",
     "Wed Nov 25 09:22:00 CET 2026", "Wed, 25 Nov 99999999999 08:22:00 GMT"],
)  # fmt: skip
def test_a_text_of_ones_own_that_names_no_moment_is_refused_by_name(text: str) -> None:
    """A day alone was read as its midnight, and the node was left at once."""
    with pytest.raises(ValueError, match="seconds or with a time like 2026-") as refused:
        answers.own(text, told_s=0.0)
    assert repr(text[:40]) in str(refused.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: answers.aws("<html>busy</html>", None),
        lambda: answers.aws("[]", None),
        lambda: answers.aws('{"action": "stop"}', None),
        lambda: answers.gcp("", "", has_gpus=False),
        lambda: answers.azure("{}", machine="m"),
    ],
    ids=["aws-html", "aws-list", "aws-timeless", "gcp-empty", "azure-empty"],
)
def test_an_answer_that_makes_no_sense_is_no_answer(ask: Callable[[], object]) -> None:
    """A proxy's page must not be taken for a notice, nor for a notice that is withdrawn."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        ask()
