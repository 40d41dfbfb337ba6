"""Ask a run how it is, from its directory alone: the live controller first, else the journal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from orchestrator.config import RunConfig, load
from orchestrator.core import RunRules, RunState, describe, fold, openings, verify
from orchestrator.errors import CapacityError, RunNotFoundError
from orchestrator.policies import (
    MEMORY,
    CadenceRules,
    Holding,
    LossFacts,
    ParityHolding,
    RecoveryPlan,
    StoredVersion,
    Version,
    WorkerPlace,
    plan_recovery,
    quarantine,
)
from orchestrator.run_directory import CHECKPOINTS, CONFIG, CONTACT, SUMMARY
from orchestrator.shell import config_of, read_segments
from ucp_core.lineage import Lineage
from ucp_core.native import checkpoint_name, find_committed
from ucp_core.storage import Store, join, open_store
from workers.protocol import Held, HeldParity, Member, Source

#: A living controller answered in 1 to 20 ms.
ANSWER_S = 2.0


def read_status(url: str) -> dict[str, Any]:
    """Return the status of the run in ``url``, with ``controller`` "alive", "down" or "over".

    While the controller is down the document is folded from the journal: what was true last. A
    run that is over has no workers, nodes or capacity any more. Process ids that are not known are
    null.
    """
    store, path = open_store(url)
    contact = _contact(store, path, url)
    over = store.exists(join(path, SUMMARY))
    answer = None if over else _ask(contact, "status")
    if answer is not None:
        return {**answer, "controller": "alive"}
    state, _ = fold(read_segments(store, path), _rules(store, path))
    described = describe(state)
    workers = [] if over else [*described["members"], *described["standbys"]]
    nodes = [] if over else described["nodes"]
    return {
        "phase": described["phase"],
        "attempt": described["attempt"],
        "step": described["step"],
        "loss": _last_loss(store, join(path, "metrics/rank0.jsonl")),
        "layout": described["layout"],
        "workers": [{"rank": -1, "last_heartbeat_s": None, **worker} for worker in workers],
        "nodes": [{"raylet_pid": None, "keeper_pid": None, **node} for node in nodes],
        "pending_capacity": 0 if over else len(described["pending_slots"]),
        "redundancy": _stored_redundancy(store, path, state),
        "cadence": _configured_cadence(store, path),
        "bounds_s": {},
        "loaded": {},
        "passed_over": [],
        "cause": described["cause"],
        "reason": described["reason"],
        "controller": "over" if over else "down",
    }


def plan_losses(url: str, lose: Sequence[str]) -> RecoveryPlan:
    """Return what the run in ``url`` would do now if nodes or workers were lost.

    Args:
        url: Its run directory.
        lose: See ``policies.whatif.plan_recovery``.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: Its controller does not answer, and only it knows what keepers hold.
        ConfigError: Something in ``lose`` is not in the run.
    """
    store, path = open_store(url)
    contact = _contact(store, path, url)
    if store.exists(join(path, SUMMARY)):
        raise RunNotFoundError(
            f"the run in {url} is over: there is nothing to recover; see `everstep report`", url=url
        )
    document = _losses(contact)
    lineage = [(attempt, step) for attempt, step in document["lineage"]]
    # Before memory: what is stored meanwhile is in memory, too, and nearer.
    stored = _stored(store, path, lineage, [tuple(source) for source in document["bad"]])
    document = _losses(contact)
    rules = _rules(store, path)
    facts = LossFacts(
        step=document["step"],
        num_members=document["num_members"],
        slots=document["slots"],
        leaving=frozenset(document["leaving"]),
        workers=tuple(WorkerPlace(**worker) for worker in document["workers"]),
        held=tuple(_version(version) for version in document["versions"]),
        stored=stored,
        min_workers=rules.min_workers,
        max_workers=rules.max_workers,
        layout=rules.layout,
    )
    return plan_recovery(facts, lose)


def _losses(contact: dict[str, Any]) -> dict[str, Any]:
    """Return what a run would have left; raise ``CapacityError`` if its controller is silent."""
    document = _ask(contact, "losses")
    if document is None:
        raise CapacityError(
            f"the controller does not answer at {contact['url']}, and what is in memory is known "
            "to nobody else. While the cluster lives it is back within seconds: ask again. If the "
            "cluster is gone, so is that memory: run the configuration again, and the run goes on "
            "from storage",
            address=contact["url"],
        )
    return document


def _version(document: dict[str, Any]) -> Version:
    """Return a version in memory as the status page tells it."""
    return Version(
        step=document["step"],
        attempt=document["attempt"],
        source=MEMORY,
        parts=tuple(
            Holding(
                node=part["node"],
                host="",
                port=0,
                arena=part["arena"],
                held=_held(document, rank=part["rank"], data_bytes=part["bytes"]),
            )
            for part in document["parts"]
        ),
        parities=tuple(
            ParityHolding(node=one["node"], host="", port=0, parity=_parity(document, one))
            for one in document["parities"]
        ),
    )


def _parity(document: dict[str, Any], one: dict[str, Any]) -> HeldParity:
    return HeldParity(
        arena=one["arena"],
        held=_held(document, rank=-1 - one["place"], data_bytes=0),
        num_parities=one["num_parities"],
        place=one["place"],
        members=tuple(each and Member(**each) for each in one["members"]),
    )


def _held(document: dict[str, Any], *, rank: int, data_bytes: int) -> Held:
    return Held(
        slot=0,
        sequence=0,
        attempt=document["attempt"],
        step=document["step"],
        rank=rank,
        world_size=document["world_size"],
        data_bytes=data_bytes,
        record_bytes=0,
    )


def _stored(store: Store, path: str, lineage: Lineage, bad: Sequence[Source]) -> StoredVersion:
    excluded = frozenset(map(checkpoint_name, quarantine.in_storage(bad)))
    found = find_committed(store, join(path, CHECKPOINTS), lineage=lineage, exclude=excluded)
    if found is None:
        return StoredVersion()
    files = found.checkpoint.manifest.files
    sizes = tuple(files[name].num_bytes for name in sorted(files))
    return StoredVersion(step=found.step, attempt=found.attempt, part_bytes=sizes)


def _stored_redundancy(store: Store, path: str, state: RunState) -> dict[str, Any]:
    """Return what is known of redundancy while nobody can say what is in memory."""
    step = _stored(store, path, state.lineage, state.bad).step
    return {
        "kind": "storage" if step else "none",
        "step": 0,
        "stored_step": step,
        "node_losses_survived": 0,
        "reduced_s": None,
        "mechanism": "",
        "reason": "the controller is not there to say what is in memory",
        "problems": quarantine.described(state.bad),
    }


def _ask(contact: dict[str, Any], page: str) -> dict[str, Any] | None:
    """Return a document of the controller's page; None if it does not answer."""
    try:
        with urllib.request.urlopen(f"{contact['url']}/{page}", timeout=ANSWER_S) as answer:  # noqa: S310  http
            return dict(json.load(answer))
    except (urllib.error.URLError, TimeoutError, OSError):
        return None


def replay_run(url: str) -> dict[str, Any]:
    """Fold the journal of ``url`` again; raise ``JournalCorruptError`` where the actions differ.

    Each time that the run was opened its settings may have been others: those of then count.
    """
    store, path = open_store(url)
    segments = read_segments(store, path)
    if not segments:
        raise RunNotFoundError(
            f"{url} holds no run: it has no journal/ to replay; "
            "name the folder that `everstep run` printed as its run directory",
            url=url,
        )
    ends = [*openings(segments)[1:], len(segments)]
    state, last = RunState(), None
    for begin, end in zip(openings(segments), ends, strict=True):
        state, last = verify(segments[begin:end], config_of(store, path, segments[:end]).rules())
    num_records = last["seq"] + 1 if last else 0
    return {"records": num_records, "same_decisions": True, "phase": str(state.phase)}


def _configured_cadence(store: Store, path: str) -> dict[str, Any]:
    """Return the intervals that attempts begin with, while nobody says which are kept."""
    config = _config(store, path)
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
        "reason": "what attempts begin with",
    }


def _rules(store: Store, path: str) -> RunRules:
    return _config(store, path).rules()


def _config(store: Store, path: str) -> RunConfig:
    return load(store.read(join(path, CONFIG)).decode())


def contact(url: str) -> dict[str, Any]:
    """Return how to reach the controller of the run in ``url``, which goes on.

    Raises:
        RunNotFoundError: There is no run, or it is over.
    """
    store, path = open_store(url)
    found = _contact(store, path, url)
    if store.exists(join(path, SUMMARY)):
        raise RunNotFoundError(
            f"the run in {url} is over: there is nothing to stop; see `everstep report`", url=url
        )
    return found


def _contact(store: Store, path: str, url: str) -> dict[str, Any]:
    if not store.exists(join(path, CONTACT)):
        raise RunNotFoundError(
            f"{url} holds no run: {CONTACT} is not there; name the folder that `everstep run` "
            "printed as its run directory, or ask again if that is still starting",
            url=url,
        )
    document: dict[str, Any] = json.loads(store.read(join(path, CONTACT)))
    return document


def _last_loss(store: Store, path: str) -> float | None:
    """Return the loss of the last step; None also where that was no number."""
    if not store.exists(path):
        return None
    lines = store.read(path).splitlines()
    for line in reversed(lines):
        try:
            loss = json.loads(line)["loss"]
            return None if loss is None else float(loss)
        except (ValueError, KeyError):
            continue  # the last line may be half written
    return None
