"""Slow links, senders and receivers: are they told apart, and how soon? How much is an order worth?

    python -m tests.benchmarks links
    python -m tests.benchmarks links --only faults --trials 30
    python -m tests.benchmarks links --only order

Four machines made of Linux namespaces (``tests.support.link_lab``) on cables of 1 Gbit/s train:
gloo all-reduces of 4 MB with pauses of 50 ms. One link, one machine's way out or its way in is
limited to 50 to 200 Mbit/s. The rules, the watch and the transfers that are timed are those of a
run; no Ray runs. A trial is right if the kind and the link or node are, and nothing else is told.

Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from orchestrator.diagnosis import Flows, Guilty, Verdict
from orchestrator.fault_kinds import FaultKind
from orchestrator.policies import order
from orchestrator.shell.capacity import LinkWatch
from orchestrator.shell.inbox import Inbox
from tests.benchmarks.common import load_average, spread
from tests.support.link_lab import LinkLab
from tests.support.network_cluster import why_not

KINDS: Final = (FaultKind.SLOW_LINK, FaultKind.SLOW_SENDER, FaultKind.SLOW_RECEIVER)
RATES: Final = ("50mbit", "100mbit", "200mbit")
MACHINES: Final = 4
#: A fault that was not told by then is missed.
PATIENCE_S: Final = 20.0
#: An order is measured over so many steps, of which the median counts.
ORDER_STEPS: Final = 40
#: So long every link is whole between two trials.
CALM_S: Final = 5.0


class _Watch:
    """The watch of a run over the lab's machines; keepers report each second."""

    def __init__(self, lab: LinkLab) -> None:
        self._lab, self._flows = lab, Flows()
        self.told: list[Verdict] = []
        self.watch = LinkWatch(
            self._flows,
            Inbox(at_s=time.monotonic, post=lambda _: None),
            suspect=self._suspect,
            views=lab.views(),
            attempt=lambda: (1, lab.nodes),
        )

    def _suspect(
        self,
        attempt: int,
        found: Sequence[Verdict],
        *,
        since_s: float,
        times: float,
        is_confirmed: bool,
    ) -> None:
        assert (attempt, since_s > 0.0, times >= 1.0) == (1, True, True), is_confirmed
        self.told += found

    def look(self) -> None:
        """Let a second pass; take reports and look."""
        began_s = time.monotonic()
        for node in self._lab.nodes:
            self._flows.observe(self._lab.report(node), time.monotonic())
        asyncio.run(self.watch.look())
        time.sleep(max(0.0, began_s + 1.0 - time.monotonic()))


def trial(lab: LinkLab, kind: FaultKind, victim: int, rate: str) -> dict[str, Any]:
    """Make something slow, wait until it is told, and undo it."""
    watch, source = _Watch(lab), lab.nodes[victim]
    # In gloo's ring a rank sends to the one before it.
    target = lab.nodes[victim - 1]
    calm_until_s = time.monotonic() + CALM_S
    while time.monotonic() < calm_until_s:
        watch.look()
    false = [one.evidence for one in watch.told]
    watch.told.clear()
    began_s = time.monotonic()
    if kind is FaultKind.SLOW_LINK:
        lab.slow_link(source, target, rate)
    elif kind is FaultKind.SLOW_SENDER:
        lab.slow_sender(source, rate)
    else:
        lab.slow_receiver(target, rate)
    while not watch.told and time.monotonic() < began_s + PATIENCE_S:
        watch.look()
    took_s = time.monotonic() - began_s
    lab.heal()
    guilty = {
        FaultKind.SLOW_LINK: Guilty(links=((victim, lab.nodes.index(target)),)),
        FaultKind.SLOW_SENDER: Guilty(ranks=(victim,), nodes=(source,)),
        FaultKind.SLOW_RECEIVER: Guilty(ranks=(lab.nodes.index(target),), nodes=(target,)),
    }
    return {
        "kind": str(kind), "rate": rate, "said": [str(one.kind) for one in watch.told],
        "false": false,
        "right": [(one.kind, one.guilty) for one in watch.told] == [(kind, guilty[kind])],
        "told_s": round(took_s, 1) if watch.told else None,
        "why": [one.evidence for one in watch.told],
    }  # fmt: skip


def faults(trials: int, seed: int) -> dict[str, Any]:
    """Play trials of all kinds in turn, at random places."""
    drawn = random.Random(seed)
    found = []
    with LinkLab(MACHINES) as lab:
        lab.train(lab.nodes)
        step_s = lab.step_s(lab.nodes)
        for number in range(trials):
            kind, victim = KINDS[number % len(KINDS)], drawn.randrange(MACHINES)
            found.append(trial(lab, kind, victim, drawn.choice(RATES)))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        by_kind[one["kind"]].append(one)
    times = [one["told_s"] for one in found if one["told_s"] is not None]
    return {
        "right": sum(one["right"] for one in found), "trials": trials,
        "by_kind": {
            kind: f"{sum(one['right'] for one in each)} of {len(each)}"
            for kind, each in by_kind.items()
        },
        "false": sum(bool(one["false"]) for one in found),
        "told_s": spread(times) if times else None, "step_s": round(step_s, 4),
        "load": load_average()[0],
    }  # fmt: skip


def orders() -> dict[str, Any]:
    """Measure an all-reduce in the order of arrival, and in the one that is chosen."""
    found: dict[str, Any] = {}
    for racks in ("ABAB", "ABABAB"):
        with LinkLab(len(racks), racks=racks, pause_s=0.02) as lab:
            rack_of = dict(zip(lab.nodes, racks, strict=True))
            chosen = order.chosen([(node, 1) for node in lab.nodes], racks=rack_of)
            found[racks] = _compared(lab, chosen)
            found[racks]["order"] = "".join(rack_of[node] for node in chosen)
    with LinkLab(MACHINES, pause_s=0.02) as lab:
        lab.train(lab.nodes)
        clean_s = lab.step_s(lab.nodes)
        lab.slow_link("m2", "m1", "100mbit")
        chosen = order.chosen([(node, 1) for node in lab.nodes], slow={("m2", "m1")})
        found["slow link"] = {
            **_compared(lab, chosen), "clean_s": round(clean_s, 4), "order": " ".join(chosen)
        }  # fmt: skip
        found["slow link"]["of_clean"] = round(found["slow link"]["after_s"] / clean_s, 2)
    return {**found, "load": load_average()[0]}


def _compared(lab: LinkLab, chosen: Sequence[str]) -> dict[str, Any]:
    lab.train(lab.nodes)
    before_s = lab.step_s(lab.nodes, ORDER_STEPS)
    lab.train(chosen)
    after_s = lab.step_s(lab.nodes, ORDER_STEPS)
    return {
        "before_s": round(before_s, 4), "after_s": round(after_s, 4),
        "gain": round(before_s / after_s, 2),
    }  # fmt: skip


def main() -> int:
    """Print what was measured; return 1 if fewer than nine in ten are told apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("faults", "order"))
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    is_good = True
    if arguments.only != "order":
        found = faults(arguments.trials, arguments.seed)
        print(json.dumps(found, indent=1))
        is_good = found["right"] >= 0.9 * found["trials"]
    if arguments.only != "faults":
        print(json.dumps(orders(), indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
