"""Decide which claim on a run's directory is valid.

The start or resumption of a run claims the directory with a record, ``claims/000002.json``. Records
are numbered from 1. A record is created once and never replaced: where the storage creates
exclusively (S3, GCS, Azure, file systems), one of two claims with the same number fails. A claim is
valid until the next number has a record. An older claimant that still trains on an unreachable
cluster thus learns from storage itself that it must commit and delete nothing more.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from ucp_core.errors import StorageError, SupersededError
from ucp_core.storage.base import join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucp_core.storage.base import Store

CLAIMS = "claims"
#: Before writes that do no harm if they come late (lines of metrics and journal, which name their
#: attempt), a check no older than this is enough.
RECENT_S = 5.0


def next_claim(store: Store, directory: str) -> int:
    """Return the number of the next claim on ``directory``."""
    return max(_numbers(store, directory), default=0) + 1


def claims(store: Store, directory: str) -> dict[int, dict[str, Any]]:
    """Return the records of all claims on ``directory``, by number; see ``claim``."""
    return {number: _read(store, directory, number) for number in _numbers(store, directory)}


def _numbers(store: Store, directory: str) -> list[int]:
    names = (name.removesuffix(".json") for name in store.list(join(directory, CLAIMS)))
    return sorted(int(name) for name in names if name.isdecimal())


def claim(
    store: Store, directory: str, number: int, record: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Claim ``directory``; safe to repeat.

    Args:
        number: The result of ``next_claim``.
        record: JSON values; "token" is unique to the claim; "host" and "since" tell people where
            and when it was made.

    Returns:
        The record of this claim, as first written.

    Raises:
        SupersededError: Another claim came first, or there is a later one.
    """
    owner = Owner(store, directory, number)
    data = json.dumps(dict(record)).encode()
    if not store.write_atomic(_path(directory, number), data, fsync=True, exclusive=True):
        found = _read(store, directory, number)
        if found.get("token") != record["token"]:
            raise owner.superseded(number, found)
        record = found
    owner.require()
    return record


class Owner:
    """The directory of a run as one claimant sees it. Thread-safe.

    Args:
        number: Number of the claim; 0 for a directory that is not shared, where nothing is checked.
    """

    def __init__(self, store: Store, directory: str, number: int) -> None:
        self._store = store
        self._directory = directory
        self._looked_s = float("-inf")
        self._next: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self.claim = number

    def require(self, *, within_s: float = 0.0) -> None:
        """Check that this claim is still valid, by one read of a file that does not exist.

        Args:
            within_s: A check within the last ``within_s`` seconds is enough.

        Raises:
            SupersededError: A later claim is valid.
            StorageError: The storage refused to answer.
        """
        with self._lock:
            looking_s = time.monotonic()
            if self._next is None and self.claim and looking_s - self._looked_s >= within_s:
                self._next = self._look()
                self._looked_s = looking_s
            if self._next is not None:
                raise self.superseded(self.claim + 1, self._next)

    def _look(self) -> dict[str, Any] | None:
        """Return the record of the next number, or None if there is none."""
        try:
            # A read, because object stores answer ``exists`` with two requests.
            return _read(self._store, self._directory, self.claim + 1)
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            return None

    def superseded(self, number: int, record: Mapping[str, Any]) -> SupersededError:
        """Return the error that says which claim is valid instead."""
        made = (
            f"claim {number} was made at {record.get('since', 'an unknown time')} on "
            f"{record.get('host', 'an unknown host')}, so this one writes nothing more and ends; "
            f"see `everstep status {self._directory}`"
            if record
            else f"claim {number} has no record, because the process that made it ended "
            "before it had written one. This one writes nothing more and ends; if no other "
            "process trains there, run again"
        )
        return SupersededError(
            f"the run in {self._directory} was taken over: {made}",
            path=self._directory,
            claim=self.claim,
            newest=number,
        )


def _path(directory: str, number: int) -> str:
    return join(directory, CLAIMS, f"{number:06d}.json")


def _read(store: Store, directory: str, number: int) -> dict[str, Any]:
    """Return a record; {} if its writer died while writing it."""
    data = store.read(_path(directory, number))
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
