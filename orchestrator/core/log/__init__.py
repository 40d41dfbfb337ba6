"""The journal's records: print, parse, compact, count. Pure."""

from orchestrator.core.log.compaction import Basis, Bookmark, Place, behind, decode, encode
from orchestrator.core.log.journal import Folded, fold, fold_on, openings, turn_records, verify
from orchestrator.core.log.stats import RunStats

__all__ = [
    "Basis",
    "Bookmark",
    "Folded",
    "Place",
    "RunStats",
    "behind",
    "decode",
    "encode",
    "fold",
    "fold_on",
    "openings",
    "turn_records",
    "verify",
]
