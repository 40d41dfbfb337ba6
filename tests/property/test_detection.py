"""Random attempts with a planted guilty rank: it is named, or none is."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.detection import Hang, judge, limits_from
from tests.support.histories import ATTEMPT, calm, group, stop, watch
from workers.protocol import GroupState, WorkerReport

LIMITS = limits_from(0.2)


@st.composite
def hung_attempts(draw: st.DrawFn) -> tuple[list[WorkerReport], int]:
    """Return the rows of an attempt that one rank holds up, and that rank.

    The program is the same on all ranks: a random list of collectives, each in one of some random
    groups. It is run with the rule of every collective (it ends when all members have called it)
    until no rank but the guilty one, which stops at a random place of its own program, can go on.
    """
    num_ranks = draw(st.integers(2, 7))
    ranks = range(num_ranks)
    subsets = st.sets(st.sampled_from(ranks), min_size=2).map(lambda s: tuple(sorted(s)))
    groups = draw(st.lists(subsets, min_size=1, max_size=4, unique=True))
    program = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=12))
    own = {rank: [g for g in program if rank in groups[g]] for rank in ranks}
    guilty = draw(st.sampled_from([rank for rank in ranks if own[rank]]))
    stops_at = draw(st.integers(0, len(own[guilty]) - 1))

    called = {rank: [0] * len(groups) for rank in ranks}
    done = dict.fromkeys(ranks, 0)
    waiting: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            if rank in waiting:
                number = called[rank][waiting[rank]]
                if all(called[m][waiting[rank]] >= number for m in groups[waiting[rank]]):
                    del waiting[rank]
                    done[rank] += 1
                    moved = True
            elif done[rank] < len(own[rank]) and not (rank == guilty and done[rank] == stops_at):
                waiting[rank] = own[rank][done[rank]]
                called[rank][waiting[rank]] += 1
                moved = True

    def state(rank: int, index: int) -> GroupState:
        waits = waiting.get(rank) == index
        return group(
            f"g{index}", groups[index], called[rank][index], waiting_s=2.0 if waits else 0.0
        )

    rows = [
        replace(
            calm(f"w{rank}", rank),
            groups=tuple(state(rank, i) for i in range(len(groups)) if rank in groups[i]),
        )
        for rank in ranks
    ]
    return rows, guilty


def verdict_on(rows: list[WorkerReport], *, for_s: float) -> Hang | None:
    state, at_s = watch(rows, for_s=for_s, period_s=0.25 if for_s < 10 else 1.0)
    members = tuple(f"w{rank}" for rank in range(len(rows)))
    verdict = judge(state, at_s, attempt=ATTEMPT, members=members, limits=LIMITS)
    assert verdict is None or isinstance(verdict, Hang)
    return verdict


@given(hung_attempts())
def test_only_the_planted_rank_is_ever_named(case: tuple[list[WorkerReport], int]) -> None:
    """Ranks that have finished their program compute and wait nowhere: they look idle, too."""
    rows, guilty = case

    assert verdict_on(rows, for_s=9.0) is None
    verdict = verdict_on(rows, for_s=LIMITS.pause_s + 1.0)

    somebody_waits = any(g.waiting_s > 0 for row in rows for g in row.groups)
    if somebody_waits:
        assert verdict is not None
        assert verdict.guilty == (f"w{guilty}",)
    else:
        assert verdict is None


@given(hung_attempts(), st.randoms(use_true_random=False))
def test_the_order_of_workers_and_groups_does_not_matter(
    case: tuple[list[WorkerReport], int], random: object
) -> None:
    """A verdict that depends on it would name another rank after a re-formation."""
    rows, _ = case
    shuffled = [
        replace(row, groups=tuple(random.sample(row.groups, len(row.groups))))  # type: ignore[attr-defined]
        for row in random.sample(rows, len(rows))  # type: ignore[attr-defined]
    ]

    a, b = verdict_on(rows, for_s=1.25), verdict_on(shuffled, for_s=1.25)

    assert (a and a.guilty) == (b and b.guilty)


@given(hung_attempts(), st.integers(0, 6))
def test_a_stopped_rank_is_named_whatever_the_rings_say(
    case: tuple[list[WorkerReport], int], stopped: int
) -> None:
    """The kernel's word is stronger than what a ring's record lets one conclude."""
    rows, _ = case
    rank = stopped % len(rows)
    rows[rank] = stop(rows[rank])

    verdict = verdict_on(rows, for_s=1.25)

    assert verdict is not None
    assert verdict.guilty == (f"w{rank}",)
