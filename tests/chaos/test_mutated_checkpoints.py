"""500 mutations of a checkpoint of every format: refused, or converted to the same tensors."""

import pytest

from tests.support.mutation_campaign import FORMATS, assert_sound, campaign

NUM_MUTATIONS = 500


@pytest.mark.parametrize("name", FORMATS)
def test_no_mutation_runs_code_touches_other_files_or_gives_wrong_tensors(name: str) -> None:
    """Bits, sizes, names, links, pipes, pickles, JSON, numbers: each may be unchecked."""
    found = campaign([(name, number) for number in range(NUM_MUTATIONS)])

    assert_sound(found)
