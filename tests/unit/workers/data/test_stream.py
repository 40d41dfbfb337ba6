"""Streams: every sample once, in the stream's order, for any number of workers and resumes."""

import gc
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import DataError, DataLoader, Session, TaskError, pack, run
from workers.data import DataOrder

GLOBAL_BATCH, MICRO_BATCH = 6, 2


class Numbers:
    """Eleven numbers an epoch, each with noise; tells how many were read."""

    def __init__(self, num: int = 11) -> None:
        self.num, self.epoch, self.num_read = num, 0, 0
        self.at = self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, float]]:
        self.at, self.first = self.first, 0
        while self.at < self.num:
            self.at += 1
            self.num_read += 1
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
            yield {"number": 100.0 * self.epoch + self.at - 1, "noise": noise}


class Seekable(Numbers):
    """Continues where its state says; as Hugging Face's streams do."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


class OfTorch(torch.utils.data.IterableDataset[Any]):
    """torch's base class has ``__getitem__``, which raises; some have a length, too."""

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(Numbers())


def order(global_batch: int = GLOBAL_BATCH) -> DataOrder:
    return DataOrder(seed=0, num_samples=1, global_batch=global_batch)


def take(
    dataset: Iterable[Any],
    num: int,
    *,
    ranks: list[list[int]],
    num_workers: int = 0,
    first_step: int = 1,
    state: dict[str, Any] | None = None,
) -> tuple[list[list[Any]], list[dict[str, Any] | None]]:
    """Return steps with the batches of all ranks in order, and the state after each step."""
    loaders = [DataLoader(dataset, num_workers=num_workers) for _ in ranks]
    if not num_workers:
        # Each worker has its own.
        import copy

        loaders = [DataLoader(copy.deepcopy(dataset)) for _ in ranks]
    readers = [
        loader.batches(
            order(),
            seed=5,
            micro_batch=MICRO_BATCH,
            numbers=mine,
            first_step=first_step,
            state=state,
        )
        for loader, mine in zip(loaders, ranks, strict=True)
    ]
    steps, states = [], []
    for _ in range(num):
        batches = [next(reader) for reader, mine in zip(readers, ranks, strict=True) for _ in mine]
        steps.append([torch.stack([one["number"], one["noise"]], 1).tolist() for one in batches])
        [*found] = [loader.state() for loader in loaders]
        assert all(one == found[0] for one in found), found
        states.append(found[0])
    for reader in readers:
        reader.close()
    return steps, states


class Shuffled(Numbers):
    """Chooses its order as it begins; an epoch ends where a step does."""

    def __init__(self) -> None:
        super().__init__(12)

    def __iter__(self) -> Iterator[dict[str, float]]:
        self.at, self.first = self.first, 0
        order = torch.randperm(self.num).tolist()
        while self.at < self.num:
            self.at += 1
            yield {"number": 100.0 * self.epoch + order[self.at - 1], "noise": 0.0}


class ShuffledSeekable(Shuffled, Seekable):
    """The same, which continues where its state says."""


ONE, THREE = [[0, 1, 2]], [[0], [1], [2]]


def test_every_sample_comes_once_in_the_streams_order() -> None:
    """Through two ends of the stream, which lie within steps."""
    steps, _ = take(Numbers(), 5, ranks=ONE)

    numbers = [number for step in steps for batch in step for number, _ in batch]
    endless = (100.0 * epoch + number for epoch in itertools.count() for number in range(11))
    assert numbers == list(itertools.islice(endless, 30))


@pytest.mark.parametrize(
    "dataset",
    [Numbers(), Seekable(), OfTorch(), Shuffled(), ShuffledSeekable()],
    ids=lambda d: type(d).__name__,
)
@pytest.mark.parametrize(
    ("ranks", "num_workers"),
    [(THREE, 0), ([[0, 1], [2]], 0), ([[2, 2], [1], [0]], 1)],
    ids=["three ranks", "two ranks", "three ranks and readers"],
)
def test_ranks_readers_and_resumes_change_nothing(
    dataset: Iterable[Any], ranks: list[list[int]], num_workers: int
) -> None:
    """The noise does not change either.

    A rank may repeat a micro-batch to keep pace with the others.
    """
    expected, states = take(dataset, 7, ranks=ONE)
    by_number = [[step[number] for mine in ranks for number in mine] for step in expected]

    begun, _ = take(dataset, 7, ranks=ranks, num_workers=num_workers)
    assert begun == by_number
    for resumed in (1, 2, 3, 5):
        goes_on, later = take(
            dataset,
            7 - resumed,
            ranks=ranks,
            num_workers=num_workers,
            first_step=resumed + 1,
            state=states[resumed - 1],
        )
        assert goes_on == by_number[resumed:]
        assert later == states[resumed:]


def test_a_stream_without_state_is_read_again_from_its_epoch_on() -> None:
    dataset = Numbers()
    _, states = take(dataset, 5, ranks=ONE)
    reader = DataLoader(dataset).batches(
        order(), seed=5, micro_batch=2, numbers=[0], first_step=6, state=states[4]
    )
    dataset.num_read = 0
    next(reader)
    # Step 5 ended with sample 8 of the third epoch; step 6 reads six more, in two epochs.
    assert dataset.num_read == 8 + 6


def test_what_cannot_be_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="generator can be iterated at most once"):
        DataLoader(number for number in range(3))
    with pytest.raises(DataError, match="int can be iterated at most once"):
        DataLoader(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no samples in epoch 0"):
        take(Numbers(0), 1, ranks=ONE)

    class Large(Seekable):
        def state_dict(self) -> dict[str, Any]:
            return {"at": "x" * (300 << 10)}

    class Odd(Seekable):
        def state_dict(self) -> dict[str, Any]:
            return {"at": torch.zeros(1)}

    with pytest.raises(DataError, match="the state_dict of Large has 307210 bytes; at most 262144"):
        take(Large(), 1, ranks=ONE)
    with pytest.raises(DataError, match="the state_dict of Odd has values that JSON cannot hold"):
        take(Odd(), 1, ranks=ONE)


@pytest.mark.parametrize("dataset", [Numbers(), Seekable()], ids=lambda d: type(d).__name__)
def test_a_session_resumes_a_stream(tmp_path: Path, dataset: Numbers) -> None:
    """With the place that the checkpoint has, and no other kind of data."""
    loader = DataLoader(dataset)
    seen: list[float] = []

    def train(session: Session) -> None:
        model = session.model(lambda: torch.nn.Linear(1, 1))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(data):
            for batch in step.micro_batches():
                numbers = batch["number"].float()
                step.backward(model(numbers[:, None]).square().mean() * 1e-6, tokens=2)
                seen.extend(numbers.tolist())
            step.apply()

    data: Any = loader

    def go(steps: int) -> None:
        from everstep import CheckpointSettings, Settings, TrainSettings

        settings = Settings(
            train=TrainSettings(steps=steps, global_batch=6, micro_batch=2, lr=1e-3),
            checkpoint=CheckpointSettings(every_steps=1, keep=0),
        )
        run(train, directory=str(tmp_path), settings=settings)

    go(3)
    go(5)
    endless = (100.0 * epoch + number for epoch in itertools.count() for number in range(11))
    assert seen == list(itertools.islice(endless, 30))
    data = DataLoader([{"number": 1.0}] * 8)
    with pytest.raises(TaskError, match="num_samples is 8 but the checkpoint of step 5 was made"):
        go(6)


def test_hugging_faces_streams_continue_exactly() -> None:
    """Also shuffled: the state lacks what was in the buffer, so they are read again."""
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = datasets.Dataset.from_dict(
        {"number": [float(n) for n in range(40)], "noise": [0.0] * 40}
    )
    plain = rows.to_iterable_dataset(num_shards=4)
    shuffled = plain.shuffle(seed=3, buffer_size=7)
    halves = [rows.select(range(begin, begin + 20)) for begin in (0, 20)]
    mixed = datasets.concatenate_datasets(
        [half.to_iterable_dataset().shuffle(seed=3, buffer_size=7) for half in halves]
    )
    for stream in (plain, shuffled, mixed):
        assert DataLoader(stream).is_stream
        expected, states = take(stream, 12, ranks=ONE)
        for resumed in (2, 9):
            goes_on, _ = take(
                stream,
                12 - resumed,
                ranks=THREE,
                first_step=resumed + 1,
                state=states[resumed - 1],
            )
            assert goes_on == expected[resumed:]
        first = [number for step in expected for batch in step for number, _ in batch][:40]
        assert sorted(first) == [float(n) for n in range(40)]


class OwnGenerator(Numbers):
    """Its order comes from a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in torch.randperm(self.num, generator=self.generator).tolist():
            yield {"number": 1.0 * number, "noise": 0.0}


class CountsEpochs(Numbers):
    """Counts by itself how often it was begun."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        self.first += 1
        for number in range(self.num):
            yield {"number": float((number + self.first) % self.num), "noise": 0.0}


class KeepsCursor(Numbers):
    """Goes on where it was left."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        for _ in range(self.num):
            self.at += 1
            yield {"number": float(self.at % 7), "noise": 0.0}


class Unseeded(Numbers):
    """Draws from the system."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in range(self.num):
            yield {"number": float(number), "noise": random.SystemRandom().random()}


class Buffered(Numbers):
    """Has a buffer that its state lacks."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]

    def __iter__(self) -> Iterator[dict[str, float]]:
        buffer: list[dict[str, float]] = []
        for row in super().__iter__():
            buffer.append({**row, "noise": 0.0})
            if len(buffer) == 4:
                yield buffer.pop(0)
        yield from buffer


class OffByOne(Seekable):
    """Its state is a sample behind."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": max(0, self.at - 1)}


def next_behind(loader: DataLoader, behind: int, states: list[dict[str, Any] | None]) -> Any:
    """Return the first batch of a run that resumes behind a step."""
    batches = loader.batches(
        order(),
        seed=5,
        micro_batch=MICRO_BATCH,
        numbers=[0],
        first_step=behind + 1,
        state=states[behind - 1],
    )
    return next(batches)


class PythonsOwn(OwnGenerator):
    """Its order comes from a generator without a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random()

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in self.numbers.sample(range(self.num), self.num):
            yield {"number": 1.0 * number, "noise": 0.0}


@pytest.mark.parametrize("global_batch", [1, 6, 20])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [OwnGenerator, PythonsOwn, CountsEpochs, KeepsCursor, Unseeded])
def test_a_stream_with_an_order_of_its_own_is_refused_in_the_first_step(
    kind: type[Numbers], num_workers: int, global_batch: int
) -> None:
    """One worker noticed it at its first resume, when all was lost."""
    loader = DataLoader(kind(), num_workers=num_workers)
    batches = loader.batches(
        order(global_batch), seed=0, micro_batch=1, numbers=range(global_batch)
    )
    with pytest.raises(DataError, match=rf"{kind.__name__} was read twice .* \(seed=\)"):
        list(itertools.islice(batches, 8))


class Replaced(Numbers):
    def __iter__(self) -> Iterator[dict[str, float]]:
        return ({**row, "number": row["number"] + 0.5} for row in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_has_changed_is_found_when_it_is_read_again(num_workers: int) -> None:
    """Its files may be others than before."""
    _, states = take(Numbers(), 5, ranks=ONE)
    for behind in (1, 4):
        with pytest.raises(DataError, match=f"Replaced was read again up to step {behind}"):
            next_behind(DataLoader(Replaced(), num_workers=num_workers), behind, states)


@pytest.mark.parametrize("behind", [1, 2, 3])
@pytest.mark.parametrize("kind", [Buffered, OffByOne])
def test_a_state_that_leads_elsewhere_is_found(kind: type[Numbers], behind: int) -> None:
    """At any step, also where the epoch ends."""
    _, states = take(kind(), 5, ranks=ONE)
    with pytest.raises(DataError, match=f"{kind.__name__} does not continue where its state_dict"):
        next_behind(DataLoader(kind()), behind, states)


def test_hugging_faces_buffer_behind_a_wrapper_is_found() -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")

    class Wrapper:
        def __init__(self) -> None:
            rows = datasets.Dataset.from_dict({"number": [float(n) for n in range(12)]})
            self.rows = rows.to_iterable_dataset().shuffle(seed=3, buffer_size=5)

        def __iter__(self) -> Iterator[dict[str, float]]:
            for row in self.rows:
                yield {**row, "noise": 0.0}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.rows.state_dict())

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows.load_state_dict(state)

    _, states = take(Wrapper(), 6, ranks=ONE)
    for behind in range(1, 6):
        with pytest.raises(DataError, match=r"Wrapper (does not continue|has no samples in epoch)"):
            next_behind(DataLoader(Wrapper()), behind, states)


def test_a_long_epoch_does_not_make_the_stream_slow() -> None:
    """Each step reads a sample ahead. An object that stays for it would slow all later reads."""
    for dataset in (Numbers(100_000), Seekable(100_000)):
        loader = DataLoader(dataset)
        batches = loader.batches(order(), seed=5, micro_batch=MICRO_BATCH, numbers=[0])
        list(itertools.islice(batches, 10))
        gc.collect()
        before = len(gc.get_objects())
        list(itertools.islice(batches, 1000))
        gc.collect()
        num_more = len(gc.get_objects()) - before
        assert num_more < 500


class Looked(dict[str, float]):
    """Counts how often its items were looked at."""

    def items(self) -> Any:
        LOOKED.append(self["number"])
        return super().items()


LOOKED: list[float] = []


class OfLooked(Seekable):
    def __iter__(self) -> Iterator[dict[str, float]]:
        return map(Looked, super().__iter__())


@pytest.mark.parametrize("num_samples", [11, 12, 1000])
def test_the_digest_looks_at_each_sample_once(num_samples: int) -> None:
    """Also at one that was read ahead, and at the first of an epoch."""
    LOOKED.clear()
    loader = DataLoader(OfLooked(num_samples), collate_fn=list)
    batches = loader.batches(order(), seed=5, micro_batch=MICRO_BATCH, numbers=[0, 1, 2])
    # The first ones are looked at in both readings before the first step.
    list(itertools.islice(batches, 2 * 3))
    LOOKED.clear()
    list(itertools.islice(batches, 9 * 3))
    assert len(LOOKED) == len(set(LOOKED))
    assert len(LOOKED) >= 9


def test_states_of_earlier_releases_have_no_digest_and_continue() -> None:
    for dataset in (Numbers(), Seekable()):
        expected, states = take(dataset, 4, ranks=ONE)
        known = states[1]
        assert known is not None
        old = {name: known[name] for name in ("epoch", "taken", "dataset")}
        assert take(dataset, 2, ranks=ONE, first_step=3, state=old)[0] == expected[2:]


def test_hugging_faces_shuffle_needs_a_seed() -> None:
    """It copies its generator: a process reads one order always, and another process another."""
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = datasets.Dataset.from_dict({"input_ids": [[n, n] for n in range(50)]})
    stream = rows.to_iterable_dataset()
    unseeded = stream.shuffle(buffer_size=7)
    mixed = datasets.interleave_datasets([stream, stream], probabilities=[0.5, 0.5])
    for one in (unseeded, unseeded.map(lambda row: row), pack(unseeded, 4), mixed):
        with pytest.raises(DataError, match=r"without a seed.*Give that call a seed="):
            DataLoader(one)
    seeded = stream.shuffle(seed=7, buffer_size=7)
    for one in (seeded, pack(seeded, 4)):
        batches = DataLoader(one).batches(order(6), seed=0, micro_batch=2, numbers=[0, 1, 2])
        assert len([next(batches) for _ in range(6)]) == 6
