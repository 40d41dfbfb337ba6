"""Check whether machines answer the controller, and which ones keepers reach from each other."""

import asyncio
import itertools
from collections.abc import Mapping

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.shell.capacity.actors import answer
from orchestrator.shell.capacity.node_view import NodeView
from orchestrator.shell.inbox import Inbox
from workers.keeper import silent

#: A raylet's port answers or refuses in microseconds, also across a data center.
PROBE_S = 0.5
#: How long to wait for a keeper's probes: a probe between two nodes ends after 1.2 s, and a busy
#: keeper takes a while to answer. It is below ``Bounds.probe_s``.
PROBED_S = 2.5
#: How many other machines to ask, to find out whether this one is cut off.
NUM_ASKED = 32


async def accepts(address: tuple[str, int]) -> bool | None:
    """Return whether something listens at ``address``; None if its machine does not answer."""
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return False
    except (TimeoutError, OSError):
        return None
    writer.close()
    return True


async def is_silent(view: NodeView, views: Mapping[str, NodeView], own_host: str) -> bool:
    """Return whether a machine is silent and this one is not cut off."""
    names = list(views)
    at = names.index(view.node) if view.node in names else 0
    others = [views[name] for name in (*names[at + 1 :], *names[:at])]
    asked = {
        other.node: other.raylet_address
        for other in others
        if not other.lost.is_set() and other.raylet_address[0] != own_host
    }
    asked = dict(itertools.islice(asked.items(), NUM_ASKED))
    found = await silent({**asked, view.node: view.raylet_address})
    return view.node in found and (not asked or not found >= asked.keys())


async def probe_links(order: act.ProbeLinks, views: Mapping[str, NodeView], inbox: Inbox) -> None:
    """Have keepers find which nodes reach each other; post their answers."""
    there = {
        view.node: (view.host, view.port) if view.port else view.raylet_address
        for view in views.values()
        if not view.lost.is_set()
    }
    # One mapping of targets for all: a keeper may try to reach itself.
    everybody = {node: there[node] for node in order.nodes if node in there}
    wanted = dict.fromkeys(everybody, everybody)
    for source, target in (way for pair in order.pairs for way in (pair, pair[::-1])):
        if source in there and target in there:
            wanted[source] = {**wanted.get(source, {}), target: there[target]}
    asked = [node for node in wanted if views[node].keeper is not None]
    probes = (views[node].keeper.probe.remote(wanted[node]) for node in asked)
    answers = await asyncio.gather(*(answer(probe, PROBED_S) for probe in probes))
    said = dict(zip(asked, answers, strict=True))
    inbox.post(
        ev.LinksProbed(
            at_s=inbox.at_s(),
            number=order.number,
            pairs=order.pairs,
            heard=tuple(node for node, lost in said.items() if lost is not None),
            lost=tuple((node, to) for node, lost in said.items() for to in sorted(lost or ())),
        )
    )
