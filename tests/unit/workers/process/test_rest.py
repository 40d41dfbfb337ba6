"""The rest of an actor's main thread. A process of its own has it: pytest's has other alarms."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

from workers.process import Rest, hang_bell, ring
from workers.process.rest import SLICE_S

#: The main thread waits 10 ms at a time and handles signals in between, as in an actor of Ray's.
PROCESS = """
import json, signal, threading, time
from workers.process.rest import Rest

rest, passes, answers = Rest(), 0, {}

def after(num_passes):
    begun_s, until = time.monotonic(), passes + num_passes
    while passes < until:
        time.sleep(0.001)
    return time.monotonic() - begun_s

def play():
    after(2)
    for name in ("first_s", "second_s"):
        rest.begin()
        rest.begin()
        after(1)
        answers[name] = after(6)
        answers["rested"] = [rest.end(), rest.end()]
        after(3)
        answers["timer"] = signal.getitimer(signal.ITIMER_REAL)[0]

player = threading.Thread(target=play)
player.start()
while player.is_alive():
    time.sleep(0.01)
    passes += 1
print(json.dumps(answers))
"""


def test_the_main_thread_rests_from_begin_to_end() -> None:
    """However slow the machine: between two slices there is one look, or two where one waited."""
    found = subprocess.run([sys.executable, "-c", PROCESS], check=True, stdout=subprocess.PIPE)
    answers = json.loads(found.stdout)

    assert answers["first_s"] >= 3 * SLICE_S
    assert answers["second_s"] >= 3 * SLICE_S
    assert answers["timer"] == 0.0, "it goes on resting after the end"
    assert answers["rested"] == [True, False]


def test_elsewhere_than_on_the_main_thread_it_does_nothing() -> None:
    """Only the main thread may handle signals, and a test's keeper is made on another one."""
    made: list[Rest] = []
    other = threading.Thread(target=lambda: made.append(Rest()))
    other.start()
    other.join()

    made[0].begin()
    made[0].end()


def test_a_bell_is_heard_and_nobody_waits_for_one_that_is_gone() -> None:
    async def play() -> None:
        rung = asyncio.Event()
        bell = await hang_bell("127.0.0.1", rung.set)
        ring([("127.0.0.1", 9), ("no such host", bell.port), ("127.0.0.1", bell.port)])
        await asyncio.wait_for(rung.wait(), 60.0)
        bell.close()

    asyncio.run(play())


def test_without_an_address_there_is_no_bell() -> None:
    """Then nobody is rung for, and calls wait for a slice."""
    assert asyncio.run(hang_bell("203.0.113.1", lambda: None)).port == 0
