"""The status of a run: from its controller, otherwise from its journal."""

from collections import Counter
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.core import RunState, describe, starts, verify
from orchestrator.driver.run import Run
from orchestrator.errors import RunNotFoundError
from orchestrator.policies import CadenceRules, bad_sources
from orchestrator.report import Seen, tell
from orchestrator.shell import config_of, read_segments

#: Keys that are empty for a run that is over.
_GONE = ("members", "standbys", "nodes", "capacity", "pending_reservations")
_NO_PIDS = {"raylet_pid": None, "keeper_pid": None}


def read_status(url: str) -> dict[str, Any]:
    """Return the status of the run in ``url``, with ``controller`` "alive", "down" or "over".

    ``best`` has the best step in storage by ``checkpoint.best``, and its value; null without one.
    While the controller is down, the journal gives the last known state. A run that is over has no
    workers, nodes or pending capacity. Unknown process ids are null.
    """
    run = Run(url)
    run.contact()
    summary = run.summary()
    over = summary is not None
    answer = None if over else run.ask("status")
    config = run.settings()
    if answer is not None:
        best = run.best() if config.checkpoint.best.value else None
        return {**answer, "best": best, "controller": "alive"}
    folded = run.folded()
    state, described = folded.state, describe(folded.state)
    if over:
        described |= {**dict.fromkeys(_GONE, ()), "processes": {}}
    step, loss = run.last_step()
    return tell(
        described,
        folded.stats,
        config,
        seen=Seen(
            nodes=[{**_NO_PIDS, **row} for row in described["nodes"]],
            node_states=Counter(row["state"] for row in described["nodes"]),
        ),
        phase="stopped" if (summary or {}).get("outcome") == "stopped" else described["phase"],
        step=step or described["step"],
        loss=loss,
        best=run.best(state.lineage),
        redundancy=_stored_redundancy(run, state),
        cadence=_first_cadence(config),
        bounds_s={},
        loaded={},
        passed_over=[],
        logging={},
        controller="over" if over else "down",
    ).status


def replay_run(url: str) -> dict[str, Any]:
    """Replay the journal of ``url``; raise ``JournalCorruptError`` if the actions differ.

    Each resume of the run may have its own settings; its part of the journal is folded with these.
    """
    run = Run(url)
    segments = read_segments(run.store, run.path)
    if not segments:
        raise RunNotFoundError(
            f"{url} holds no run: it has no journal/ to replay; "
            "name the folder that `everstep run` printed as its run directory",
            url=url,
        )
    ends = [*starts(segments)[1:], len(segments)]
    state, last = RunState(), None
    for begin, end in zip(starts(segments), ends, strict=True):
        rules = config_of(run.store, run.path, segments[:end]).rules()
        state, last = verify(segments[begin:end], rules)
    num_records = last["seq"] + 1 if last else 0
    return {"records": num_records, "same_decisions": True, "phase": str(state.phase)}


def _stored_redundancy(run: Run, state: RunState) -> dict[str, Any]:
    """Return what is known about redundancy without the controller, which alone knows memory."""
    step = run.stored(state.lineage, state.bad).step
    return {
        "kind": "storage" if step else "none",
        "step": 0,
        "stored_step": step,
        "node_losses_survived": 0,
        "reduced_s": None,
        "mechanism": "",
        "reason": "only a controller knows what is in memory, and none answers",
        "problems": bad_sources.described(state.bad),
    }


def _first_cadence(config: RunConfig) -> dict[str, Any]:
    """Return the intervals with which attempts start; only a controller knows the current ones."""
    return {
        "snapshot_steps": config.snapshot.first_every,
        "snapshot_taken_steps": None,
        "checkpoint_steps": config.checkpoint.first_every,
        "step_s": None,
        "snapshot_stall_s": None,
        "checkpoint_stall_s": None,
        "cost_share": None,
        "cost_share_max": CadenceRules().cost_share_max,
        "problems": [],
        "reason": "what attempts start with",
    }
