"""Batches of a dataset in the run's order, read ahead by processes.

A dataset that can only be iterated keeps its own order; see ``stream``.

The samples of a step depend only on seed and step: any number of workers reads the same samples,
and a resumed run starts at its step without reading earlier data. Random numbers of the dataset
(augmentation, masking) are keyed by step and micro-batch, so they are also the same everywhere.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from workers.data.fingerprint import Content, content_of
from workers.data.order import DataOrder
from workers.data.randomness import Keyed, random_seed, seed_all, seeded
from workers.data.readers import Readers
from workers.data.sampler import Sampled, Sampler
from workers.data.stream import Stream, is_stream
from workers.errors import DataError

#: Batches that each process reads ahead.
_AHEAD: Final = 2
#: The order is computed for this many samples together.
_SAMPLES_AT_ONCE: Final = 1 << 14


#: A reader's next task: a method, and further arguments.
_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


def as_data(data: Any) -> int | DataLoader:
    """Return what ``session.steps`` reads: a number of samples, or a ``DataLoader`` of a dataset.

    Raises:
        DataError: ``data`` loads batches or cannot be read. The error says what to pass instead.
    """
    if isinstance(data, DataLoader):
        return data
    if not isinstance(data, Real):
        return DataLoader(data)
    if not isinstance(data, Integral) or data < 1:
        raise DataError(f"{data!r}: the number of samples must be an integer, at least 1")
    return int(data)


def num_tokens(batch: Any) -> int:
    """Return the number of tokens in a batch, including padding; 0 if it shows none.

    A batch shows tokens as ``input_ids``, or as inputs and labels that are integers of one shape
    ``(samples, positions)``.
    """
    if isinstance(batch, Mapping):
        return math.prod(getattr(batch.get("input_ids"), "shape", (0,)))
    match batch:
        case (torch.Tensor() as inputs, torch.Tensor() as labels):
            are_ids = not (inputs.is_floating_point() or labels.is_floating_point())
            is_of_tokens = are_ids and inputs.ndim > 1 and inputs.shape == labels.shape
            return inputs.numel() if is_of_tokens else 0
        case _:
            return 0


def _refuse_batches(data: Any) -> None:
    """Raise ``DataError`` for an object that makes batches itself or is not a dataset."""
    kind = type(data).__name__
    is_loader = isinstance(data, torch.utils.data.DataLoader)
    if is_loader and (data.batch_size is not None or data.batch_sampler is not None):
        raise DataError(
            "a DataLoader of torch makes batches in an order of its own, but here the run "
            "does both: train.micro_batch samples each, in an order that kills do not change. "
            "Pass its dataset: everstep.DataLoader(loader.dataset, "
            f"collate_fn=loader.collate_fn, num_workers={data.num_workers})"
        )
    if hasattr(data, "iloc"):
        raise DataError(
            f"a {kind} gives columns by name, but the run reads samples by index; pass "
            "frame.to_dict('records')"
        )
    if isinstance(data, str | bytes | Mapping):
        raise DataError(f"a {kind} is not a dataset; pass samples by index: a list, a Dataset")


class Dataset(Protocol):
    """A readable dataset: torch's and Hugging Face's map-style datasets, lists, arrays."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


def micro_batches_of(
    order: DataOrder, *, micro_batch: int, numbers: Sequence[int], first_step: int = 1
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield the step, number and samples, ``(micro_batch,)``, of a rank's micro-batches, endlessly.

    ``numbers`` are the micro-batches of each step that the rank computes, in order.
    """
    offsets = np.asarray(numbers, np.int64)[:, None] * micro_batch + np.arange(micro_batch)
    # The first batch must not wait for many samples; later it is cheaper to request many steps at
    # once.
    num_steps, num_steps_max = 1, max(1, _SAMPLES_AT_ONCE // max(1, offsets.size))
    while True:
        steps = np.arange(first_step, first_step + num_steps)
        starts = (steps - 1) * order.global_batch
        # A rank repeats micro-batches to keep pace, so its own are not always in order.
        positions, back = np.unique(starts[:, None, None] + offsets, return_inverse=True)
        samples = order.at(positions)[back.reshape(num_steps, *offsets.shape)]
        for step, of_step in zip(steps.tolist(), samples, strict=True):
            for number, indices in zip(numbers, of_step, strict=True):
                yield step, number, indices
        first_step += num_steps
        num_steps = min(8 * num_steps, num_steps_max)


class DataLoader:
    """Batches of a dataset for ``session.steps``.

    If you make it outside the training function, its processes live from attempt to attempt.

    A dataset without length and index is a stream: it must give the same samples on every worker,
    each of which reads all of it and keeps its part. At most one process reads it ahead. When a run
    resumes, a stream with ``state_dict`` and ``load_state_dict`` continues where it was, and any
    other stream is read again from the beginning of the epoch.

    Args:
        dataset: Samples by index below ``len(dataset)``, or one after the other. Its
            ``__getitems__(indices)`` is used if there is one.
        collate_fn: Makes a batch from a list of samples. The default is torch's, which stacks
            tensors.
        num_workers: Number of processes that read ahead, forked from this one. With 0 the training
            process reads.
        draws: Whether samples of an indexed dataset draw random numbers, which are the same on
            any worker. False saves 15 us a batch; it has no effect with ``num_workers`` above 0.
        digest: Identifies the data; by default ``dataset.digest`` if there is one. It must be equal
            on all workers, and in a run and its checkpoint.
        sampler: The indices of an epoch for all workers together: a sampler of torch, or a function
            of the epoch's number. While it runs, the random numbers are seeded by the epoch. By
            default each epoch has every sample once, in its own order.

    Attributes:
        epoch: See ``DataOrder``; positions without a sample have index -1.
        sampled: The epochs of ``sampler``; None without one.

    Raises:
        DataError: The dataset has no samples, can be iterated only once, or makes batches.
    """

    def __init__(
        self,
        dataset: Dataset | Iterable[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        draws: bool = True,
        digest: str = "",
        sampler: Sampler | None = None,
    ) -> None:
        _refuse_batches(dataset)
        self.dataset = cast("Any", dataset)
        self.is_stream = is_stream(dataset)
        if self.is_stream:
            # This refuses a dataset that cannot be read again before the run begins.
            Stream(self.dataset, seed=0, global_batch=1)
        elif not len(self.dataset):
            raise DataError("DataLoader: the dataset has no samples")
        if self.is_stream and sampler is not None:
            raise DataError("DataLoader: a stream has an order of its own; leave out the sampler")
        self.sampled = None if sampler is None else Sampled(sampler, len(self.dataset))
        if num_workers < 0:
            raise DataError(f"DataLoader: num_workers={num_workers} must be at least 0")
        self.digest = digest or str(getattr(dataset, "digest", ""))
        self._collate = collate_fn or torch.utils.data.default_collate
        self._num_workers = min(1, num_workers) if self.is_stream else num_workers
        self._draws = draws
        self.epoch: tuple[int, int] | None = None
        self._readers: Readers | None = None
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Return the number of samples; a stream has none."""
        return len(self.dataset)

    def state(self) -> dict[str, Any] | None:
        """Return the position of a stream after the step of the last batch.

        None for other datasets.
        """
        return self._state

    @property
    def read_digest(self) -> int:
        """Return a digest, below 2 ** 20, of a stream's samples up to the step of the last batch.

        The digest is 0 for other datasets, whose order is the run's.
        """
        return self._state["digest"] % (1 << 20) if self._state is not None else 0

    def batches(
        self,
        order: DataOrder,
        *,
        seed: int,
        micro_batch: int,
        numbers: Sequence[int],
        first_step: int = 1,
        state: dict[str, Any] | None = None,
    ) -> Generator[Any]:
        """Yield one rank's batches, step after step, without end.

        Args:
            order: The order of samples; a stream uses only its ``global_batch``.
            numbers: Numbers of the micro-batches that this rank computes, in order, for each step.
            state: The result of ``state`` after the step before it.
        """
        if self.is_stream:
            cut = _StreamCut(seed, order.global_batch, micro_batch, tuple(numbers))
            for batches, place in self._results(self._of_stream(cut, first_step, state)):
                self._state = place
                yield from batches
        upcoming = micro_batches_of(
            order, micro_batch=micro_batch, numbers=numbers, first_step=first_step
        )
        if self._num_workers:
            yield from self._results(
                (_read_keyed, (random_seed("data", seed, step, number), samples.tolist()))
                for step, number, samples in upcoming
            )
        keyed, read = Keyed(), _Reader(self.dataset, self._collate).read
        for step, number, samples in upcoming:
            if self._draws:
                yield keyed(random_seed("data", seed, step, number), read, samples.tolist())
            else:
                yield read(samples.tolist())

    def read_one(
        self, order: DataOrder, *, seed: int, micro_batch: int, step: int, number: int
    ) -> Any:
        """Return one batch as ``batches`` yields it, without reading ahead; not for a stream."""
        _, _, samples = next(
            micro_batches_of(order, micro_batch=micro_batch, numbers=[number], first_step=step)
        )
        key = random_seed("data", seed, step, number)
        return self._call(_read_keyed, key, samples.tolist())

    def read(self, indices: list[int]) -> Any:
        """Return the batch of these samples, read in this process."""
        return _Reader(self.dataset, self._collate).read(indices)

    def contents(self, indices: Sequence[int], *, seed: int) -> list[Content]:
        """Return the content of samples, each with its own random numbers."""
        keys = [random_seed("data", seed, "content", index) for index in indices]
        found: list[Content] = self._call(_contents, keys, list(indices))
        return found

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a reader, in a process if there is one: it has the files open."""
        if self._num_workers:
            readers = self._readers or self._begin_readers()
            return readers.result(readers.submit(function, *arguments))
        with seeded(0):
            return function(_Reader(self.dataset, self._collate), *arguments)

    def _of_stream(
        self, cut: _StreamCut, first_step: int, state: dict[str, Any] | None
    ) -> Iterator[_Call]:
        yield _seek, (cut, first_step - 1, state)
        for step in itertools.count(first_step):
            yield _read_step, (cut, step)

    def _results(self, calls: Iterator[_Call]) -> Iterator[Any]:
        """Yield the results of calls, skip calls that are None, and let processes work ahead."""
        if not self._num_workers:
            reader = _Reader(self.dataset, self._collate)
            for function, arguments in calls:
                # Reading must not change the script's own random numbers.
                with seeded(0):
                    result = function(reader, *arguments)
                if result is not None:
                    yield result
        readers = self._readers or self._begin_readers()
        ahead: deque[int] = deque()
        try:
            while True:
                while len(ahead) < _AHEAD * self._num_workers:
                    function, arguments = next(calls)
                    ahead.append(readers.submit(function, *arguments))
                result = readers.result(ahead.popleft())
                if result is not None:
                    yield result
        except DataError:
            # Some processes may be dead, so the next reading starts new ones.
            self._readers = None
            raise
        finally:
            readers.drop(ahead)

    def _begin_readers(self) -> Readers:
        begin = functools.partial(_Reader, self.dataset, self._collate)
        self._readers = Readers(self._num_workers, begin)
        weakref.finalize(self, self._readers.close)
        return self._readers


@dataclass(frozen=True, slots=True)
class _StreamCut:
    """The part of a stream that a rank takes: micro-batches of each step, by their numbers."""

    seed: int
    global_batch: int
    micro_batch: int
    numbers: tuple[int, ...]


class _Reader:
    """Reads samples, in a process of its own or in the training process."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.stream: Stream | None = None
        self._read_many = getattr(dataset, "__getitems__", None)

    def sample(self, index: int) -> Any:
        """Return one sample."""
        return self._read_many([index])[0] if self._read_many is not None else self.dataset[index]

    def read(self, indices: list[int]) -> Any:
        """Return the batch of samples by index."""
        if self._read_many is not None:
            return self.collate(self._read_many(indices))
        dataset = self.dataset
        return self.collate([dataset[index] for index in indices])


def _contents(reader: _Reader, keys: list[int], indices: list[int]) -> list[Content]:
    found = []
    for key, index in zip(keys, indices, strict=True):
        seed_all(key)
        found.append(content_of(reader.sample(index)))
    return found


def _read_keyed(reader: _Reader, key: int, indices: list[int]) -> Any:
    seed_all(key)
    return reader.read(indices)


def _seek(reader: _Reader, cut: _StreamCut, step: int, state: dict[str, Any] | None) -> None:
    reader.stream = Stream(reader.dataset, seed=cut.seed, global_batch=cut.global_batch)
    reader.stream.seek(step, state)


def _read_step(reader: _Reader, cut: _StreamCut, step: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the rank's batches of a step, and the position of the stream after the step."""
    assert reader.stream is not None, "a stream is sought before it is read"
    each = {
        number: range(number * cut.micro_batch, (number + 1) * cut.micro_batch)
        for number in cut.numbers
    }
    found = reader.stream.read(step, {place for places in each.values() for place in places})
    batches = [reader.collate([found[at] for at in each[number]]) for number in cut.numbers]
    return batches, reader.stream.state(step)
