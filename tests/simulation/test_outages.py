"""A year of real outages through the real machine: budgets and quarantine never end the run."""

from collections import defaultdict

import pytest

from orchestrator.core import RunRules
from tests.support.outages import Fault, Outages, node_faults

DAY_S = 86400.0
HOUR_S = 3600.0


def replay(num_servers: int, days: float, *, num_spare: int) -> tuple[Outages, list[Fault]]:
    """Replay the trace on a part of the cluster, of which as many break as of all 400 servers."""
    every = node_faults()
    broken = list(dict.fromkeys(fault.node for fault in every))
    num_broken = round(num_servers * len(broken) / 400)
    servers = broken[:num_broken] + [f"well-{n}" for n in range(num_servers - num_broken)]
    faults = [fault for fault in every if fault.node in set(servers)]
    rules = RunRules(
        run="outages",
        min_workers=round(0.6 * num_servers),
        max_workers=num_servers - num_spare,
        total_steps=10**9,
    )
    world = Outages(rules, servers, faults)
    world.run_until(days * DAY_S)
    return world, [fault for fault in faults if fault.begin_s < days * DAY_S]


def kept_out(world: Outages) -> dict[str, list[tuple[float, float]]]:
    """Return when each server was kept out, without overlaps."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for server, begin_s, end_s in world.quarantines:
        is_longer = found[server] and begin_s < found[server][-1][1]
        found[server].append((found[server].pop()[0] if is_longer else begin_s, end_s))
    return found


def check(world: Outages, faults: list[Fault]) -> None:
    """Check what is promised of every replay."""
    assert world.outcome is None, world.outcome
    failing = [fault for fault in faults if fault.shows in ("crash", "hang")]
    by_server: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_server[fault.node].append(fault)
    rules, well_s, ill_s = world.rules.avoid, [0.0], []
    for server, stretches in kept_out(world).items():
        own = by_server[server]
        total_s = sum(end_s - begin_s for begin_s, end_s in stretches)
        if not own:
            well_s.append(total_s)
            continue
        # A repaired node was kept out no longer than it was broken.
        broken_s = sum(min(f.end_s, world.now_s) - f.begin_s for f in own)
        while_broken_s = sum(
            max(0.0, min(end_s, f.end_s) - max(begin_s, f.begin_s))
            for begin_s, end_s in stretches
            for f in own
        )
        assert total_s - while_broken_s <= broken_s + rules.avoid_s * len(own), server
        if any(f.end_s - f.begin_s > HOUR_S for f in own if f in failing):
            ill_s.append(total_s)
    assert max(well_s) <= min(ill_s)
    # A node that stays broken is tried a few times, and then as seldom as the rules say.
    num_named = world.kinds["crash"] + world.kinds["hang"]
    broken_s = sum(min(fault.end_s, world.now_s) - fault.begin_s for fault in failing)
    assert num_named <= 10 * len(failing) + 1.2 * broken_s / rules.avoid_s_max


@pytest.mark.parametrize("num_spare", [0, 3])
def test_a_run_lives_through_months_of_real_outages(num_spare: int) -> None:
    """Without spares a broken server is tried again and again; that must not cost a budget."""
    world, faults = replay(24, 16.0, num_spare=num_spare)

    assert len(faults) > 5
    check(world, faults)
