"""Real workers: gradients that are reduced after every pass take no more memory than one pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.attempts import finish
from tests.support.trainers import Run
from workers.settings import RunSettings, Settings, TrainSettings

#: 12 layers of 2,048 x 2,048: 192 MiB of gradients, of which a rank of two has half.
SCRIPT = """\
import ctypes
import resource
from pathlib import Path

import everstep
import torch
from torch import nn

# glibc keeps what is freed of sizes that it has seen before, unless a threshold is set.
ctypes.CDLL(None).mallopt(-3, 1 << 20)
INPUTS = torch.linspace(-1, 1, 4 * 2048).reshape(4, 2048)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))

    def forward(self, inputs):
        return self.layers(inputs)


def train(session):
    model = session.model(Layers, lambda name, size: torch.full(size, 1 / 2048))
    session.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.01, foreach=False))

    def loss_of(samples):
        # A save at the end of the run is no part of it.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Path(__file__).with_name(f"peak{session.rank}").write_text(str(peak))
        return model(INPUTS[samples % 4]).square().mean()

    for _ in session.steps(64):
        session.train_step(loss_of)


everstep.run(train)
"""
WHOLE_KIB = 192 << 10


def peak_kib(tmp_path: Path, name: str, *, passes: int, **train: Any) -> int:
    """Return the most memory of a process of two, with so many micro-batches each."""
    directory = tmp_path / name
    (directory / "run").mkdir(parents=True)
    script = directory / "train.py"
    script.write_text(SCRIPT)
    chosen = Settings(
        run=RunSettings(directory="run", script=str(script)),
        train=TrainSettings(steps=2, global_batch=2 * passes, micro_batch=1, **train),
    )
    # New processes: a peak is that of a life.
    with Run(directory / "run") as run:
        finish(run, chosen, num_workers=2)
    return max(int(file.read_text()) for file in directory.glob("peak*"))


@pytest.mark.chaos
@pytest.mark.parametrize("passes", [4])
def test_whole_gradients_are_kept_only_where_they_are_reduced_once(
    tmp_path: Path, passes: int
) -> None:
    """FSDP2 adds up whole gradients between two reductions: other ranks' half as well."""
    one = peak_kib(tmp_path, "one", passes=1, reduce_gradients="once")
    once = peak_kib(tmp_path, "once", passes=passes, reduce_gradients="once")
    often = peak_kib(tmp_path, "often", passes=passes, reduce_gradients="every_pass")

    assert once - often > 0.25 * WHOLE_KIB, (one, once, often)
    assert often - one < 0.25 * WHOLE_KIB, (one, once, often)
