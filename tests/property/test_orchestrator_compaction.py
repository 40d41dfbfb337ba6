import json
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from inspect import signature
from math import inf
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import (
    Compaction,
    Folded,
    JournalPlace,
    RunState,
)
from orchestrator.core.log.codec import decoder
from orchestrator.core.log.incident import Incident
from orchestrator.core.state import MutableRunState, Table, freeze
from orchestrator.errors import CompactionError
from ucp_core.layout import ParallelLayout

BASIS = "digest of program and rules"
LINE = b'{"v":1,"seq":7}\n'
PLACE = JournalPlace(segment=1, before_bytes=0, end_bytes=len(LINE), line=LINE.decode())
#: Values of types that have no parts, and of those whose parts go together.
_WHOLE: dict[Any, Callable[[Random], Any]] = {
    NoneType: lambda _: None,
    bool: lambda draw: draw.random() < 0.5,
    int: lambda draw: draw.choice([0, 1, -1, draw.randrange(1 << 70)]),
    # A bound may be infinite; nothing is "no number".
    float: lambda draw: draw.choice([0.0, -0.0, 1.0, inf, -inf, 5e-324, draw.random()]),
    str: lambda draw: draw.choice(["", "w0007", '{"a": "\\n"}\n', "\x00ü\u2028🙂"]),
    ParallelLayout: lambda draw: ParallelLayout(pp=draw.randint(1, 4), dp_shard=draw.randint(1, 9)),
    RunState: lambda draw: freeze(_drawn(MutableRunState, draw)),
}


def _drawn(hint: Any, draw: Random) -> Any:
    """Return a value of a type, in which every field is drawn, also those with a default."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _WHOLE:
        return _WHOLE[hint](draw)
    if origin in (Union, UnionType):
        return _drawn(draw.choice(args), draw)
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple(_drawn(each, draw) for each in args)
    if origin is Table:
        numbers = draw.sample(range(300), draw.randrange(3))
        return Table.of((number, _drawn(args[0], draw)) for number in numbers)
    if origin is dict:
        return {_drawn(args[0], draw): _drawn(args[1], draw) for _ in range(draw.randrange(3))}
    if origin is not None:
        return origin(_drawn(args[0], draw) for _ in range(draw.randrange(3)))
    if issubclass(hint, Enum):
        return draw.choice(list(hint))
    hints = get_type_hints(hint)
    return hint(**{name: _drawn(hints[name], draw) for name in signature(hint).parameters})


@pytest.mark.parametrize("seed", range(40))
def test_every_field_comes_back_as_it_was(seed: int) -> None:
    """One that is forgotten has its default after a restart, which most tests would not see."""
    folded = _drawn(Folded, Random(seed))
    compaction = Compaction(basis=BASIS, place=PLACE, folded=folded)
    found = Compaction.read(compaction.document(), BASIS)

    assert found == compaction
    # Equal tables may have another order, by which the run goes, and True is equal to 1.
    assert repr(found.folded) == repr(folded)


@pytest.mark.parametrize("seed", range(20))
def test_an_incident_is_read_back_as_it_was_written(seed: int) -> None:
    """A field that its reader forgot would be missing in each report of the run."""
    incident = _drawn(Incident, Random(seed))
    document = json.loads(json.dumps(incident.to_json(), allow_nan=False))

    assert Incident.from_json(document, number=0) == incident
    del document["places"]
    assert Incident.from_json(document | {"newer": 1}, number=0) == replace(incident, places=())


COMPACTION = Compaction(basis=BASIS, place=PLACE, folded=Folded())
DOCUMENT = COMPACTION.document()


@given(cut=st.integers(0, len(DOCUMENT) - 2), byte=st.integers(0, 255))
def test_a_damaged_document_is_never_taken_for_a_whole_one(cut: int, byte: int) -> None:
    """It may be read from a disk that was full, or while it is being replaced."""
    with pytest.raises(CompactionError):
        Compaction.read(DOCUMENT[:cut], BASIS)
    changed = DOCUMENT[:cut] + bytes([byte]) + DOCUMENT[cut + 1 :]
    try:
        found = Compaction.read(changed, BASIS)
    except CompactionError:
        return
    # In the first line a blank may become another one.
    assert found.folded == Folded()


@pytest.mark.parametrize("change", [{"v": 0}, {"v": "1"}, {"crc32": None}, {"bytes": 3}])
def test_a_head_that_says_something_else_is_refused(change: dict[str, Any]) -> None:
    """Another version may mean something else by the same names."""
    head, body = DOCUMENT.split(b"\n", 1)
    with pytest.raises(CompactionError):
        Compaction.read(json.dumps(json.loads(head) | change).encode() + b"\n" + body, BASIS)


def test_what_others_would_decide_otherwise_is_refused() -> None:
    """A program that was mended, or a run that was resumed with fewer workers."""
    with pytest.raises(CompactionError, match="another version"):
        Compaction.read(DOCUMENT, "another digest")


@pytest.mark.parametrize("line", [LINE.replace(b"7", b"8"), LINE[:-1], b"", LINE[1:] + b"{"])
def test_a_compaction_of_another_journal_is_refused(line: bytes) -> None:
    """Someone may copy a journal over another one of the same size."""
    assert COMPACTION.behind([LINE + b"more", b"later"]) == [b"more", b"later"]
    with pytest.raises(CompactionError, match="another line"):
        COMPACTION.behind([line, b"later"])


@pytest.mark.parametrize("hint", [set[int], int | str, dict[int, str], object, bytes])
def test_what_nothing_is_known_about_has_no_codec(hint: Any) -> None:
    """A new field of such a kind must not be written as something that reads back otherwise."""
    with pytest.raises((AssertionError, ValueError)):
        decoder(hint)
