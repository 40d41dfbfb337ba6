"""Shared by all benchmarks: arithmetic, and the origin of a figure."""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


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


def paired(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of ``over / under``, pair by pair.

    The two of a pair were measured one after the other, so other load falls on both.
    """
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "quartile_low": round(percentile(ratios, 0.25), 3),
        "quartile_high": round(percentile(ratios, 0.75), 3),
        "pairs": len(ratios),
    }


def processor_s(pid: int) -> float:
    """Return the processor time that a process of this machine has used, to the nanosecond."""
    # As clock_getcpuclockid(3) makes it, which Python does not have.
    return time.clock_gettime((~pid << 3) | 2)


def load_average() -> list[float]:
    """Return how many processes wanted to run: over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def commit() -> str:
    """Return the commit of this checkout, with "+" if files differ from it; or "unknown"."""
    folder = Path(__file__).parent
    answers = [
        subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S607
        for words in (["rev-parse", "--short=9", "HEAD"], ["status", "--porcelain", "-uno"])
    ]
    if any(answer.returncode for answer in answers):
        return "unknown"
    return answers[0].stdout.strip() + ("+" if answers[1].stdout.strip() else "")


def origin(command: str) -> str:
    """Return the line that belongs under every figure: commit, date, machine, command."""
    date = datetime.now(UTC).date().isoformat()
    return f"commit {commit()}, {date}, {os.cpu_count()} processors: {command}"
