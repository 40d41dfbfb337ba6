"""Streams find idle paths, leave what others fill, and keep what is only slow."""

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from orchestrator.traffic import fill
from workers.keeper.peers.paths import LOOK_S, Action, Paths

FULL, EMPTY_S, QUEUE_S = 25e6, 100e-6, 20e-3


class Network:
    """Equal-cost paths of which each stream gets one by chance, and a training on the first.

    Rates are max-min fair. A handshake waits in the queue of a path that is full.
    """

    def __init__(self, num_paths: int, trains: Callable[[float], bool], *, seed: int) -> None:
        self.speeds = [FULL] * num_paths
        self.paths = Paths(4)
        self.training_rates: list[float] = []
        self.rates: list[float] = []
        self.streams: dict[int, int] = {0: 0}
        self._trains = trains
        self._draw = random.Random(seed)
        self._received: dict[int, float] = defaultdict(float)
        self._now_s = 0.0
        self._made = 0

    def run(self, seconds: float) -> None:
        """Send for so long."""
        self.rates.clear()
        self.training_rates.clear()
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self._send()
            action, key = self.paths.observe(
                self._now_s, {each: int(self._received[each]) for each in self.streams}
            )
            if action is Action.LEAVE:
                del self.streams[key]
            elif action in (Action.LOOK, Action.MOVE):
                self._look(key if action is Action.MOVE else None)

    def _send(self) -> None:
        self._now_s += LOOK_S
        trains = self._trains(self._now_s)
        used = [[path] for path in self.streams.values()] + [[0]] * trains
        rates = fill(used, dict(enumerate(self.speeds)))
        for key, rate in zip(self.streams, rates, strict=False):
            self._received[key] += rate * LOOK_S
        self.rates.append(sum(rates[: len(self.streams)]))
        if trains:
            self.training_rates.append(rates[-1])

    def _look(self, instead_of: int | None) -> None:
        ports = [self._draw.randrange(len(self.speeds)) for _ in range(8)]
        filled = {*self.streams.values(), *([0] if self._trains(self._now_s) else [])}
        found = sorted((QUEUE_S if each in filled else EMPTY_S, each) for each in ports)
        if self.paths.is_idle(self._now_s, [took_s for took_s, _ in found]):
            if instead_of is not None:
                del self.streams[instead_of]
            self._made += 1
            self.streams[self._made] = found[0][1]
            self.paths.note_added(self._now_s, self._made)


@pytest.mark.parametrize("seed", range(10))
def test_streams_spread_over_all_paths(seed: int) -> None:
    """One path each, however the ports are hashed."""
    network = Network(3, lambda _: False, seed=seed)
    network.run(20.0)

    assert sorted(network.streams.values()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_a_path_that_training_fills_is_left_to_it(seed: int) -> None:
    """It began there before training did."""
    network = Network(2, lambda now_s: now_s > 5.0, seed=seed)
    network.run(20.0)
    network.run(20.0)

    assert list(network.streams.values()) == [1]
    assert network.rates == [pytest.approx(FULL)] * 200
    assert network.training_rates == [FULL] * 200


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("period_s", "share"), [(0.8, 0.6), (3.0, 0.5), (10.0, 0.3), (30.0, 0.5)])
def test_bursts_of_training_are_hardly_disturbed(seed: int, period_s: float, share: float) -> None:
    """A path that is idle now is filled soon; each time that it was left the pause is longer."""
    network = Network(2, lambda now_s: now_s % period_s < share * period_s, seed=seed)
    network.run(120.0)

    mean = sum(network.training_rates) / len(network.training_rates)
    assert share * (FULL / mean - 1) < 0.05  # Share of the step.
    assert sum(network.rates) / len(network.rates) > 0.95 * FULL


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slowed", [0, 1])
def test_a_path_that_becomes_slow_is_used_as_it_is(seed: int, slowed: int) -> None:
    """It is looked at without a stream: it is idle, so no other traffic fills it."""
    network = Network(2, lambda _: False, seed=seed)
    network.run(20.0)
    network.speeds[slowed] = FULL / 10
    network.run(10.0)

    assert min(network.rates) > 0.9 * FULL
    assert min(network.rates[50:]) > 0.9 * 1.1 * FULL
    assert network.rates[-1] == pytest.approx(1.1 * FULL)


def test_the_only_stream_moves_to_a_path_that_is_idle() -> None:
    """A spine is gone: what others get there does not help."""
    network = Network(2, lambda _: False, seed=0)
    network.run(0.8)
    network.speeds[0] = 0.0
    network.run(3.0)

    assert network.rates[-1] == FULL


def test_where_there_is_one_path_there_is_one_stream() -> None:
    """Several would take from training what one does not."""
    network = Network(1, lambda _: True, seed=0)
    network.run(60.0)

    assert len(network.streams) == 1
    assert set(network.training_rates) == {FULL / 2}


def test_no_stream_is_added_where_no_handshake_waits() -> None:
    """Processors are the limit, or memory: several connections would only cost more of them."""
    assert not any(Paths(4).is_idle(each * 0.5, [EMPTY_S] * 8) for each in range(10))


def test_a_stream_that_makes_nothing_faster_ends() -> None:
    """Handshakes met a queue for another reason."""
    paths = Paths(4)
    total, now_s, streams = 0, 0.0, {0: 0}
    most = 0
    for _ in range(300):
        now_s += LOOK_S
        total += 1_000_000
        streams = {key: each + 1_000_000 // len(streams) for key, each in streams.items()}
        action, key = paths.observe(now_s, streams)
        if action is Action.LOOK and paths.is_idle(now_s, [EMPTY_S, QUEUE_S]):
            streams[most := most + 1] = 0
            paths.note_added(now_s, most)
        elif action is Action.LEAVE:
            del streams[key]

    assert len(streams) == 1
    assert most <= 7
