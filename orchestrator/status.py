"""Ask a run how it is, from its directory alone: the live controller first, else the journal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from orchestrator.config import load
from orchestrator.core.journal import fold, verify
from orchestrator.core.rules import RunRules
from orchestrator.core.state import describe
from orchestrator.errors import RunNotFoundError
from orchestrator.shell.journal_file import read_segments
from ucp_core.storage import Store, join, open_store

#: Written by the controller of each life: where its status page is.
CONTROLLER_FILE = "controller.json"
#: A living controller answered in 1 to 20 ms.
ANSWER_S = 2.0


def read_status(url: str) -> dict[str, Any]:
    """Return the status of the run in ``url``, with ``controller`` "alive", "down" or "over".

    While the controller is down the document is folded from the journal: what was true last.
    """
    store, path = open_store(url)
    contact = _contact(store, path, url)
    if not store.exists(join(path, "summary.json")):
        try:
            with urllib.request.urlopen(contact["url"] + "/status", timeout=ANSWER_S) as answer:  # noqa: S310  http
                return {**json.load(answer), "controller": "alive"}
        except (urllib.error.URLError, TimeoutError, OSError):
            pass
    over = store.exists(join(path, "summary.json"))
    state, _ = fold(read_segments(store, path), _rules(store, path))
    described = describe(state)
    workers = [] if over else [*described["members"], *described["standbys"]]
    return {
        "phase": described["phase"],
        "attempt": described["attempt"],
        "step": described["step"],
        "loss": _last_loss(store, join(path, "metrics/rank0.jsonl")),
        "layout": described["layout"],
        "workers": [{"rank": -1, "last_heartbeat_s": None, **worker} for worker in workers],
        "nodes": [{"raylet_pid": 0, **node} for node in described["nodes"]],
        "pending_capacity": 0 if over else len(described["pending_slots"]),
        "redundancy": {"kind": "checkpoint", "step": described["committed_step"]},
        "cause": described["cause"],
        "reason": described["reason"],
        "controller": "over" if over else "down",
    }


def replay_run(url: str) -> dict[str, Any]:
    """Fold the journal of ``url`` again; raise ``JournalCorruptError`` where the actions differ."""
    store, path = open_store(url)
    _contact(store, path, url)
    rules = _rules(store, path)
    state, last = verify(read_segments(store, path), rules)
    num_records = last["seq"] + 1 if last else 0
    return {"records": num_records, "same_decisions": True, "phase": str(state.phase)}


def _rules(store: Store, path: str) -> RunRules:
    return load(store.read(join(path, "config.yaml")).decode()).rules()


def contact(url: str) -> dict[str, Any]:
    """Return how to reach the controller of the run in ``url``."""
    return _contact(*open_store(url), url)


def _contact(store: Store, path: str, url: str) -> dict[str, Any]:
    if not store.exists(join(path, CONTROLLER_FILE)):
        raise RunNotFoundError(
            f"{url} holds no run: {CONTROLLER_FILE} is not there; "
            "name the folder that `everstep run` printed as its run directory",
            url=url,
        )
    document: dict[str, Any] = json.loads(store.read(join(path, CONTROLLER_FILE)))
    return document


def _last_loss(store: Store, path: str) -> float | None:
    if not store.exists(path):
        return None
    lines = store.read(path).splitlines()
    for line in reversed(lines):
        try:
            return float(json.loads(line)["loss"])
        except (ValueError, KeyError):
            continue  # the last line may be half written
    return None
