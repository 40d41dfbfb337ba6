"""Cuts samples that come only one after the other into steps.

Every worker reads the whole stream and keeps its part of each step, so any number of workers sees
every sample once, in the stream's own order. The stream must be the same wherever it is read: a
digest of the samples read confirms this, to the other workers and after a resume.
"""

import itertools
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import torch

from workers.data.fingerprint import fingerprint
from workers.data.randomness import drawn, random_seed, seed_all
from workers.errors import DataError

#: Maximum size of a stream's state, which a version keeps among its small values.
_STATE_BYTES_MAX: Final = 256 << 10
#: The digest covers one of this many samples of a step, and the first of an epoch. That is enough,
#: because a lost sample shifts all later ones.
_SAMPLES_EACH: Final = 8
#: Number of samples to read twice before the first step, to detect a random order.
_TWICE: Final = 8
#: Seeds of NumPy's generators longer than this are ones that NumPy drew itself.
_SEED_BITS: Final = 64
#: The digest after the next sample if the epoch has ended.
_NONE_LEFT: Final = 0
_END: Final = object()


#: The problem of a stream that gives other samples when it is read again.
KEEPS_ORDER: Final = (
    "Samples would be lost or seen twice. It must give the same samples on every worker and "
    "each time: keep no state from one reading to the next (a generator, a cursor), give "
    "shuffle a fixed seed (seed=), draw random numbers by torch.rand, numpy.random or random, "
    "whose seeds are set here, or have the order depend on set_epoch(number) alone"
)


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated."""
    # torch's base class of streams has ``__getitem__``, which raises.
    is_torch_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    return is_torch_stream or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


class Stream:
    """A dataset that can only be iterated, in passes (epochs) without end.

    Random numbers are keyed by step and by epoch, so a dataset that shuffles or augments does the
    same on every worker and after a resume. ``set_epoch(number)`` is called if the dataset has it.
    Raise ``DataError`` if it cannot be read again, or then gives other samples.
    """

    def __init__(self, dataset: Iterable[Any], *, seed: int, global_batch: int) -> None:
        if not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator):
            raise DataError(
                f"DataLoader: {type(dataset).__name__} can be iterated at most once; give an "
                "object whose __iter__ begins again, such as an IterableDataset"
            )
        _refuse_unseeded(dataset)
        self._dataset: Any = dataset
        self._seed, self._global_batch = seed, global_batch
        #: The expected first samples, checked before anything can be lost.
        self._first: deque[int] = deque()
        self._iterator: Any = iter(())
        self._epoch = self._taken = 0
        #: Digest of the samples read so far, and of those before the epoch.
        self._digest = self._epoch_digest = 0
        #: The expected digest after the next sample, if known.
        self._next_digest: int | None = None
        #: A sample that was read ahead, and the digest after it.
        self._ahead: tuple[Any, int] | None = None

    def seek(self, step: int, state: dict[str, Any] | None) -> None:
        """Continue after ``step``, which is 0 for the beginning.

        A dataset with ``state_dict`` and ``load_state_dict`` continues there by itself. Any other
        dataset is read again from the beginning of the epoch, or of the stream if the ``state``
        after the step is None. This takes as long as the first time.
        """
        if not step:
            self._first = self._first_samples()
        known = state or {"epoch": 0, "taken": step * self._global_batch, "dataset": None}
        begun, held = step * self._global_batch - known["taken"], known["dataset"]
        self._digest = known.get("epoch_digest", 0)
        if held is None or not _is_stateful(self._dataset):
            self._begin_epoch(known["epoch"])
            self._read_again(begun, step)
            if known.get("digest", self._digest) != self._digest:
                raise DataError(
                    f"DataLoader: the stream {type(self._dataset).__name__} was read again up to "
                    f"step {step}, and gave other samples than before. {KEEPS_ORDER}"
                )
            return
        self._next_digest = known.get("digest_ahead")
        self._continue(known["epoch"], held)
        self._epoch_digest, self._digest = self._digest, known.get("digest", 0)
        self._taken = known["taken"]

    def read(self, step: int, kept: Collection[int]) -> dict[int, Any]:
        """Return samples of the next step, which is ``step``, by their place in it.

        ``kept`` are places, ``0 <= place < global_batch``; the others are read and dropped.
        """
        found: dict[int, Any] = {}
        for place in range(self._global_batch):
            self._seed_place(step, place)
            sample = self._next(place)
            if place in kept:
                found[place] = sample
        return found

    def state(self, step: int) -> dict[str, Any]:
        """Return the stream's position after ``step`` as JSON values; may read a sample ahead."""
        held = None
        if _is_stateful(self._dataset):
            told = f"DataLoader: the state_dict of {type(self._dataset).__name__}"
            try:
                text = json.dumps(self._dataset.state_dict())
            except (TypeError, ValueError) as error:
                raise DataError(f"{told} has values that JSON cannot hold: {error}") from error
            if len(text) > _STATE_BYTES_MAX:
                raise DataError(
                    f"{told} has {len(text)} bytes; at most {_STATE_BYTES_MAX} are kept. Without "
                    "state_dict the stream is read again when a run resumes"
                )
            # A copy, because the dataset continues.
            held = json.loads(text)
        where: dict[str, Any] = {"epoch": self._epoch, "taken": self._taken, "dataset": held}
        where |= {"epoch_digest": self._epoch_digest, "digest": self._digest}
        if held is not None:
            # Not every state_dict leads back to its position: the next sample will show whether it
            # does.
            self._seed_place(step + 1, 0)
            sample = next(self._iterator, _END)
            digest = _NONE_LEFT if sample is _END else fingerprint(sample, self._digest)
            self._ahead, where["digest_ahead"] = (sample, digest), digest
        return where

    def _seed_place(self, step: int, place: int) -> None:
        """Seed the random numbers from a sample on, if new ones begin there."""
        if place == 0 and (self._taken or not self._epoch):
            seed_all(random_seed("stream", self._seed, step))
        elif place == 1:
            # The first one may have been read ahead.
            seed_all(random_seed("stream", self._seed, step, place))

    def _check_next(self, found: int) -> None:
        """Raise an error unless ``found`` is the digest after the next sample, if that is known."""
        expected, self._next_digest = self._next_digest, None
        if expected not in {None, found}:
            raise DataError(
                f"DataLoader: the stream {type(self._dataset).__name__} does not continue where "
                "its state_dict says: another sample comes next, so samples would be lost or seen "
                "twice. Have state_dict hold all of its state (a shuffle buffer too); or remove "
                "state_dict, and the stream is read again from the beginning of the epoch"
            )

    def _next(self, place: int) -> Any:
        sample, digest = self._ahead or (next(self._iterator, _END), None)
        self._ahead = None
        if sample is _END:
            self._check_next(_NONE_LEFT)
            if not self._taken:
                kind = type(self._dataset).__name__
                raise DataError(
                    f"DataLoader: the stream {kind} has no samples in epoch {self._epoch}"
                )
            self._begin_epoch(self._epoch + 1)
            return self._next(place)
        self._taken += 1
        if self._first and fingerprint(sample) != self._first.popleft():
            raise DataError(
                f"DataLoader: the stream {type(self._dataset).__name__} was read twice before the "
                f"first step, and its sample {self._taken} was another one. {KEEPS_ORDER}"
            )
        if place % _SAMPLES_EACH == 0 or self._taken == 1:
            self._digest = fingerprint(sample, self._digest) if digest is None else digest
            self._check_next(self._digest)
        return sample

    def _first_samples(self) -> deque[int]:
        other = Stream(self._dataset, seed=self._seed, global_batch=self._global_batch)
        other._begin_epoch(0)
        found: deque[int] = deque()
        for number in range(_TWICE):
            step, place = divmod(number, self._global_batch)
            other._seed_place(step + 1, place)
            found.append(fingerprint(other._next(place)))
        return found

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._taken, self._epoch_digest = epoch, 0, self._digest
        # Many streams choose their order when they give the first sample, so these are the epoch's
        # numbers.
        self._iterator = _begun(self._iterate(epoch))

    def _iterate(self, epoch: int, state: Any = None) -> Any:
        seed_all(random_seed("epoch", self._seed, epoch))
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if state is not None:
            self._dataset.load_state_dict(state)
        return iter(self._dataset)

    def _continue(self, epoch: int, state: Any) -> None:
        """Continue at the dataset's state, in the order that the epoch began with.

        The next sample uses its step's random numbers, unless the dataset draws more numbers when
        it begins: then keeping its order is more important.
        """
        self._epoch = epoch
        iterator = self._iterate(epoch, state)
        before = drawn()
        self._iterator = _begun(iterator)
        if drawn() == before:
            return
        draws_as_it_begins = _draws_as_it_begins(self._iterate(epoch, state))
        iterator = self._iterate(epoch, state)
        self._iterator = _begun(iterator) if draws_as_it_begins else iterator

    def _read_again(self, begun: int, step: int) -> None:
        """Read the samples that steps up to ``step`` took of the epoch that began at ``begun``."""
        first, rest = begun // self._global_batch + 1, -begun % self._global_batch
        if begun < 0 or first > step + 1:
            raise DataError(
                f"the stream was saved at sample {step * self._global_batch - begun} of an "
                f"epoch, which is beyond step {step}: the checkpoint has another global batch"
            )
        for place in range(self._global_batch - rest, self._global_batch):
            self._next(place)
        for again in range(first + bool(rest), step + 1):
            self.read(again, ())


def _begun(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the same samples that has read the first one already."""
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)


def _draws_as_it_begins(iterator: Iterator[Any]) -> bool:
    """Return whether the first sample takes other random numbers than the second one."""
    taken = []
    for _ in range(2):
        seed_all(0)
        next(iterator, None)
        taken.append(drawn())
    return taken[0] != taken[1]


def _is_stateful(dataset: Any) -> bool:
    """Return whether a dataset continues exactly where its state says."""
    has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    # The state of a shuffled stream of Hugging Face lacks buffered samples.
    shuffles = any(type(part).__name__.startswith("BufferShuffled") for part in _parts(dataset))
    return has_state and not shuffles


def _refuse_unseeded(dataset: Any) -> None:
    """Raise ``DataError`` if each process would shuffle a Hugging Face dataset in another order."""
    for part in _parts(dataset):
        bits = getattr(getattr(part, "generator", None), "bit_generator", None)
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", 0)
        if isinstance(entropy, int) and entropy >> _SEED_BITS:
            raise DataError(
                f"DataLoader: the stream {type(dataset).__name__} is shuffled or interleaved "
                "without a seed, so each worker and each resume would read another order. Give "
                f"that call a seed= below 2 ** {_SEED_BITS}"
            )


def _parts(dataset: Any) -> list[Any]:
    """Return the parts of Hugging Face's stream; nothing for other datasets."""
    # Packed documents have a stream inside.
    parts = [getattr(getattr(dataset, "_dataset", dataset), "_ex_iterable", None)]
    for part in parts:
        inner = getattr(part, "ex_iterable", None)
        # Interleaved and concatenated streams have several.
        parts += [*([inner] if inner is not None else ()), *getattr(part, "ex_iterables", ())]
    return parts
