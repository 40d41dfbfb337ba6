"""Which life of a run owns the run's directory.

A life begins when a run is started or resumed, and is numbered from 1. It claims the directory by
its record, ``lives/000002.json``, which is created and never replaced: where the storage creates
exclusively (S3, GCS, Azure, file systems), of two claims of one number one fails. A life owns the
directory until the next number has a record. So an older one, whose cluster nobody can reach but
which trains on, learns from storage itself that it may commit and delete nothing more.
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

LIVES = "lives"
#: Writes that harm nobody if they come late (lines of metrics and journal, which name their
#: attempt) are preceded by a look that is no older than this.
RECENT_S = 5.0


def next_life(store: Store, directory: str) -> int:
    """Return the number that the next life of the run in ``directory`` will have."""
    names = (name.removesuffix(".json") for name in store.list(join(directory, LIVES)))
    return max((int(name) for name in names if name.isdecimal()), default=0) + 1


def claim(store: Store, directory: str, life: int, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make ``life`` the owner of ``directory``; safe to repeat.

    Args:
        life: The result of ``next_life``.
        record: JSON values; "token" is in no other claim, "host" and "since" tell people who it is.

    Returns:
        The record of the first of this life's claims.

    Raises:
        SupersededError: Another claim was first, or a later life owns the directory.
    """
    owner = Owner(store, directory, life)
    data = json.dumps(dict(record)).encode()
    if not store.write_atomic(_path(directory, life), data, fsync=True, exclusive=True):
        found = _read(store, directory, life)
        if found.get("token") != record["token"]:
            raise owner.superseded(life, found)
        record = found
    owner.require()
    return record


class Owner:
    """The directory of a run as one life of it sees it. Thread-safe.

    Args:
        life: Its number; 0 for a directory that no lives share, where nothing is checked.
    """

    def __init__(self, store: Store, directory: str, life: int) -> None:
        self._store = store
        self._directory = directory
        self._looked_s = float("-inf")
        self._next: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self.life = life

    def require(self, *, within_s: float = 0.0) -> None:
        """Check that this life still owns the directory: one read of a file that is not there.

        Args:
            within_s: A look of the last so many seconds is enough.

        Raises:
            SupersededError: A later life owns it.
            StorageError: The storage cannot tell.
        """
        with self._lock:
            looking_s = time.monotonic()
            if self._next is None and self.life and looking_s - self._looked_s >= within_s:
                self._next = self._look()
                self._looked_s = looking_s
            if self._next is not None:
                raise self.superseded(self.life + 1, self._next)

    def _look(self) -> dict[str, Any] | None:
        """Return the record of the next life, None if there is none."""
        try:
            # A read: object stores answer ``exists`` by two requests.
            return _read(self._store, self._directory, self.life + 1)
        except StorageError as error:
            if not error.facts.get("missing"):
                raise
            return None

    def superseded(self, life: int, record: Mapping[str, Any]) -> SupersededError:
        """Return the error that says which life owns the directory instead."""
        since, host = record.get("since", "now"), record.get("host", "another host")
        return SupersededError(
            f"the run in {self._directory} was taken over: its life {life} began at {since} on "
            f"{host}, so this one writes nothing more and ends; see `everstep status "
            f"{self._directory}`",
            path=self._directory,
            life=self.life,
            owner=life,
        )


def _path(directory: str, life: int) -> str:
    return join(directory, LIVES, f"{life:06d}.json")


def _read(store: Store, directory: str, life: int) -> dict[str, Any]:
    """Return a record; {} if its writer died in the middle of it."""
    data = store.read(_path(directory, life))
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
