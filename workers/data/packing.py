"""Packs documents of any length into rows of one length, and keeps their beginnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workers.data.files import Arrays, cached_arrays
from workers.data.order import DataOrder
from workers.data.stream import is_stream
from workers.errors import DataError

#: Labels that carry no loss, for torch's ``cross_entropy`` and Hugging Face's models.
IGNORED: Final = -100
#: Number of documents to read for their length at a time.
_LENGTHS_AT_ONCE: Final = 1024


def pack(
    dataset: Any,
    length: int,
    *,
    key: str = "input_ids",
    seed: int = 0,
    cache: str | Path | None = None,
) -> PackedRows | PackedStream:
    """Return rows of ``length`` tokens made of a dataset's documents; give it to ``DataLoader``.

    Documents follow one another without padding, so one may be cut between two rows. A row is a
    dict of three arrays of ``(length,)``: ``input_ids``; ``position_ids``, which restart at 0 with
    each document and each row, so that Hugging Face's models keep documents apart; and ``labels``,
    which are the tokens, except for -100 where a document begins. Tokens at the end that fill no
    row are not used.

    With a map-style dataset the rows are also map-style: documents have an order that depends on
    ``seed``, and ``DataLoader`` permutes the rows. Each document is read once to learn its length;
    the result is cached if ``dataset.digest`` (or Hugging Face's fingerprint) identifies the data.
    A dataset that can only be iterated becomes a stream of rows in its own order.

    Args:
        dataset: The documents: one-dimensional tokens, or dicts with them.
        length: Number of tokens of a row, at least 2.
        key: Key of the tokens in a dict.
        seed: Seed of the order of documents.
        cache: Directory for the lengths; see ``JsonLines``.

    Raises:
        DataError: The length is less than 2, or the documents together fill no row.
    """
    if length < 2:  # noqa: PLR2004  with one token there is nothing to predict
        raise DataError(f"pack: length={length} must be at least 2")
    if not is_stream(dataset):
        return PackedRows(dataset, length, key=key, seed=seed, cache=cache)
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return StatefulPackedStream(dataset, length, key=key)
    return PackedStream(dataset, length, key=key)


class PackedRows:
    """Rows by index; see ``pack``.

    Attributes:
        digest: Identifies the rows and their order, if the dataset has a digest.
    """

    def __init__(
        self, dataset: Any, length: int, *, key: str, seed: int, cache: str | Path | None
    ) -> None:
        self._dataset, self._length, self._key = dataset, length, key
        known = getattr(dataset, "digest", "") or getattr(dataset, "_fingerprint", "")
        self.digest = f"{known}/{length}/{key}/{seed}" if known else ""
        if known:
            stamps = getattr(dataset, "stamps", None)
            facts = {"lengths": 2, "digest": known, "stamps": stamps, "key": key}
            lengths = cached_arrays(facts, None if cache is None else str(cache), self._lengths)
        else:
            lengths = self._lengths()
        num = len(lengths["lengths"])
        if num:
            self._order = DataOrder(seed=seed, num_samples=num, global_batch=1).samples(0, num)
            #: Position of each document's beginning among all tokens, in order, and of the last
            #: one's end.
            self._starts = np.concatenate([[0], np.cumsum(lengths["lengths"][self._order])])
        if not num or self._starts[-1] < length:
            tokens = int(self._starts[-1]) if num else 0
            raise DataError(f"pack: {num} documents with {tokens} tokens fill no row of {length}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._starts[-1]) // self._length

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Return a row."""
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, NDArray[np.int64]]]:
        """Return several rows; read all their documents together."""
        starts = np.asarray(indices, np.int64) * self._length
        firsts = np.searchsorted(self._starts, starts, side="right") - 1
        stops = np.searchsorted(self._starts, starts + self._length, side="left")
        places = [range(*bounds) for bounds in zip(firsts.tolist(), stops.tolist(), strict=True)]
        wanted = [int(self._order[place]) for one in places for place in one]
        documents = iter(_documents(self._dataset, wanted))
        rows: list[dict[str, NDArray[np.int64]]] = []
        for start, one in zip(starts.tolist(), places, strict=True):
            parts = []
            for place in one:
                tokens, begin = _tokens(next(documents), self._key), int(self._starts[place])
                parts.append(tokens[max(0, start - begin) : start + self._length - begin])
            rows.append(_row(parts))
        return rows

    def _lengths(self) -> Arrays:
        num = len(self._dataset)
        found = np.empty(num, np.int64)
        for start in range(0, num, _LENGTHS_AT_ONCE):
            indices = range(start, min(start + _LENGTHS_AT_ONCE, num))
            documents = _documents(self._dataset, indices)
            found[start : indices.stop] = [len(_tokens(one, self._key)) for one in documents]
        return {"lengths": found}


class PackedStream:
    """Rows one after the other; see ``pack``."""

    def __init__(self, dataset: Iterable[Any], length: int, *, key: str) -> None:
        self._dataset: Any = dataset
        self._length, self._key = length, key
        self._skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it accepts that."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int64]]]:
        parts: list[NDArray[np.int64]] = []
        held, skipped = 0, self._skipped
        self._skipped = 0
        for document in self._dataset:
            tokens = _tokens(document, self._key)[skipped:]
            self._read(skipped + len(tokens))
            skipped = 0
            while held + len(tokens) >= self._length:
                cut = self._length - held
                parts.append(tokens[:cut])
                tokens, held = tokens[cut:], 0
                self._cut(len(tokens))
                yield _row(parts)
                parts = []
            if len(tokens):
                parts.append(tokens)
                held += len(tokens)

    def _read(self, num_tokens: int) -> None:
        """Note that a document was read."""

    def _cut(self, num_left: int) -> None:
        """Note that a row ended this many tokens before the end of the document."""


class StatefulPackedStream(PackedStream):
    """Packed rows that continue where they were, because the dataset does.

    The state holds the dataset's state before the document in which the next row begins, and the
    number of that document's tokens in earlier rows.
    """

    def __init__(self, dataset: Iterable[Any], length: int, *, key: str) -> None:
        super().__init__(dataset, length, key=key)
        self._after: Any = None
        self._begun: Any = None
        self._num_tokens = self._offset = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next row."""
        return {"dataset": self._begun, "skipped": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at this position with the next iterator."""
        self._skipped = state["skipped"]
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int64]]]:
        self._after = self._begun = self._dataset.state_dict()
        self._offset = self._skipped
        return super().__iter__()

    def _read(self, num_tokens: int) -> None:
        self._before, self._after = self._after, self._dataset.state_dict()
        self._num_tokens = num_tokens

    def _cut(self, num_left: int) -> None:
        if num_left:
            self._begun, self._offset = self._before, self._num_tokens - num_left
        else:
            self._begun, self._offset = self._after, 0


def _documents(dataset: Any, indices: Sequence[int]) -> Sequence[Any]:
    many = getattr(dataset, "__getitems__", None)
    found: Sequence[Any] = (
        many(list(indices)) if many is not None else [dataset[index] for index in indices]
    )
    return found


def _tokens(document: Any, key: str) -> NDArray[np.int64]:
    if isinstance(document, dict):
        if key not in document:
            raise DataError(f"pack: a document has no {key!r}; it has {', '.join(document)}")
        document = document[key]
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"pack: a document has tokens of {tokens.dtype} and {tokens.ndim} dimensions; give "
            "integers in one dimension"
        )
    return tokens.astype(np.int64)


def _row(parts: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    tokens = np.concatenate(parts)
    labels = tokens.copy()
    begins = np.cumsum([0, *map(len, parts[:-1])])
    labels[[begin for begin, part in zip(begins, parts, strict=True) if len(part)]] = IGNORED
    positions = np.concatenate([np.arange(len(part)) for part in parts])
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}
