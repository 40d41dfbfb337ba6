"""Ranks that leave early, and ranks that die, must not take along what all of them have."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.made import held_of
from workers.memory import counts
from workers.memory.retention import choose_buffer
from workers.protocol import Held
from workers.snapshot import Fallback

RESUMED = 4
OFTEN, SELDOM = st.sampled_from([True, True, True, False]), st.sampled_from([False, False, True])
LINEAGE = ((1, 0), (2, RESUMED))
Version = tuple[int, int]


@dataclass
class Rank:
    """The arena of one rank: what its buffers hold, which one is under way, which one pinned."""

    buffers: list[Held | None]
    fallback: Fallback = field(default_factory=lambda: Fallback(2, (1, RESUMED)))
    pinned: int | None = None
    under_way: tuple[int, int] | None = None

    def begin(self, buffer: int, step: int) -> None:
        assert buffer != self.pinned
        self.buffers[buffer], self.under_way = None, (buffer, step)

    def finish(self, *, pin: bool = False) -> None:
        if self.under_way is not None:
            buffer, step = self.under_way
            self.buffers[buffer], self.under_way = held(buffer, 2, step), None
            if pin and self.pinned is None:
                self.pinned = buffer

    def versions(self) -> set[Version]:
        found = (one for one in self.buffers if one is not None and counts(one, LINEAGE))
        return {(one.attempt, one.step) for one in found}


def held(buffer: int, attempt: int, step: int) -> Held:
    return held_of(step, attempt=attempt, data_bytes=8, record_bytes=8, buffer=buffer)


def common(ranks: list[Rank]) -> set[Version]:
    return set.intersection(*(rank.versions() for rank in ranks))


def train(data: st.DataObject, ranks: list[Rank], step: int) -> None:
    """Do what the boundary behind a step does: agree, and perhaps begin a snapshot."""
    may_finish = data.draw(st.lists(OFTEN, min_size=2, max_size=2), label="finish")
    for rank, finishes in zip(ranks, may_finish, strict=True):
        if finishes:
            rank.finish(pin=data.draw(st.booleans(), label="pin"))
        if rank.pinned is not None and data.draw(SELDOM, label="stored"):
            rank.pinned = None
    is_open = any(rank.under_way is not None for rank in ranks)
    is_behind = is_open or data.draw(SELDOM, label="behind")
    for rank in ranks:
        rank.fallback.agree(is_behind=is_behind, is_without_memory=False)
    if not is_open and data.draw(OFTEN, label="due"):
        for rank in ranks:
            buffer = choose_buffer(
                rank.buffers, pinned=rank.pinned, lineage=LINEAGE, kept=rank.fallback.safe
            )
            rank.begin(buffer, step)
            rank.fallback.take(step)


def leave(data: st.DataObject, rank: Rank, step: int) -> None:
    """Take the final snapshot, which may break off anywhere."""
    if rank.under_way is not None and data.draw(OFTEN, label="completes"):
        rank.finish()
    if rank.under_way is not None or (2, step) in rank.versions():
        return
    buffer = rank.fallback.buffer(rank.buffers, pinned=rank.pinned, lineage=LINEAGE)
    if buffer is not None:
        rank.begin(buffer, step)
        if data.draw(st.booleans(), label="whole"):
            rank.finish()


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_the_newest_common_version_stays_whichever_worker_leaves_or_dies(
    data: st.DataObject,
) -> None:
    """A rank knows what all had agreed on, not what they have finished since."""
    older = st.permutations([held(0, 1, RESUMED), held(0, 1, 9), held(0, 1, RESUMED - 1), None])
    ranks = []
    for _ in range(2):
        drawn = data.draw(older, label="buffers")[:3]
        buffers = [
            held(buffer, one.attempt, one.step) if one is not None else None
            for buffer, one in enumerate(drawn)
        ]
        ranks.append(Rank(buffers))
    last = RESUMED + data.draw(st.integers(1, 7), label="steps")
    for step in range(RESUMED + 1, last + 1):
        train(data, ranks, step)
    before = max(common(ranks), default=None)
    for rank in ranks:
        if data.draw(st.booleans(), label="lives"):
            leave(data, rank, last)

    after = common(ranks)
    assert before is None or max(after) >= before
    for rank in ranks:
        mine = [version for version in rank.versions() if version[0] == 2]
        # The facts by which a keeper frees versions of older attempts.
        assert len(mine) < 2 or any(version[0] == 2 for version in after)
