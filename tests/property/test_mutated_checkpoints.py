"""A few mutated checkpoints of every format; ``tests/chaos`` tries 500 of each."""

from __future__ import annotations

from tests.support.mutation_campaign import FORMATS, assert_sound, campaign

NUM_MUTATIONS = 6


def test_no_mutation_runs_code_touches_other_files_or_gives_wrong_tensors() -> None:
    """Somebody else's folder is input, and a damaged one must not pass for a sound one."""
    found = campaign([(name, number) for name in FORMATS for number in range(NUM_MUTATIONS)])

    assert_sound(found)
    assert {outcome.result for _, outcome in found} >= {"refused", "equal"}
