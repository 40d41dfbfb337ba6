import random

import pytest

from ucp_core.errors import StorageError
from ucp_core.storage.passing import Retries
from ucp_core.storage.service_errors import request


def test_a_pause_takes_no_random_number_of_the_script() -> None:
    """Threads store while a script draws, and it resumes to the bit."""
    before = random.getstate()

    def refuse() -> None:
        raise TimeoutError("away")

    with pytest.raises(StorageError):
        request(Retries(attempts=3, first_s=0.001), "bucket/key", refuse)

    assert random.getstate() == before
