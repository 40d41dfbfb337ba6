"""Overwriting and freeing of memory, against a whole run that loses ranks and nodes.

The machine is a model of the run around the real decisions: ranks in lockstep, keepers that hold
and copy, attempts that resume from the newest version that is complete.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.made import held_of
from workers.memory import NUM_BUFFERS, HeldArena, counts, in_use, reapable, split_name
from workers.memory.retention import choose_buffer
from workers.protocol import Held

Version = tuple[int, int]


def _held(buffer: int, attempt: int, step: int, rank: int = 0, world: int = 1) -> Held:
    return held_of(step, rank, attempt=attempt, world_size=world, data_bytes=1, buffer=buffer)


LINEAGES = st.lists(st.integers(0, 9), max_size=4).map(
    lambda resumes: [(attempt, step) for attempt, step in enumerate(resumes, 1)]
)
BUFFERS = st.tuples(
    *(
        st.none() | st.builds(_held, st.just(buffer), st.integers(1, 5), st.integers(0, 9))
        for buffer in range(NUM_BUFFERS)
    )
)


@given(BUFFERS, st.none() | st.integers(0, NUM_BUFFERS - 1), LINEAGES)
def test_a_writer_spares_what_is_pinned_and_the_newest_that_counts(
    buffers: tuple[Held | None, ...], pinned: int | None, lineage: list[Version]
) -> None:
    """Whatever is in the buffers; and of the rest, what is worth least goes first."""
    chosen = choose_buffer(buffers, pinned=pinned, lineage=lineage)

    assert chosen != pinned
    old = buffers[chosen]
    others = [held for buffer, held in enumerate(buffers) if buffer not in {chosen, pinned}]
    if old is not None:
        assert None not in others
        if counts(old, lineage):
            assert all(held is not None and counts(held, lineage) for held in others)
            newest = max((h.attempt, h.step) for h in buffers if h and counts(h, lineage))
            same = [h for h in buffers if h and (h.attempt, h.step) == newest]
            assert (old.attempt, old.step) < newest or len(same) > 1


def test_a_version_in_use_is_known_by_its_name() -> None:
    """A worker's newest arena, also one it could not get; copies of what a peer has; parities."""
    names = ["w1.1", "w1.2", "w2.1", "w3.1", "aa/w1.1", "aa/w1.2", "bb/w1.1"]
    names += ["parity/0.4", "parity/0.5"]
    living = {"w1": 2, "w3": 2}
    listed = {"aa": {"w1.2"}}

    assert in_use(names, living=living, listed=listed, attempt=5) == {
        "w1.2", "aa/w1.2", "parity/0.5",
    }  # fmt: skip


@pytest.mark.parametrize(("stored_step", "goes"), [(4, False), (5, False), (6, True)])
def test_what_storage_has_newer_is_not_needed_in_memory(stored_step: int, *, goes: bool) -> None:
    """If both hold the same step, the next attempt is loading from memory just now."""
    left = HeldArena(name="w1.1", in_use=False, versions=(_held(0, 1, 5),))
    found = reapable([left], lineage=[(1, 0), (2, 5)], stored_step=stored_step)
    assert found == (["w1.1"] if goes else [])


@pytest.mark.parametrize(
    ("num_protected", "goes"), [(None, ["bb/w1.1"]), (0, []), (1, []), (2, ["bb/w1.1"])]
)
def test_a_copy_stays_until_what_is_newer_is_protected(
    num_protected: int | None, goes: list[str]
) -> None:
    """Parities take over from copies, but memory may be refused them; then nothing protects."""
    own = [_held(buffer, 2, 6 + buffer) for buffer in (0, 1)]
    arenas = [
        HeldArena(name="w1.1", in_use=True, versions=tuple(own)),
        HeldArena(name="bb/w1.1", in_use=False, versions=(_held(0, 1, 5),)),
    ]
    if num_protected is not None:
        kept = tuple(own[:num_protected])
        arenas.append(HeldArena(name="parity/0.2", in_use=True, versions=kept))
    assert reapable(arenas, lineage=[(1, 0), (2, 5)]) == goes


@dataclass
class _Arena:
    buffers: list[Held | None] = field(default_factory=lambda: [None] * NUM_BUFFERS)
    pinned: int | None = None

    def versions(self) -> list[Held]:
        return sorted(
            (held for held in self.buffers if held is not None), key=lambda h: (h.attempt, h.step)
        )


@dataclass
class _Rank:
    worker: str
    node: str
    generation: int = 1
    pending: Held | None = None
    pin: bool = False

    @property
    def name(self) -> str:
        return f"{self.worker}.{self.generation}"


class Run(RuleBasedStateMachine):
    """One node, or two of which each keeps copies of the other's arenas."""

    def __init__(self) -> None:
        super().__init__()
        self.num_workers = 0
        self.num_nodes = 0
        self.buffers: dict[str, dict[str, _Arena]] = {}
        self.ranks: list[_Rank] = []
        self.attempt, self.step = 1, 0
        self.lineage: list[Version] = [(1, 0)]
        #: The version that every rank and its copy have, as far as the ranks know.
        self.kept: Version | None = None
        self.is_overtaken = False
        #: Newest versions that were complete, the newest last; at most two.
        self.completed: list[Version] = []

    @initialize(num_nodes=st.integers(1, 2), num_ranks=st.integers(2, 4))
    def begin(self, num_nodes: int, num_ranks: int) -> None:
        """Start the run."""
        for _ in range(num_nodes):
            self._add_node()
        for number in range(num_ranks):
            self._add_rank(sorted(self.buffers)[number % num_nodes])

    @rule(snapshot=st.booleans(), pin=st.booleans(), is_calm=st.booleans())
    def train(self, *, snapshot: bool, pin: bool, is_calm: bool) -> None:
        """All ranks do a step; the flags of all decide what each does at its end."""
        if is_calm:
            self.finish(mask=-1)
            self.copy(mask=-1)
        self._step(snapshot=snapshot, pin=pin, overtakes=False)

    @rule(masks=st.lists(st.integers(0, 255), min_size=1, max_size=5))
    def overtake(self, masks: list[int]) -> None:
        """The ranks no longer wait for their copies, some of which are made."""
        for mask in masks:
            self._step(snapshot=True, pin=False, overtakes=True)
            self.copy(mask=mask)

    def _step(self, *, snapshot: bool, pin: bool, overtakes: bool) -> None:
        arenas = [self._arena(rank) for rank in self.ranks]
        self.step += 1
        is_behind = self._is_behind()
        if not is_behind and not any(rank.pending for rank in self.ranks):
            self.kept, self.is_overtaken = self._newest_taken(), False
        elif overtakes:
            self.is_overtaken = True
        if not snapshot or (is_behind and not overtakes):
            return
        if overtakes:
            # A barrier: all complete the one before.
            self.finish(mask=-1)
        if any(rank.pending for rank in self.ranks):
            return
        pin = pin and not any(arena.pinned is not None for arena in arenas)
        world = len(self.ranks)
        for number, (rank, arena) in enumerate(zip(self.ranks, arenas, strict=True)):
            buffer = choose_buffer(
                arena.buffers, pinned=arena.pinned, lineage=self.lineage, kept=self.kept
            )
            arena.buffers[buffer] = None
            rank.pending = _held(buffer, self.attempt, self.step, number, world)
            rank.pin = pin

    @rule(mask=st.integers(0, 15))
    def finish(self, mask: int) -> None:
        """The threads of some ranks complete their buffers."""
        for number, rank in enumerate(self.ranks):
            if mask >> number & 1 and rank.pending is not None:
                held, rank.pending = rank.pending, None
                arena = self._arena(rank)
                arena.buffers[held.buffer] = held
                if rank.pin:
                    arena.pinned = held.buffer
        self._note_completed()

    @rule(mask=st.integers(0, 255))
    def copy(self, mask: int) -> None:
        """The other node's mirror takes the newest version that counts of some arenas."""
        for number, (node, name) in enumerate(self._originals()):
            if mask >> number & 1:
                self._copy(node, name)
        self._note_completed()

    @rule(index=st.integers(0, 7))
    def unpin(self, index: int) -> None:
        """A keeper has stored a buffer, or given it up."""
        buffers = self.buffers[sorted(self.buffers)[index % len(self.buffers)]]
        for arena in buffers.values():
            arena.pinned = None

    @rule(index=st.integers(0, 7))
    def reap(self, index: int) -> None:
        """A keeper frees unneeded memory."""
        node = sorted(self.buffers)[index % len(self.buffers)]
        buffers = self.buffers[node]
        living = {rank.worker: rank.generation for rank in self.ranks if rank.node == node}
        listed = {
            other[:12]: [name for name in arenas if "/" not in name]
            for other, arenas in self.buffers.items()
            if other != node
        }
        used = in_use(list(buffers), living=living, listed=listed)
        held_arenas = [
            HeldArena(
                name=name,
                in_use=name in used or arena.pinned is not None,
                versions=tuple(arena.versions()),
            )
            for name, arena in buffers.items()
        ]
        for name in reapable(held_arenas, lineage=self.lineage):
            del buffers[name]

    @rule(index=st.integers(0, 7), grows=st.booleans(), inherits=st.booleans())
    def kill_worker(self, *, index: int, grows: bool, inherits: bool) -> None:
        """A process dies; another one of its node takes its place, and perhaps its memory."""
        dead = self.ranks.pop(index % len(self.ranks))
        self._add_rank(dead.node)
        if inherits:
            buffers = self.buffers[dead.node]
            buffers[self.ranks[-1].name] = buffers.pop(dead.name)
        self._resume(grows=grows)

    @precondition(lambda self: len(self.ranks) > 1)
    @rule(index=st.integers(0, 7), grows=st.booleans())
    def shrink(self, *, index: int, grows: bool) -> None:
        """A process dies and is not replaced; the others may need larger arenas."""
        self.ranks.pop(index % len(self.ranks))
        self._resume(grows=grows)

    @precondition(lambda self: len(self.buffers) > 1)
    @rule(index=st.integers(0, 1), is_copied=st.booleans())
    def lose_node(self, *, index: int, is_copied: bool) -> None:
        """A machine goes with its keeper; a new one comes."""
        if is_copied:
            for node, name in self._originals():
                self._copy(node, name)
        self._note_completed()
        before = list(self.completed)
        node = sorted(self.buffers)[index]
        was_copied = not any(self._is_uncopied(*original) for original in self._originals())
        del self.buffers[node]
        self.ranks = [rank for rank in self.ranks if rank.node != node]
        self.completed = self._complete_versions()[-2:]
        # The version resumed from after the last loss is on one node, until the next version is.
        is_own = bool(before) and before[-1][0] == self.attempt
        if self.is_overtaken:
            assert self.kept is None or self.kept in self._complete_versions()
        elif is_own and was_copied and not any(rank.pending for rank in self.ranks):
            assert self.completed[-1:] == before[-1:]
        self._add_node()
        for _ in range(2 if self.ranks else 3):
            self._add_rank(max(self.buffers))
        self._resume(grows=False)

    @invariant()
    def the_newest_complete_version_is_there(self) -> None:
        """Whatever was written over or let go of: what was complete once is, or a newer one."""
        newest = max((v for v in self.completed if self._counts(v)), default=None)
        if newest is not None:
            found = self._complete_versions()
            assert found, f"{newest} is lost"
            assert found[-1] >= newest

    @invariant()
    def what_all_have_is_kept_by_all(self) -> None:
        """However far ahead of their copies the ranks are: unless a buffer waits to be stored."""
        arenas = [self._arena(rank) for rank in self.ranks]
        if self.kept is None or any(arena.pinned is not None for arena in arenas):
            self.kept = None
            return
        for rank in self.ranks:
            assert _holds(self._arena(rank), self.kept)
            for node, buffers in self.buffers.items():
                if node != rank.node:
                    assert _holds(buffers[f"{rank.node[:12]}/{rank.name}"], self.kept)

    def _resume(self, *, grows: bool) -> None:
        for rank in self.ranks:
            rank.pending = None
        found = self._complete_versions()
        self.step = found[-1][1] if found else 0
        self.attempt += 1
        self.kept, self.is_overtaken = None, False
        self.lineage.append((self.attempt, self.step))
        self.completed = [version for version in self.completed if self._counts(version)]
        for rank in self.ranks:
            if grows:
                rank.generation += 1
            self.buffers[rank.node].setdefault(rank.name, _Arena())
        # An order has every keeper give up the pins of versions that are dead now.
        for buffers in self.buffers.values():
            for arena in buffers.values():
                held = None if arena.pinned is None else arena.buffers[arena.pinned]
                if held is None or not counts(held, self.lineage):
                    arena.pinned = None

    def _copy(self, node: str, name: str) -> None:
        counting = [h for h in self.buffers[node][name].versions() if counts(h, self.lineage)]
        for other in self.buffers:
            if other == node or not counting:
                continue
            target = self.buffers[other].setdefault(f"{node[:12]}/{name}", _Arena())
            if not _has(target, counting[-1]):
                buffer = choose_buffer(
                    target.buffers, pinned=None, lineage=self.lineage, kept=self.kept
                )
                target.buffers[buffer] = replace(counting[-1], buffer=buffer)

    def _is_behind(self) -> bool:
        """Return whether a rank's newest version is not held by the other node."""
        return any(self._is_uncopied(rank.node, rank.name) for rank in self.ranks)

    def _newest_taken(self) -> Version | None:
        """Return the newest version of this attempt that the ranks have, all of them or none."""
        held = [each for rank in self.ranks for each in self._arena(rank).versions()]
        return max(((h.attempt, h.step) for h in held if h.attempt == self.attempt), default=None)

    def _is_uncopied(self, node: str, name: str) -> bool:
        newest = [h for h in self.buffers[node][name].versions() if counts(h, self.lineage)][-1:]
        return any(
            bool(newest)
            and other != node
            and not _has(buffers.get(f"{node[:12]}/{name}", _Arena()), newest[0])
            for other, buffers in self.buffers.items()
        )

    def _arena(self, rank: _Rank) -> _Arena:
        return self.buffers[rank.node][rank.name]

    def _originals(self) -> list[tuple[str, str]]:
        return [
            (node, name)
            for node, buffers in sorted(self.buffers.items())
            for name in sorted(buffers)
            if not split_name(name)[0]
        ]

    def _counts(self, version: Version) -> bool:
        return counts(_held(0, *version), self.lineage)

    def _complete_versions(self) -> list[Version]:
        held: dict[Version, set[int]] = {}
        worlds: dict[Version, int] = {}
        for buffers in self.buffers.values():
            for arena in buffers.values():
                for each in arena.versions():
                    held.setdefault((each.attempt, each.step), set()).add(each.rank)
                    worlds[each.attempt, each.step] = each.world_size
        return sorted(v for v, found in held.items() if len(found) == worlds[v] and self._counts(v))

    def _note_completed(self) -> None:
        self.completed = sorted({*self.completed, *self._complete_versions()})[-2:]

    def _add_node(self) -> None:
        self.num_nodes += 1
        self.buffers[f"{self.num_nodes:012d}ffff"] = {}

    def _add_rank(self, node: str) -> None:
        self.num_workers += 1
        rank = _Rank(worker=f"w{self.num_workers:04d}", node=node)
        self.ranks.append(rank)
        self.buffers[node][rank.name] = _Arena()


def _has(arena: _Arena, held: Held) -> bool:
    return _holds(arena, (held.attempt, held.step))


def _holds(arena: _Arena, version: Version) -> bool:
    return any((h.attempt, h.step) == version for h in arena.versions())


TestRun = Run.TestCase
TestRun.settings = settings(stateful_step_count=40)


def test_memory_of_workers_that_are_gone_is_let_go_of_in_the_end() -> None:
    """A rule that keeps everything would be safe, too: 40 workers die one after the other."""
    run = Run()
    run.begin(num_nodes=2, num_ranks=4)
    for number in range(40):
        for _ in range(3):
            run.train(snapshot=True, pin=False, is_calm=True)
        run.finish(mask=-1)
        run.copy(mask=-1)
        for index in range(2):
            run.reap(index)
        run.the_newest_complete_version_is_there()
        assert sum(map(len, run.buffers.values())) <= 2 * 4 + 2
        run.kill_worker(index=number, grows=False, inherits=False)
