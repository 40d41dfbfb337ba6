"""Interpret the answers of metadata services. Pure; times are seconds since the epoch.

An answer that makes no sense may raise any ``Exception``.
"""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from workers.protocol import Notice

#: Google takes a machine this long after its notice: "up to 30 s".
PREEMPTED_S = 30.0
#: Seconds before maintenance: a machine without GPUs has one minute, one with GPUs an hour.
_MAINTAINED_S, _MAINTAINED_GPUS_S = 60.0, 3600.0
#: Kinds of events. All of them stop the machine's programs, if only for a while.
_AZURE_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"})


def aws(action: str | None, rebalance: str | None) -> Notice | None:
    """Return EC2's notice about a spot instance.

    ``action`` is the answer of ``spot/instance-action``, None if there is none. ``rebalance`` is
    that of ``events/recommendations/rebalance``: the instance is more likely than others to be
    taken, at an unknown time.
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
    """Return Compute Engine's notice, with the time between its appearance and the stop.

    ``preempted`` and ``maintenance`` are the answers of ``instance/preempted`` and of
    ``instance/maintenance-event``. A machine that is migrated continues to run.
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
    """Return the notice of Scheduled Events about one machine.

    ``events`` is the answer, which names the events of all machines of a group. An event that has
    begun names no time. Its deadline is 0.0, which has passed and is always equal.
    """
    found = []
    for event in _mapping(events)["Events"]:
        if machine in event["Resources"] and event["EventType"] in _AZURE_EVENTS:
            begins = event.get("NotBefore") or ""
            what = f"azure: {event['EventType']}, event {event['EventId']}"
            found.append(Notice(what=what, deadline_s=_time(begins) if begins else 0.0))
    return nearest(found)


def own(text: str, *, told_s: float) -> Notice | None:
    """Return the notice in the user's file, or in the output of the user's command.

    The text is a time in ISO 8601 or as ``date`` prints it, or the seconds left from ``told_s``,
    then optional text for people. An empty text is not a notice, because a file is empty for a
    moment while it is written.
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
    raise ValueError(
        f"{text[:40]!r} must begin with seconds or with a time like 2026-11-26T08:00:00Z"
    )


def nearest(notices: Sequence[Notice]) -> Notice | None:
    """Return the notice that ends first."""
    return min(notices, key=lambda notice: notice.deadline_s, default=None)


def _moment(text: str, told_s: float) -> float:
    try:
        left_s = float(text)
    except ValueError:
        if len(text) <= len("2026-11-26"):  # A day could mean its beginning or its end.
            raise
        return _time(text)
    if not math.isfinite(left_s):
        raise ValueError(text)
    return told_s + left_s


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{text[:40]!r} is not a JSON object")
    return found


def _time(text: str) -> float:
    """Return the time in a text: AWS writes ISO 8601, Azure the form of mail headers."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = parsedate_to_datetime(text)
        if found.tzinfo is None:  # The time zone has a name such as CET, which is not portable.
            raise
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
