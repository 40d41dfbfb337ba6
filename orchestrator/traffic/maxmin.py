"""Max-min fair rates of flows that share links, roughly as TCP and switches divide them.

Progressive filling: all flows grow equally until a link is full; its flows stop, and the others
continue to grow. Source: Bertsekas and Gallager, Data Networks, 6.5.2. Pure.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import TypeVar

L = TypeVar("L", bound=Hashable)


def fill(paths: Sequence[Sequence[L]], capacities: Mapping[L, float]) -> list[float]:
    """Return the rate of the flow on each path, in the unit of ``capacities``.

    A flow through a link without capacity gets 0; a flow that no link limits gets infinity.
    """
    users: dict[L, set[int]] = {}
    for number, path in enumerate(paths):
        for link in path:
            users.setdefault(link, set()).add(number)
    left = {link: capacities[link] for link in users}
    rates = [inf] * len(paths)
    level = 0.0
    while users:
        # ``left`` is the capacity of a link that is free at ``level``: all its growing flows get
        # equal parts.
        link = min(users, key=lambda each: left[each] / len(users[each]))
        level = left[link] / len(users[link])
        if level == inf:
            break
        for number in list(users[link]):
            rates[number] = level
            for other in paths[number]:
                users[other].discard(number)
                left[other] -= level
        users = {each: numbers for each, numbers in users.items() if numbers}
    return rates
