"""Ask a run what it would do if it lost machines now (``everstep plan``)."""

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from orchestrator.driver.run import Run
from orchestrator.errors import CapacityError
from orchestrator.policies import LossFacts, RecoveryPlan, plan_recovery

_FACTS = TypeAdapter(LossFacts)


def plan_losses(url: str, lose: Sequence[str]) -> RecoveryPlan:
    """Return what the run in ``url`` would do if it lost ``lose`` now (``plan_recovery``).

    Raises:
        RunNotFoundError: There is no run, or it is over.
        CapacityError: Its controller does not answer, and only it knows what keepers hold.
        ConfigError: Something in ``lose`` is not in the run.
    """
    return plan_recovery(_facts(url), lose)


def plan_each_node(url: str) -> list[RecoveryPlan]:
    """Return what the run would do if it lost one of its nodes, for each node.

    It raises the same errors as ``plan_losses``.
    """
    facts = _facts(url)
    return [plan_recovery(facts, [node]) for node in facts.reservations]


def _facts(url: str) -> LossFacts:
    run = Run(url)
    run.live_contact()
    document = _losses(run)
    lineage = [(attempt, step) for attempt, step in document["lineage"]]
    # Read storage first: a version that is stored in the meantime is in memory, too, and closer.
    stored = run.stored(lineage, [tuple(source) for source in document["bad"]])
    document = _losses(run)
    rules = run.settings().rules()
    return _FACTS.validate_python(
        {
            **document,
            "stored": stored,
            "min_workers": rules.min_workers,
            "max_workers": rules.max_workers,
            "layout": rules.layout,
        }
    )


def _losses(run: Run) -> dict[str, Any]:
    """Return what keepers hold; raise ``CapacityError`` if the controller does not answer."""
    document = run.ask("losses")
    if document is None:
        address = run.contact()["url"]
        raise CapacityError(
            f"the controller does not answer at {address}, and only it knows what is in "
            "memory. If the cluster lives, it is back within seconds: ask again. If the "
            "cluster is gone, so is that memory: run the configuration again, and it resumes "
            "from storage",
            address=address,
        )
    return document
