"""What a script that runs alone is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from workers.api import Session, run
from workers.errors import TaskError


def test_a_store_of_the_script_that_is_away_is_told_as_the_error_that_it_is(
    tmp_path: Path,
) -> None:
    """In several workers it would count as a lost peer; alone there is none to wait for."""

    def train(_session: Session) -> None:
        raise dist.DistNetworkError("the store of the script is away")

    with pytest.raises(TaskError, match="after step 0: DistNetworkError: the store of the script"):
        run(train, directory=str(tmp_path), steps=1)
