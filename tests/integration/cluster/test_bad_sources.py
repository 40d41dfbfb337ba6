"""A real run whose newest snapshot is damaged in every memory: no worker fails, it goes on."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from orchestrator.config import RunConfig
from orchestrator.driver.faults import member, wait_for
from orchestrator.driver.launch import Launched
from orchestrator.policies import Version
from orchestrator.shell import RunNames, run_id
from tests.support.history import read_history
from tests.support.reach import PACED
from tests.support.snapshots import eventually
from workers.memory import Arena, descriptor_socket, open_arena

pytestmark = pytest.mark.timeout(900)

ACT_S_MAX = 240.0


def _places(config: RunConfig) -> list[tuple[int, str, str]]:
    """Return ``(rank, node, arena)`` of all that is held of complete versions; parities are -1."""
    contact = json.loads((Path(config.run.directory) / "controller.json").read_text())
    with urllib.request.urlopen(f"{contact['url']}/losses", timeout=10) as answer:  # noqa: S310
        document = json.load(answer)
    found: dict[tuple[int, str, str], None] = {}
    for version in TypeAdapter(tuple[Version, ...]).validate_python(document["held"]):
        for part in version.parts:
            found[part.held.rank, part.node, part.arena] = None
        for parity in version.parities:
            found[-1, parity.node, parity.arena] = None
    return list(found)


def _damage(arenas: dict[tuple[int, str, str], Arena]) -> tuple[int, int]:
    """Damage the newest complete version everywhere; return its step, and a rank without a newer.

    The trainers stand still, so what is held changes no more once it is copied.
    """
    own = {rank: arena for (rank, _, name), arena in arenas.items() if "/" not in name}
    assert len(own) == 4
    assert eventually(lambda: all(arena.is_copied() for arena in own.values()))
    newest = {rank: arena.versions()[-1].step for rank, arena in own.items()}
    step = min(newest.values())
    for arena in arenas.values():
        for held in arena.versions():
            if held.step == step:
                arena.body(held.buffer)[held.data_bytes // 2] ^= 1
    return step, min(newest, key=newest.__getitem__)


@pytest.mark.chaos
def test_a_version_that_is_damaged_everywhere_gives_way_to_the_one_before(
    begin_endless: Callable[..., Launched],
) -> None:
    """The attempt that finds it blames no worker, and storage is not needed."""
    run = begin_endless(workers__standby_per_node=0, **PACED)
    config = run.config
    status = wait_for(
        run,
        lambda s: s["step"] >= 5 and s["redundancy"]["node_losses_survived"] == 1,
        timeout_s=ACT_S_MAX,
    )
    assert status is not None, "the run ended before it was protected"
    names = RunNames(run_id(config.run.directory))
    arenas = {
        (rank, node, arena): open_arena(
            descriptor_socket(Path(names.shared_directory(node))), arena
        )
        for rank, node, arena in _places(config)
    }
    pids = [member(status, rank)["pid"] for rank in range(4)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    step, victim = _damage(arenas)
    os.kill(pids[victim], signal.SIGKILL)
    for rank, pid in enumerate(pids):
        if rank != victim:
            os.kill(pid, signal.SIGCONT)
    for arena in arenas.values():
        arena.close()
    assert wait_for(
        run,
        lambda s: s["phase"] == "training" and s["attempt"] >= 3 and s["step"] > step,
        timeout_s=ACT_S_MAX,
    )
    run.stop("all is seen")
    summary = run.follow(lambda _: None)

    assert summary["outcome"] == "stopped", summary["reason"]
    crash, unloadable = summary["incidents"][:2]
    assert (crash["kind"], unloadable["kind"]) == ("crash", "unloadable")
    assert unloadable["guilty"] == []
    assert any(f"step {step} " in line for line in unloadable["skipped"]), unloadable
    assert set(unloadable["sources"]) <= {"local memory", "peer memory", "parity"}
    history = read_history(config.run.directory)
    resumed = next(line["step"] for line in history.lines if line["attempt"] == 3)
    assert resumed <= step
    history.check_exactly_once(config, summary["steps"])
