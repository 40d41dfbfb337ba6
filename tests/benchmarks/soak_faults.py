"""The faults of a soak: which there are, and which one has which index of a seed. Pure."""

import random
from collections.abc import Sequence
from itertools import product
from typing import Final, NamedTuple

#: How many faults come in the same instant as another, and how many while a run recovers from one.
TOGETHER, RECOVERING = 0.12, 0.12


class Kind(NamedTuple):
    """The target of a kind of fault, and its longest duration."""

    strikes: str  #: Two faults that belong together strike different machines, or different things.
    hold_s: float  #: It ends then, or once the run ``shows`` it.
    network: bool = False  #: Whether it needs machines of namespaces.
    steady: bool = False  #: Whether it lasts although the run shows it.
    hold_s_min: float = 0.0  #: Shortest duration of a steady fault; 0 if it is ``hold_s``.
    #: A run that has dealt with it shows a later "attempt", another "keeper" on the machine,
    #: another "controller", or later "steps".
    shows: str = "attempt"

    def steady_s(self, lasts: float) -> float:
        """Return the duration of a steady fault, at ``lasts`` of its range; 0 for others."""
        shortest_s = self.hold_s_min or self.hold_s
        return shortest_s + lasts * (self.hold_s - shortest_s) if self.steady else 0.0


_PROCESSES: Final = ("worker", "keeper", "controller", "raylet", "head")
#: Processes of simulated nodes that can be signalled one by one.
_LOCAL: Final = frozenset({"worker", "keeper", "controller", "raylet"})
_OF_MACHINE: Final = frozenset({"worker", "keeper", "raylet"})
_SHOWS: Final = {"keeper": "keeper", "controller": "controller", "head": "controller"}
#: Nodes of a head that forgot them are back after a minute and more.
_HEAD_S: Final = 150.0
_BRIEF_S: Final = 4.0
KINDS: Final[dict[str, Kind]] = {
    **{
        f"{process}-{number}": Kind(
            "machine" if process in _OF_MACHINE else process,
            _HEAD_S if process == "head" else 20.0,
            network=process not in _LOCAL,
            shows=_SHOWS.get(process, "attempt"),
        )
        for process, number in product(_PROCESSES, ("kill", "stop", "term"))
    },
    # A run trains on without it.
    "head-stop": Kind("head", 20.0, network=True, steady=True, hold_s_min=_BRIEF_S),
    "raise": Kind("machine", 20.0),
    "nan": Kind("numbers", 12.0, shows="steps"),
    "memory": Kind("machine", 20.0),
    "shared-memory": Kind("machine", 15.0, network=True, steady=True, hold_s_min=_BRIEF_S),
    "node-kill": Kind("machine", 20.0),
    "drain": Kind("machine", 15.0, steady=True),
    "notice": Kind("machine", 15.0, network=True, steady=True),
    "clock": Kind("machine", 15.0, network=True, steady=True, hold_s_min=_BRIEF_S),
    "clock-head": Kind("head", 15.0, network=True, steady=True, hold_s_min=_BRIEF_S),
    "head-off": Kind("head", _HEAD_S, network=True, shows="controller"),
    "power-off": Kind("machine", 45.0, network=True),
    "partition": Kind("machine", 45.0, network=True),
    "deaf": Kind("machine", 45.0, network=True),
    "mute": Kind("machine", 45.0, network=True),
    "pair": Kind("machine", 45.0, network=True),
    "flapping": Kind("machine", 1.0, network=True),
    "slow-link": Kind("machine", 20.0, network=True, steady=True, hold_s_min=_BRIEF_S),
    "storage-slow": Kind("storage", 20.0, steady=True, hold_s_min=_BRIEF_S),
    "storage-silent": Kind("storage", 15.0, steady=True, hold_s_min=_BRIEF_S),
    "storage-away": Kind("storage", 20.0, steady=True, hold_s_min=_BRIEF_S),
    "storage-full": Kind("storage", 20.0, steady=True, hold_s_min=_BRIEF_S),
    "storage-busy": Kind("storage", 20.0, steady=True, hold_s_min=_BRIEF_S),
}


class Order(NamedTuple):
    """One fault of a soak, or two that belong together."""

    number: int  #: Counts the faults of a seed, from 0.
    kinds: tuple[str, ...]  #: One or two.
    when: str  #: "alone", "together" or "recovering".
    places: int  #: Draws the machines.
    lasts: float  #: Place of its duration between the shortest and the longest, from 0 to 1.


def draw(seed: int, index: int, kinds: Sequence[str] = tuple(KINDS)) -> Order:
    """Return the fault of an index: of so many in a row as there are kinds, one is of each."""
    turn = random.Random(f"{seed} {index // len(kinds)}").sample(kinds, len(kinds))
    kind = turn[index % len(kinds)]
    own = random.Random(f"{seed} {index}")
    chance, places = own.random(), own.randrange(1 << 30)
    # Most outages are short.
    lasts = random.Random(f"{seed} {index} lasts").random() ** 3
    others = [each for each in kinds if _can_meet(kind, each)]
    if chance >= TOGETHER + RECOVERING or not others:
        return Order(index, (kind,), "alone", places, lasts)
    when = "together" if chance < TOGETHER else "recovering"
    return Order(index, (kind, own.choice(others)), when, places, lasts)


def _can_meet(kind: str, other: str) -> bool:
    one, two = KINDS[kind].strikes, KINDS[other].strikes
    return one != two or one == "machine"
