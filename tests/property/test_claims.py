"""Two and three claimants of one run on one directory, call by call in any order.

Each is a thread that commits, collects and resumes as trainers, keepers and controllers do; it
waits at every call of the store until the drawn schedule lets it go on. The version that one
resumes from is never lost, whatever the older ones do meanwhile.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import local_tensors, random_sharding, small_state
from tests.support.made import save_part
from ucp_core.errors import SupersededError
from ucp_core.native import checkpoint_name, collect_garbage, find_committed
from ucp_core.storage import MemoryStore, Owner, claim, join, next_claim

RUN = "run"
CHECKPOINTS = "run/checkpoints"
STATE = small_state()
TENSORS = local_tensors(STATE, random_sharding(random.Random(1), STATE, 1)[0])


class TurnStore(MemoryStore):
    """A store that is called by one of several threads at a time, in an order drawn before."""

    _CALLS = ("read", "write_atomic", "write_file", "delete", "list", "sizes", "exists")

    def __init__(self, schedule: list[int]) -> None:
        super().__init__()
        self._schedule = list(reversed(schedule))
        self._turn = threading.Condition()
        self._waiting: set[int] = set()
        self._running: set[int] = set()
        self._numbers = threading.local()
        self._next = 0
        for name in self._CALLS:
            setattr(self, name, self._in_turn(getattr(self, name)))

    def _in_turn(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: str, *args: Any, **options: Any) -> Any:
            number = getattr(self._numbers, "number", None)
            if number is not None:
                self._await(number)
            return call(path, *args, **options)

        return called

    def _await(self, number: int) -> None:
        with self._turn:
            self._waiting.add(number)
            self._choose()
            assert self._turn.wait_for(lambda: self._next == number, timeout=60)
            self._waiting.discard(number)
            self._next = -1

    def _choose(self) -> None:
        """Give the turn to somebody once all wait for it."""
        if self._next == -1 and self._waiting == self._running and self._waiting:
            drawn = self._schedule.pop() if self._schedule else 0
            order = sorted(self._waiting)
            self._next = order[drawn % len(order)]
            self._turn.notify_all()

    @contextmanager
    def _taking_part(self, number: int) -> Iterator[None]:
        self._numbers.number = number
        try:
            yield
        finally:
            with self._turn:
                self._running.discard(number)
                self._choose()

    def run(self, parts: dict[int, Callable[[], None]]) -> None:
        """Run every part in a thread of its own to the end; raise what one raised."""
        errors: list[BaseException] = []
        self._running, self._next = set(parts), -1

        def run(number: int, part: Callable[[], None]) -> None:
            with self._taking_part(number):
                try:
                    part()
                except BaseException as error:  # noqa: BLE001  raised again below
                    errors.append(error)

        threads = [threading.Thread(target=run, args=item) for item in parts.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class World:
    """Objects that the claimants of a run share, and the books about them."""

    def __init__(self, schedule: list[int], *, looks: bool) -> None:
        self.store = TurnStore(schedule)
        self.looks = looks
        #: By number: ``(attempt, resume_step)`` of all attempts, as its part of the journal has it.
        self.journal: dict[int, tuple[tuple[int, int], ...]] = {0: ()}
        #: By number: what it was told is committed, and older claimants when it claimed.
        self.reported: dict[int, int] = {}
        self.known: dict[int, int] = {}
        #: The claimant that began last, and what it resumed from.
        self.newest = (0, 0)

    def live(self, token: str, *, num_steps: int, keep: int) -> None:
        """Be a claimant: claim, resume, then commit and collect until superseded."""
        with suppress(SupersededError):
            number = next_claim(self.store, RUN)
            claim(self.store, RUN, number, {"token": token})
            self.known[number] = max(
                (step for one, step in self.reported.items() if one < number), default=0
            )
            owner = Owner(self.store, RUN, number)
            self._train(number, owner.require if self.looks else _nothing, num_steps, keep)

    def _train(
        self, number: int, require_owner: Callable[[], None], num_steps: int, keep: int
    ) -> None:
        before = self.journal[max(one for one in self.journal if one < number)]
        found = find_committed(self.store, CHECKPOINTS, lineage=before)
        begin = found.step if found is not None else 0
        # Ranks look when they enter an attempt: a newer claimant may have moved on meanwhile.
        require_owner()
        assert begin >= self.known[number], "what an older claimant was told is committed is lost"
        attempt = len(before) + 1
        lineage = self.journal[number] = (*before, (attempt, begin))
        self.newest = max(self.newest, (number, begin))
        for step in range(begin + 1, begin + 1 + num_steps):
            saved = save_part(
                self.store,
                join(CHECKPOINTS, checkpoint_name(step)),
                TENSORS,
                step=step,
                attempt=attempt,
                require_owner=require_owner,
            )
            if saved.committed and self.newest[0] == number:
                self.reported[number] = step
            collect_garbage(
                self.store, CHECKPOINTS, keep=keep, lineage=lineage, require_owner=require_owner
            )


def _nothing() -> None:
    """Look at nothing."""


def _lived(schedule: list[int], lengths: list[int], keep: int, *, looks: bool = True) -> World:
    """Let claimants of so many steps train at once; return what is left."""
    world = World(schedule, looks=looks)
    world.store.run(
        {
            number: partial(world.live, f"t{number}", num_steps=length, keep=keep)
            for number, length in enumerate(lengths)
        }
    )
    return world


def _newest_step(world: World) -> int:
    lineage = world.journal[world.newest[0]]
    found = find_committed(world.store, CHECKPOINTS, lineage=lineage)
    return found.step if found is not None else 0


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 5, 15, 40])), max_size=40),
    lengths=st.lists(st.integers(min_value=1, max_value=6), min_size=2, max_size=3),
    keep=st.integers(min_value=1, max_value=2),
)
def test_what_a_claim_resumes_from_outlives_the_lives_before(
    turns: list[tuple[int, int]], lengths: list[int], keep: int
) -> None:
    """Whatever they do and when, the newest claimant finds what it began from, or its own."""
    world = _lived([number for number, num in turns for _ in range(num)], lengths, keep)
    number, begin = world.newest

    assert _newest_step(world) >= max(begin, world.reported.get(number, 0))


def test_claims_that_do_not_look_lose_what_was_committed() -> None:
    """As it was: the older one trains on, and its retention deletes what the newer one began from.

    The newer one begins at some moment, and then waits.
    """
    schedules = [[0] * num + [1] * 14 + [0] * 400 for num in range(10, 60, 2)]
    lost = [one for one in schedules if _is_lost(_lived(one, [6, 1], 1, looks=False))]

    assert lost
    assert not any(_is_lost(_lived(one, [6, 1], 1)) for one in lost)


def _is_lost(world: World) -> bool:
    return _newest_step(world) < world.newest[1]
