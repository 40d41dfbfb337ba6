"""A script whose stream keeps its own order, in one of the ways that people write.

Args: where to write what was read, and how: ``generator``, ``cursor``, ``buffer``, ``ranks``, or
``fine`` for one that is the same whoever reads it.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler

import everstep

NUM = 40


class Stream:
    """Numbers below ``NUM``, in the order that the second argument says."""

    def __init__(self) -> None:
        self.how = sys.argv[2]
        self.generator = torch.Generator().manual_seed(7)
        self.at = self.first = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(NUM))
        if self.how == "generator":
            order = list(RandomSampler(order, generator=self.generator))
        if self.how == "ranks":
            order = order[os.getpid() % 7 :] + order[: os.getpid() % 7]
        if self.how == "fine":
            random.shuffle(order)
        if self.how == "buffer":
            yield from self._buffered(order)
            return
        for one in order:
            self.at += 1
            number = self.at % 11 if self.how == "cursor" else one
            yield {"number": number, "x": torch.full((2,), number / NUM)}

    def _buffered(self, order: list[int]) -> Iterator[dict[str, Any]]:
        held: list[int] = []
        self.at, self.first = self.first, 0
        while self.at < NUM:
            held.append(order[self.at])
            self.at += 1
            if len(held) > 6:
                number = held.pop(0)
                yield {"number": number, "x": torch.full((2,), number / NUM)}
        for number in held:
            yield {"number": number, "x": torch.full((2,), number / NUM)}


class Buffered(Stream):
    """Its state lacks what is in the buffer."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


def train(session: everstep.Session) -> None:
    """Write the numbers of each step; rank 2 waits at step 6 until a file is there.

    Step 5 has a snapshot: it waits until the one before is copied.
    """
    model = session.model(lambda: torch.nn.Linear(2, 1))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.01))
    seen = Path(sys.argv[1])
    for step in session.steps(DATA):
        while (step.number, session.rank) == (6, 2) and not (seen / "go on").exists():
            time.sleep(0.02)
        for number, batch in enumerate(step.micro_batches()):
            ids = batch["number"].tolist()
            (seen / f"{step.number}-{session.rank}-{number}").write_text(str(ids))
            step.backward(model(batch["x"]).square().mean(), len(ids))
        writer = session._boundary._writer
        assert writer is not None
        while step.number == 5 and (not writer.is_ready or writer.is_behind()):
            time.sleep(0.02)
        step.apply()


if __name__ == "__main__":
    # One object for all attempts of a process, as scripts have it.
    DATA = everstep.DataLoader((Buffered if sys.argv[2] == "buffer" else Stream)())
    everstep.run(train)
