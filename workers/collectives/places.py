"""Publish each rank's place in its script, for the ranks that wait for each other.

A collective that only some ranks call waits forever, and the other ranks wait in the next one. So a
rank that has waited for long publishes its place, and ``meet`` finds out, without a time limit,
whether the others can still come. A rank cannot come if it waits for this one in a collective.
"""

import contextlib
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from workers.telemetry import RecordRing, Waited

#: Time after which a wait for a collective is published, and the period of checking it, in seconds.
_LONG_S: Final = 1.0
_LOOK_S: Final = 0.25
#: Period of checking whether the others have come, which usually takes milliseconds; later, the
#: period of checking whether they still can.
_MEET_S: Final = 0.005
_APART_S: Final = 0.25
#: Stands in for a line if the training thread is outside the script.
_BEHIND: Final = "the end of the script"
#: The folders of this package, and of the libraries: code that is not the script's.
_OURS: Final = str(Path(__file__).parents[1])
_LIBRARIES: Final = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(torch.__file__).parent),
    "<frozen",
)
#: The built-in training counts as the user's script.
_BUILT_IN: Final = str(Path(__file__).parents[1] / "train/lm.py")


class Places:
    """Publishes this rank's place when it has waited for long, and reads the places of the others.

    The training thread creates it, and it works until ``close``. ``is_over`` returns whether the
    attempt was aborted.

    Attributes:
        tell: Called with the line of the script at which this rank has waited for long; with ""
            when the wait is over.
    """

    def __init__(
        self,
        store: Any,
        ring: RecordRing,
        *,
        rank: int,
        world_size: int,
        is_over: Callable[[], bool],
    ) -> None:
        self._store, self._ring = store, ring
        self._rank, self._world_size = rank, world_size
        self._is_over = is_over
        self.tell: Callable[[str], None] = lambda _line: None
        self._trainer = threading.get_ident()
        self._num_met = 0
        self._left = threading.Event()
        if world_size > 1:
            threading.Thread(target=self._watch, daemon=True, name="places").start()

    @property
    def are_several(self) -> bool:
        """Return whether there is any other rank."""
        return self._world_size > 1

    def close(self) -> None:
        """Publish nothing from now on."""
        self._left.set()

    def meet(self, what: str) -> dict[int, str] | None:
        """Wait until every rank has called this equally often, for the same ``what``.

        Return None once all have. Otherwise return the places, by rank, of the ranks that cannot
        come: they wait for this one in a collective, or call this for something else. Return {} if
        the attempt was aborted or the store is gone.
        """
        if self._world_size == 1:
            return None
        try:
            return self._meet(what)
        except (RuntimeError, dist.DistError):
            # The controller that held the store was restarted.
            return {}

    def _meet(self, what: str) -> dict[int, str] | None:
        number, line = self._num_met + 1, script_line(sys._getframe(2))  # noqa: SLF001
        counter = f"met/{number}/{what}"
        num_there = self._store.add(counter, 1)
        apart_s = time.monotonic() + _LONG_S
        is_told = False
        try:
            while num_there < self._world_size:
                if self._is_over():
                    return {}
                if time.monotonic() >= apart_s:
                    if not is_told:
                        place = {"met": number, "what": what, "line": line}
                        self._store.set(f"place/{self._rank}", json.dumps(place))
                        is_told = True
                    apart_s = time.monotonic() + _APART_S
                    if self._apart(number, what):
                        # Other ranks that wait there may be about to publish their places.
                        self._left.wait(2 * _LOOK_S)
                        self._store.add(counter, -1)
                        return self._apart(number, what)
                self._left.wait(_MEET_S)
                num_there = self._store.add(counter, 0)
        finally:
            if is_told:
                self._store.delete_key(f"place/{self._rank}")
        self._num_met = number
        return None

    def _apart(self, number: int, what: str) -> dict[int, str]:
        """Return the places of the ranks that cannot come before this one leaves."""
        found: dict[int, str] = {}
        for rank in range(self._world_size):
            key = f"place/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            place = json.loads(self._store.get(key))
            if "met" in place:
                if (place["met"], place["what"]) != (number, what):
                    found[rank] = f"in {place['what']} ({place['line']})"
            elif self._ring.entered(place["group"]) < place["seq"] and self._rank in place["ranks"]:
                found[rank] = f"in {place['op']} ({place['line']})"
        return found

    def _watch(self) -> None:
        told: Waited | None = None
        while not self._left.wait(_LOOK_S) and not self._is_over():
            waited = self._ring.waited(time.monotonic_ns() - int(_LONG_S * 1e9))
            if waited is not None and waited != told:
                self._say_place(waited)
            elif waited is None and told is not None:
                # The place that the store holds is outdated.
                self.tell("")
            told = waited

    def _say_place(self, waited: Waited) -> None:
        line = script_line(sys._current_frames().get(self._trainer)) or _BEHIND  # noqa: SLF001
        self.tell(line)
        place = {
            "group": waited.group,
            "ranks": list(waited.ranks),
            "seq": waited.seq,
            "op": waited.op,
            "line": line,
        }
        # Without a store, ranks cannot meet.
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"place/{self._rank}", json.dumps(place))


def script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the script that called a frame; None if there is none."""
    while frame is not None and not is_of_script(frame):
        frame = frame.f_back
    return frame


def is_of_script(frame: FrameType) -> bool:
    """Return whether a frame runs code of the script, and not of this package or a library."""
    file = frame.f_code.co_filename
    return file == _BUILT_IN or not file.startswith((_OURS, *_LIBRARIES))


def script_line(frame: FrameType | None) -> str:
    """Return the script's line that a frame executes, as ``train.py:57``; "" if there is none."""
    frame = script_frame(frame)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def described(places: Mapping[int, str] | Iterable[tuple[int, str]]) -> str:
    """Return the places of ranks, for people, grouped by place."""
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(dict(places).items()):
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in by_place.items())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if ranks[8:] else ''} are"
