"""Find slow links in the attempt's own traffic, have keepers time them, then suspect them.

Training continues in the meantime. Reading the reports costs nothing. Keepers send each other at
most 4 MB: all pairs of four nodes, in six rounds of at most 0.2 s.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

from orchestrator.core import events as ev
from orchestrator.diagnosis import Flows, Guilty, Verdict, links
from orchestrator.fault_kinds import FaultKind
from orchestrator.shell.capacity.actors import answer
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.inbox import Inbox

#: Period of the traffic to compare: some seconds, so that one unusual step counts little, but less
#: than the ten seconds within which a slow link must be found.
WINDOW_S: Final = 4.0
LOOK_S: Final = 1.0
#: A link is timed after it looked slow this many times in a row, and counts as healthy after as
#: many good looks.
_NUM_LOOKS: Final = 2
#: How long a keeper may take for one transfer.
_TIMED_S: Final = 1.0
#: The kernel counts in milliseconds, so a fast link may seem to take no time.
_LEAST_RATIO: Final = 0.01
#: Timed links are timed again after this, and then each time after twice as long.
_AGAIN_S: Final = 10.0
_AGAIN_S_MAX: Final = 600.0


class LinkWatch:
    """Compares the traffic between nodes.

    Args:
        inbox: Takes the links that the next order of nodes should avoid.
        suspect: ``Observer.suspect_links``, which takes the keepers' findings.
        attempt: Returns the attempt that trains and the node of each rank; () while none trains.
    """

    def __init__(
        self,
        flows: Flows,
        inbox: Inbox,
        *,
        suspect: Callable[..., None],
        views: Mapping[str, NodeView],
        attempt: Callable[[], tuple[int, Sequence[str]]],
    ) -> None:
        self._flows = flows
        self._inbox = inbox
        self._suspect = suspect
        self._views = views
        self._attempt = attempt
        self._num_slow = self._num_well = 0
        self._since_s = 0.0
        self._suspects: list[links.Pair] = []
        self._told: list[tuple[FaultKind, Guilty]] = []
        self._again_s, self._pause_s = -math.inf, _AGAIN_S

    async def watch_forever(self) -> None:
        """Check repeatedly until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Compare recent traffic; have keepers time a link that was slow for long enough."""
        at_s, (number, nodes) = self._inbox.at_s(), self._attempt()
        transfers = {
            pair: one
            for pair, one in self._flows.transfers(at_s - WINDOW_S).items()
            if set(pair) <= set(nodes)
        }
        found = links.suspects(transfers, WINDOW_S)
        if not found:
            self._num_slow = 0
            # While no data is sent, as during an evaluation, nothing is known.
            is_well = self._suspects and links.costs(transfers).keys() >= set(self._suspects)
            self._num_well = self._num_well + 1 if is_well else 0
            if self._num_well == _NUM_LOOKS:
                self._suspects = []
                self._told = []
                self._suspect(number, (), since_s=at_s, times=1.0, is_confirmed=False)
            return
        self._num_slow, self._num_well = self._num_slow + 1, 0
        if self._num_slow == 1:
            self._since_s = at_s
        if found[0] not in self._suspects:
            self._again_s, self._pause_s = -math.inf, _AGAIN_S
        if self._num_slow < _NUM_LOOKS or at_s < self._again_s:
            return
        self._suspects = found
        self._again_s, self._pause_s = at_s + self._pause_s, min(2 * self._pause_s, _AGAIN_S_MAX)
        timed = links.to_time(found, nodes)
        rates = await self._time(timed)
        ranks = {node: [r for r, other in enumerate(nodes) if other == node] for node in nodes}
        trained = {pair: one.num_bytes / WINDOW_S for pair, one in transfers.items()}
        if told := links.slow(rates, found, ranks, trained):
            # A keeper that waited for a processor may have measured a healthy link as slow: time
            # again.
            again = await self._time(timed)
            rates = {pair: max(rate, again.get(pair, 0.0)) for pair, rate in rates.items()}
            told = links.slow(rates, found, ranks, trained)
        ratio = max(_LEAST_RATIO, round(links.step_ratio(transfers, WINDOW_S), 3))
        before, self._told = self._told, [(one.kind, one.guilty) for one in told]
        self._suspect(
            number,
            told,
            since_s=self._since_s,
            times=1.0 / ratio,
            is_confirmed=before == self._told,
        )
        self._inbox.post(
            ev.LinksTimed(
                at_s=self._inbox.at_s(),
                attempt=number,
                nodes=tuple(sorted({node for pair in rates for node in pair})),
                slow=tuple(sorted(_slow(told, nodes, rates))),
                step_ratio=ratio,
            )
        )

    async def _time(self, nodes: Sequence[str]) -> dict[links.Pair, float]:
        """Return the bytes a second between all pairs of nodes that could be timed."""
        rates: dict[links.Pair, float] = {}
        for pairs in links.rounds(nodes):
            asked = [pair for pair in pairs if self._can_time(*pair)]
            calls = (
                self._views[source].keeper.rate_to.remote(self._views[target].peer)
                for source, target in asked
            )
            said = await asyncio.gather(*(answer(call, _TIMED_S) for call in calls))
            rates |= {pair: rate for pair, rate in zip(asked, said, strict=True) if rate}
        return rates

    def _can_time(self, source: str, target: str) -> bool:
        views = self._views.get(source), self._views.get(target)
        return all(
            view is not None and view.keeper is not None and view.secret and not view.lost.is_set()
            for view in views
        )


def _slow(
    told: Sequence[Verdict], nodes: Sequence[str], rates: Mapping[links.Pair, float]
) -> set[tuple[str, str, float]]:
    """Return what is slow as (sender, receiver, bytes a second); "" stands for all others."""
    found: set[tuple[str, str, float]] = set()
    for one in told:
        found |= {(nodes[a], nodes[b], rates[nodes[a], nodes[b]]) for a, b in one.guilty.links}
        for node in one.guilty.nodes:
            end = one.kind is FaultKind.SLOW_RECEIVER
            rate = median(rate for pair, rate in rates.items() if pair[end] == node)
            found.add(("", node, rate) if end else (node, "", rate))
    return found
