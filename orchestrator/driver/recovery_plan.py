"""Ask a run what it would do now if machines were lost (``everstep plan``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError
from orchestrator.policies import (
    MEMORY,
    Holding,
    LossFacts,
    ParityHolding,
    RecoveryPlan,
    Version,
    WorkerPlace,
    plan_recovery,
)
from workers.protocol import Held, HeldParity, Member


def plan_losses(url: str, lose: Sequence[str]) -> RecoveryPlan:
    """Return what the run in ``url`` would do if it lost ``lose`` now; see ``plan_recovery``.

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: Its controller does not answer, and only it knows what keepers hold.
        ConfigError: Something in ``lose`` is not in the run.
    """
    return plan_recovery(_facts(url), lose)


def plan_each_node(url: str) -> list[RecoveryPlan]:
    """Return what the run would do if it lost one of its nodes, for each of them.

    Raises as ``plan_losses`` does.
    """
    facts = _facts(url)
    return [plan_recovery(facts, [node]) for node in facts.reservations]


def _facts(url: str) -> LossFacts:
    run = Run(url)
    run.live_contact()
    document = _losses(run)
    lineage = [(attempt, step) for attempt, step in document["lineage"]]
    # Storage first: what is stored meanwhile is in memory too, and nearer there.
    stored = run.stored(lineage, [tuple(source) for source in document["bad"]])
    document = _losses(run)
    rules = run.settings().rules()
    return LossFacts(
        step=document["step"],
        num_members=document["num_members"],
        reservations=document["reservations"],
        leaving=frozenset(document["leaving"]),
        workers=tuple(WorkerPlace(**worker) for worker in document["workers"]),
        held=tuple(_version(version) for version in document["versions"]),
        stored=stored,
        min_workers=rules.min_workers,
        max_workers=rules.max_workers,
        layout=rules.layout,
    )


def _losses(run: Run) -> dict[str, Any]:
    """Return what keepers hold; raise ``CapacityError`` if the controller does not answer."""
    document = run.ask("losses")
    if document is None:
        address = run.contact()["url"]
        raise CapacityError(
            f"the controller does not answer at {address}, and only it knows what is in memory. "
            "While the cluster lives it is back within seconds: ask again. If the cluster is gone, "
            "so is that memory: run the configuration again, and it resumes from storage",
            address=address,
        )
    return document


def _version(document: dict[str, Any]) -> Version:
    """Return a version in memory as the controller's page describes it."""
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
