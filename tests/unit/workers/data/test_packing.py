"""Packed rows: all tokens in an order, cut into rows, with the documents told apart."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep import DataError, DataLoader, pack
from workers.data import DataOrder


class Documents(list[Any]):
    """Documents that identify themselves; tells how often one was read."""

    digest = "three documents"
    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


class Stream:
    """The same, one after the other."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        return iter(self.documents)


class Seekable(Stream):
    """And it continues where it was."""

    at = first = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.first = self.first, 0
        while self.at < len(self.documents):
            self.at += 1
            yield self.documents[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = self.at = state["at"]


def documents_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Return documents whose tokens say which document and place it is."""
    return [
        {"input_ids": [1000 * number + at for at in range(length)]}
        for number, length in enumerate(lengths)
    ]


def check(rows: list[dict[str, Any]], expected: list[int], length: int) -> None:
    """Assert that rows hold the tokens in order, and say where documents and rows begin."""
    tokens = [row["input_ids"].tolist() for row in rows]
    assert tokens == [expected[at : at + length] for at in range(0, len(tokens) * length, length)]
    assert len(expected) - sum(map(len, tokens)) < length
    for row in rows:
        before, position = None, -1
        for token, place, label in zip(
            *(row[name].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True
        ):
            is_new = before is None or token != before + 1
            position = 0 if is_new else position + 1
            assert (place, label) == (position, -100 if is_new else token)
            before = token


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda found: sum(found) >= 8)


@given(lengths=LENGTHS, length=st.integers(2, 8), seed=st.integers(0, 3))
def test_rows_hold_every_token_of_the_documents_in_an_order(
    lengths: list[int], length: int, seed: int
) -> None:
    documents = documents_of(lengths)
    rows = pack(documents, length, seed=seed)
    order = DataOrder(seed=seed, num_samples=len(documents), global_batch=1)
    in_order = [documents[at] for at in order.samples(0, len(documents)).tolist()]

    found = [rows[at] for at in range(len(rows))]  # type: ignore[arg-type, index]
    check(found, [token for one in in_order for token in one["input_ids"]], length)
    many = rows.__getitems__(list(reversed(range(len(found)))))  # type: ignore[union-attr]
    assert all(
        np.array_equal(one["input_ids"], other["input_ids"])
        for one, other in zip(reversed(many), found, strict=True)
    )


@given(lengths=LENGTHS, length=st.integers(2, 8), data=st.data())
def test_a_stream_of_rows_continues_within_a_document(
    lengths: list[int], length: int, data: st.DataObject
) -> None:
    documents = documents_of(lengths)
    rows: Any = pack(Seekable(documents), length)
    found, states = [], [rows.state_dict()]
    for row in rows:
        found.append(row)
        states.append(rows.state_dict())
    check(found, [token for one in documents for token in one["input_ids"]], length)

    begun = data.draw(st.integers(1, len(found)))
    again: Any = pack(Seekable(documents), length)
    again.load_state_dict(states[begun])
    later = [row["input_ids"].tolist() for row in again]
    assert later == [row["input_ids"].tolist() for row in found[begun:]]
    plain = [row["input_ids"].tolist() for row in pack(Stream(documents), length)]  # type: ignore[union-attr]
    assert plain == [row["input_ids"].tolist() for row in found]


def test_lengths_are_learned_once(tmp_path: Path) -> None:
    documents = Documents(documents_of([5, 6, 7]))
    pack(documents, 4, cache=tmp_path)
    assert documents.num_read == 3
    rows = pack(documents, 4, cache=tmp_path)
    assert documents.num_read == 3
    assert rows.digest == "three documents/4/input_ids/0"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [list, Stream, Seekable])
def test_a_loader_gives_packed_batches_that_resume(kind: Any) -> None:
    documents = documents_of([3, 9, 4, 1, 6, 8, 2, 7])
    loader = DataLoader(pack(kind(documents), 5))
    num = 1 if loader.is_stream else len(loader)
    order = DataOrder(seed=1, num_samples=num, global_batch=4)
    more: dict[str, Any] = {"seed": 0, "micro_batch": 2, "numbers": [0, 1]}
    begun = loader.batches(order, **more)
    batches = list(itertools.islice(begun, 4))
    state = loader.state()
    expected = next(begun)["input_ids"]

    assert batches[0]["labels"].shape == (2, 5)
    other = DataLoader(pack(kind(documents), 5))
    resumed = other.batches(order, first_step=3, state=state, **more)
    assert next(resumed)["input_ids"].equal(expected)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(DataError, match="length=1 must be at least 2"):
        pack([[1, 2]], 1)
    with pytest.raises(DataError, match="2 documents with 3 tokens fill no row of 4"):
        pack([[1, 2], [3]], 4)
    with pytest.raises(DataError, match="a document has no 'input_ids'; it has text"):
        pack([{"text": "abc"}], 2)
    with pytest.raises(DataError, match="tokens of float64 and 1 dimensions; give integers"):
        pack([[0.5, 1.0]], 2)
