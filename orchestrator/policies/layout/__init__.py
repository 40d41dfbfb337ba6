"""Which layout the healthy workers take. Pure."""

from orchestrator.policies import layout
from orchestrator.policies.layout.choice import LayoutRules, choose, usable

__all__ = [
    "LayoutRules",
    "choose",
    "layout",
    "usable",
]
