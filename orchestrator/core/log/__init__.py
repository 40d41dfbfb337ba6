"""The journal's records: print, parse, compact, count. Pure."""

from orchestrator.core.log.compaction import Basis, Bookmark, Place, behind, decode, encode
from orchestrator.core.log.incident import PHASES, Incident, layout_text
from orchestrator.core.log.journal import Folded, fold, fold_on, openings, turn_records, verify
from orchestrator.core.log.stats import RunStats

__all__ = [
    "PHASES",
    "Basis",
    "Bookmark",
    "Folded",
    "Incident",
    "Place",
    "RunStats",
    "behind",
    "decode",
    "encode",
    "fold",
    "fold_on",
    "layout_text",
    "openings",
    "turn_records",
    "verify",
]
