"""Which node protects whose snapshots, and how. Pure."""

from workers.placement.groups import Groups, form_groups, parity_places, shared_domains
from workers.placement.plan import (
    PARITIES,
    Mechanism,
    Node,
    PlacementRules,
    Preference,
    place,
    sized,
)

__all__ = [
    "PARITIES",
    "Groups",
    "Mechanism",
    "Node",
    "PlacementRules",
    "Preference",
    "form_groups",
    "parity_places",
    "place",
    "shared_domains",
    "sized",
]
