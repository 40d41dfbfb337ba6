"""Reads the answers of metadata services. Pure; times are seconds since the epoch.

An answer that makes no sense raises any ``Exception``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from workers.protocol import Notice

#: Google takes a machine so long after it says so, "up to 30 s".
PREEMPTED_S = 30.0
#: Before maintenance a machine without GPUs has one minute, one with GPUs an hour.
_MAINTAINED_S, _MAINTAINED_GPUS_S = 60.0, 3600.0
#: With what is done to the machine: all of them stop what runs there, if only for a while.
_AZURE_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"})


def aws(action: str | None, rebalance: str | None) -> Notice | None:
    """Return what EC2 says of a spot instance.

    Args:
        action: The answer of ``spot/instance-action``; None if there is none.
        rebalance: Likewise of ``events/recommendations/rebalance``: the instance is likelier than
            others to be taken, at an unknown time.
    """
    if action is not None:
        said = _mapping(action)
        what = f"aws: spot instance, {said.get('action')}"
        return Notice(what=what, deadline_s=_time(str(said["time"])))
    if rebalance is not None:
        noticed = _mapping(rebalance).get("noticeTime")
        return Notice(what=f"aws: rebalance recommendation of {noticed}", deadline_s=math.inf)
    return None


def gcp(preempted: str, maintenance: str, *, has_gpus: bool) -> tuple[str, float] | None:
    """Return what Compute Engine says, and how long before the machine stops it begins to say so.

    Args:
        preempted: The answer of ``instance/preempted``.
        maintenance: Likewise of ``instance/maintenance-event``. A machine that is migrated runs on.
        has_gpus: Whether the machine has GPUs.
    """
    if preempted.strip() == "TRUE":
        return "gcp: preempted", PREEMPTED_S
    if preempted.strip() != "FALSE":
        raise ValueError(f"instance/preempted is {preempted[:40]!r}")
    if maintenance.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
        left_s = _MAINTAINED_GPUS_S if has_gpus else _MAINTAINED_S
        return "gcp: stopped for maintenance of its host", left_s
    return None


def azure(events: str, *, machine: str) -> Notice | None:
    """Return what Scheduled Events say of one machine.

    Args:
        events: The answer; it names the events of all machines of a group.
        machine: The name of this one.

    An event that has begun names no time. Its end is 0.0, which has come and is the same each time.
    """
    found = []
    for event in _mapping(events)["Events"]:
        if machine in event["Resources"] and event["EventType"] in _AZURE_EVENTS:
            begins = event.get("NotBefore") or ""
            what = f"azure: {event['EventType']}, event {event['EventId']}"
            found.append(Notice(what=what, deadline_s=_time(begins) if begins else 0.0))
    return nearest(found)


def own(text: str, *, told_s: float) -> Notice | None:
    """Return what a file or a command of the user's own says.

    Args:
        text: A time in ISO 8601 or as ``date`` prints it, or the seconds left, then anything for
            people. Nothing is no notice: a file is empty for a moment while it is written.
        told_s: From when on seconds count.
    """
    words = text.split()
    if not words:
        return None
    for num_words in (6, 2, 1):  # "Thu Nov 26 08:00:00 UTC 2026", "2026-11-26 08:00:00", "90"
        try:
            deadline_s = _moment(" ".join(words[:num_words]), told_s)
        except (ValueError, OverflowError):
            continue
        why = " ".join(words[num_words:])
        return Notice(what=why or "the machine's own notice", deadline_s=deadline_s)
    raise ValueError(f"{text[:40]!r} begins neither with seconds nor like 2026-11-26T08:00:00Z")


def nearest(notices: Sequence[Notice]) -> Notice | None:
    """Return the notice that ends first."""
    return min(notices, key=lambda notice: notice.deadline_s, default=None)


def _moment(text: str, told_s: float) -> float:
    try:
        left_s = float(text)
    except ValueError:
        if len(text) <= len("2026-11-26"):  # It is ambiguous whether a day begins or ends it.
            raise
        return _time(text)
    if not math.isfinite(left_s):
        raise ValueError(text)
    return told_s + left_s


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{text[:40]!r} is no JSON object")
    return found


def _time(text: str) -> float:
    """Return a time as AWS writes it, in ISO 8601, or as Azure does, as in mail."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = parsedate_to_datetime(text)
        if found.tzinfo is None:  # It has a name that only some know, such as CET.
            raise
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
