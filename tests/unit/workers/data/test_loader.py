"""Batches in the run's order, the same for any number of workers and readers."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import DataLoader, Session, TaskError, run
from workers.data import DataOrder
from workers.errors import DataError

ORDER = DataOrder(seed=3, num_samples=37, global_batch=8)


class Noisy:
    """Samples with random numbers of all three kinds, as augmentation has them."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return {"index": index, "noise": torch.tensor(noise)}


class Fetched(Noisy):
    """Hugging Face's datasets return many samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def take(loader: DataLoader, num: int, *, ranks: list[list[int]], first_step: int = 1) -> list[Any]:
    """Return ``num`` steps, each the batches of all ranks in order."""
    streams = [
        loader.batches(ORDER, seed=5, micro_batch=2, numbers=mine, first_step=first_step)
        for mine in ranks
    ]
    steps = []
    for _ in range(num):
        batches = [next(stream) for stream, mine in zip(streams, ranks, strict=True) for _ in mine]
        steps.append([(batch["index"].tolist(), batch["noise"].tolist()) for batch in batches])
    for stream in streams:
        stream.close()
    return steps


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Noisy(), Fetched()], ids=["one by one", "at once"])
def test_ranks_and_readers_change_nothing(dataset: Noisy, num_workers: int) -> None:
    """Neither samples nor their noise; and a resumed run begins in the middle."""
    expected = take(DataLoader(Noisy()), 12, ranks=[[0, 1, 2, 3]])
    loader = DataLoader(dataset, num_workers=num_workers)

    assert take(loader, 12, ranks=[[0, 1], [2], [3]]) == expected
    assert take(loader, 5, ranks=[[0], [1, 2, 3]], first_step=8) == expected[7:]
    order = [index for step in expected for batch in step for index in batch[0]]
    assert order == ORDER.samples(0, 96).tolist()


class Normal(Noisy):
    """It draws one normal number, of which generators make two."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [random.gauss(), float(np.random.standard_normal())]  # noqa: NPY002
        return {"index": index, "noise": torch.tensor(noise)}


class Reseeding(Noisy):
    """It seeds the global generators, as many scripts do."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.seed(index)
        np.random.mtrand.set_bit_generator(np.random.MT19937(index))
        torch.manual_seed(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Noisy(), Normal(), Reseeding()], ids=type)
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_reading_changes_no_random_number_of_the_script(dataset: Noisy, num_before: int) -> None:
    """Between the two of a pair of normal numbers of Python, too."""

    def draw() -> list[float]:
        of_python = [random.gauss(), random.random()]
        return [*of_python, float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002

    def numbers(read: Callable[[], Any]) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        for _ in range(num_before):
            draw()
        read()
        return draw() + draw()

    loader = DataLoader(dataset)
    assert numbers(lambda: take(loader, 5, ranks=[[0, 1, 2, 3]])) == numbers(lambda: None)


def test_a_dataset_that_claims_to_draw_nothing_is_believed() -> None:
    """Its batches are the same; what it draws after all is the script's."""
    random.seed(1)
    expected = random.random()
    random.seed(1)
    steps = take(DataLoader(Noisy(), draws=False), 1, ranks=[[0, 1, 2, 3]])

    assert steps[0][0][1][0][0] == pytest.approx(expected)
    keyed = take(DataLoader(Noisy()), 1, ranks=[[0, 1, 2, 3]])
    assert [indices for indices, _ in steps[0]] == [indices for indices, _ in keyed[0]]


class Deadly(Noisy):
    """Its reader is killed, as when memory is short."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError(index)


class Faulty(Noisy):
    """A sample cannot be decoded."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError(f"sample {index} is no image")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_reaches_the_script(num_workers: int) -> None:
    with pytest.raises(ValueError, match=r"sample \d+ is no image"):
        take(DataLoader(Faulty(), num_workers=num_workers), 1, ranks=[[0]])


def test_a_reader_that_dies_is_an_error_at_once() -> None:
    with pytest.raises(DataError, match=r"has died \(out of memory\?\)"):
        take(DataLoader(Deadly(), num_workers=1), 1, ranks=[[0]])


class Teller(Noisy):
    """Tells which process reads it, and how many connections that has."""

    def __getitem__(self, index: int) -> Any:
        open_files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return os.getpid(), sum(path.is_socket() for path in open_files)


def test_readers_hold_no_connection_of_the_trainer_and_end_with_the_loader() -> None:
    """A peer would not see that the trainer has left; and they would pile up."""
    with closing(socket.socket()) as one, closing(socket.socket()):
        assert one.fileno() > 0
        loader = DataLoader(Teller(), num_workers=1)
        stream = loader.batches(ORDER, seed=5, micro_batch=1, numbers=[0])
        [pid], [num_sockets] = next(stream)
    assert num_sockets == 0
    stream.close()
    del loader, stream
    status = Path(f"/proc/{pid}/stat")
    deadline_s = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline_s, "the reader did not end"
        time.sleep(0.01)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_session_gives_batches_in_place_of_indices(tmp_path: Path, num_workers: int) -> None:
    """Alone and after a failure; the data is checked as that of indices is."""
    loader = DataLoader(Noisy(), num_workers=num_workers, digest="noisy")
    seen: list[list[int]] = []

    def train(session: Session) -> None:
        model = session.model(lambda: torch.nn.Linear(3, 1))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(loader):
            for batch in step.micro_batches():
                if step.number == 4 and len(seen) < 8:
                    raise ValueError
                step.backward(model(batch["noise"]).square().mean(), tokens=len(batch["index"]))
                seen.append(batch["index"].tolist())
            step.apply()

    def go(loader_steps: int) -> None:
        run(train, directory=str(tmp_path), steps=loader_steps, global_batch=4, micro_batch=2)

    with pytest.raises(TaskError, match="ValueError"):
        go(6)
    seen += [[], []]
    go(6)

    order = DataOrder(seed=0, num_samples=37, global_batch=4)
    assert seen[:6] == order.samples(0, 12).reshape(-1, 2).tolist()
    # It was at most one checkpoint behind: none was written before step 10.
    assert seen[8:] == order.samples(0, 24).reshape(-1, 2).tolist()


def test_a_loader_whose_length_has_changed_is_refused_by_name_before_it_is_read(
    tmp_path: Path,
) -> None:
    """Another length is another order. All that has changed is told at once."""

    def go(dataset: Noisy, steps: int, digest: str) -> None:
        def train(session: Session) -> None:
            model = session.model(lambda: torch.nn.Linear(3, 1))
            session.optimizer(lambda named: torch.optim.SGD(named.values()))
            for _ in session.steps(DataLoader(dataset, digest=digest)):
                session.train_step(lambda batch: model(batch["noise"]).square().mean())

        run(train, directory=str(tmp_path), steps=steps, global_batch=4, micro_batch=2)

    class Longer(Noisy):
        def __len__(self) -> int:
            return 38

        def __getitem__(self, index: int) -> dict[str, Any]:
            raise AssertionError(f"sample {index} was read")

    go(Noisy(), 2, "old")
    with pytest.raises(TaskError) as refused:
        go(Longer(), 4, "new")

    assert "data_digest is new but the checkpoint of step 2 was made with old" in str(refused.value)
    assert "num_samples is 38 but the checkpoint of step 2 was made with 37" in str(refused.value)
    assert "Resume with the same data" in str(refused.value)
    go(Noisy(), 4, "old")
