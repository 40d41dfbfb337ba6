"""Arithmetic that all benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return count, p50, p90 and maximum of ``values``."""
    return {
        "count": len(values),
        "p50": round(percentile(values, 0.5), 4),
        "p90": round(percentile(values, 0.9), 4),
        "max": round(max(values), 4),
    }
