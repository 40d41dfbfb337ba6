"""One claim on a run's directory counts, and every other claimant learns it from storage alone."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ucp_core.errors import StorageError, SupersededError
from ucp_core.storage import RECENT_S, LocalStore, MemoryStore, Owner, Store, claim, next_claim


@pytest.fixture(params=[LocalStore, MemoryStore])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, str]:
    return request.param(), str(tmp_path / "run")


def _record(token: str) -> dict[str, str]:
    return {"token": token, "host": f"head-of-{token}", "since": "2026-01-01T00:00:00+00:00"}


def test_the_newest_claim_owns_the_directory(place: tuple[Store, str]) -> None:
    """The older one learns who has it, since when and where to look."""
    store, run = place
    assert next_claim(store, run) == 1
    claim(store, run, 1, _record("a"))
    older = Owner(store, run, 1)
    older.require()

    assert next_claim(store, run) == 2
    claim(store, run, 2, _record("b"))

    Owner(store, run, 2).require()
    with pytest.raises(SupersededError, match=r"claim 2 was made at 2026.* on head-of-b"):
        older.require()
    with pytest.raises(SupersededError):
        claim(store, run, 1, _record("a"))
    with pytest.raises(SupersededError):
        older.require(within_s=RECENT_S)


def test_one_of_two_claims_of_one_number_fails(place: tuple[Store, str]) -> None:
    """Two people run the directory at the same instant on two clusters."""
    store, run = place

    def tried(number: int) -> bool:
        try:
            claim(store, run, 1, _record(f"t{number}"))
        except SupersededError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(tried, range(16)))

    assert won.count(True) == 1


def test_a_claim_whose_process_ended_while_it_wrote_says_so(place: tuple[Store, str]) -> None:
    """It named "another host", which there need not be: where nothing links, a record is cut."""
    store, run = place
    claim(store, run, 1, _record("a"))
    store.write_atomic(f"{run}/claims/000002.json", b"", fsync=False, exclusive=True)

    with pytest.raises(SupersededError, match=r"claim 2 has no record, .* run again") as caught:
        Owner(store, run, 1).require()
    assert "host" not in str(caught.value)
    with pytest.raises(SupersededError, match="claim 2 has no record"):
        claim(store, run, 2, _record("b"))
    claim(store, run, next_claim(store, run), _record("b"))


def test_a_restarted_controller_claims_again_what_it_has(place: tuple[Store, str]) -> None:
    """Ray starts it again with the same token, and what it had noted first still holds."""
    store, run = place
    claim(store, run, 1, {**_record("a"), "incarnation": 4})

    assert claim(store, run, 1, {**_record("a"), "incarnation": 6})["incarnation"] == 4
    assert next_claim(store, run) == 2


class _Counting(MemoryStore):
    num_reads = 0
    is_down = False

    def read(self, path: str) -> bytes:
        self.num_reads += 1
        if self.is_down:
            raise StorageError(f"{path} could not be reached", path=path)
        return super().read(path)


def test_a_look_is_one_read_and_serves_for_a_while() -> None:
    """A commit needs a fresh look; lines of metrics share one."""
    store = _Counting()
    claim(store, "run", 1, _record("a"))
    owner = Owner(store, "run", 1)
    store.num_reads = 0

    for _ in range(50):
        owner.require(within_s=RECENT_S)
    assert store.num_reads == 1
    owner.require()
    assert store.num_reads == 2
    Owner(store, "run", 0).require()
    assert store.num_reads == 2, "a script that runs alone does not share its directory"


def test_storage_that_cannot_tell_is_no_answer() -> None:
    """An outage neither takes the directory away nor lets a commit through."""
    store = _Counting()
    owner = Owner(store, "run", 1)
    store.is_down = True
    with pytest.raises(StorageError, match="could not be reached"):
        owner.require(within_s=RECENT_S)
    store.is_down = False
    owner.require()


def test_a_mount_without_hard_links_takes_a_name_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SMB and some FUSE mounts: the name is taken by exclusive creation."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    with ThreadPoolExecutor(8) as pool:
        won = list(
            pool.map(
                lambda number: LocalStore().write_atomic(
                    str(tmp_path / "m"), b"%d" % number, fsync=False, exclusive=True
                ),
                range(64),
            )
        )

    assert won.count(True) == 1
    assert LocalStore().read(str(tmp_path / "m")) == b"%d" % won.index(True)
