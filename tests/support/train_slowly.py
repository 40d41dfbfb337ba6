"""The built-in training with a pause behind each step: a run that only has to be there.

Its argument is the length of the pause with four workers, in seconds; fewer have more to do. The
processors are left to processes that the test starts.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from everstep import Session, run
from workers.train.lm import train_language_model

_WORKERS = 4


def train(session: Session) -> None:
    """Train as without a script, slowly."""
    steps = session.steps

    def slowly(*arguments: Any, **how: Any) -> Iterator[Any]:
        for step in steps(*arguments, **how):
            yield step
            time.sleep(float(sys.argv[1]) * _WORKERS / session.world_size)

    session.steps = slowly  # type: ignore[method-assign]
    train_language_model(session)


if __name__ == "__main__":
    run(train)
