"""How many buckets of a snapshot may have left where in a step. Pure.

Where a device waits, for another stage of a pipeline as a rule, a copy puts nothing off. Stages
wait at different times: under 1F1B the last ones at the begin of a step, the first ones between
their first forward passes and the first backward one. So each takes its own waits, found in the
step before, and the copies of the stages are staggered though none knows of another, whatever the
schedule. What does not fit is spread over the passes of the first half of a step.

Source: the bubbles that REFT's stages copy in (arXiv 2310.12670), found by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

__all__ = ["SPREAD", "bucket_releases"]

#: Of the marks of a step: most of the forward passes, if it has one micro-batch. The sooner a
#: snapshot is whole, the less is lost.
SPREAD: Final = 0.5


def bucket_releases(num_buckets: int, gaps_s: Sequence[float], bucket_s: float) -> list[int]:
    """Return how many buckets may have left behind each mark of a step.

    Args:
        num_buckets: Of the snapshot.
        gaps_s: How long the device had nothing to do behind each mark; the first is where a
            snapshot begins.
        bucket_s: How long it takes for a bucket to leave.
    """
    fits = [int(gap_s / bucket_s) for gap_s in gaps_s]
    num_in_gaps = min(num_buckets, sum(fits))
    num_beside = num_buckets - num_in_gaps
    spread = len(gaps_s) * SPREAD
    found = []
    for index, fit in enumerate(accumulate(fits)):
        part = min(1.0, index / spread) if spread else 1.0
        found.append(min(num_in_gaps, fit) + math.ceil(num_beside * part))
    return found
