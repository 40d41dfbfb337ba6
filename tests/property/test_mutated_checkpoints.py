"""A few mutated checkpoints of every format; ``tests/chaos`` tries 500 of each."""

from tests.support.mutation_campaign import FORMATS, assert_sound, campaign
from tests.support.mutations import BOMBS

NUM_MUTATIONS = 6


def test_no_mutation_runs_code_touches_other_files_or_gives_wrong_tensors() -> None:
    """Somebody else's folder is input, and a damaged one must not pass for a sound one."""
    found = campaign([(name, number) for name in FORMATS for number in range(NUM_MUTATIONS)])

    assert_sound(found)
    assert {outcome.result for _, outcome in found} >= {"refused", "equal"}


#: Those that change what the readers keep or walk: client state, shapes, the model's own dict.
_BOMBS = (
    *(("deepspeed-zero1-small", number) for number in (-1, -7, -17, -21)),
    *(("megatron", number) for number in (-4, -5, -7, -8, -13)),
)


def test_no_small_file_fills_memory_or_takes_for_ever() -> None:
    """A pickle of a megabyte can describe gigabytes, and a client state is anything."""
    found = campaign(_BOMBS)

    assert_sound(found)
    assert {outcome.result for _, outcome in found} == {"refused"}
    bounded = {outcome.kind for _, outcome in found if "--memory" in outcome.what}
    assert bounded == set(BOMBS)
