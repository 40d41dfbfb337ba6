"""Check a cluster before a run: ``asking`` asks each node, ``findings`` judges the answers."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.driver.doctor.asking import examine
    from orchestrator.driver.doctor.findings import (
        Finding,
        Level,
        NodeFacts,
        NodeKind,
        advice_lines,
        diagnose,
        interface_problem,
        report,
        unserved,
    )


__getattr__ = lazy_door(__name__)
