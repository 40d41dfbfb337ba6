import json
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from orchestrator.core import (
    Compaction,
    Folded,
    Place,
    RunState,
    RunStats,
)
from orchestrator.core.log.codec import decoder
from orchestrator.core.log.incident import Incident
from orchestrator.core.state import (
    Attempt,
    Cause,
    Fleet,
    MutableRunState,
    Node,
    Reads,
    Reservation,
    Table,
    Worker,
    freeze,
)
from orchestrator.errors import CompactionError
from orchestrator.policies import Fault, UserError
from ucp_core.layout import ParallelLayout

BASIS = "digest of program and rules"
LINE = b'{"v":1,"seq":7}\n'
PLACE = Place(segment=1, before_bytes=0, end_bytes=len(LINE), line=LINE.decode())


def _filled(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a record in which every field is drawn, also those with a default."""
    return st.builds(kind, **dict.fromkeys(signature(kind).parameters, ...))


def _tables(hint: Any) -> st.SearchStrategy[Any]:
    item = st.tuples(st.integers(0, 300), st.from_type(get_args(hint)[0]))
    return st.lists(item, max_size=3, unique_by=lambda pair: pair[0]).map(Table.of)


# A bound may be infinite; nothing is "no number".
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(
    ParallelLayout, st.builds(ParallelLayout, pp=st.integers(1, 4), dp_shard=st.integers(1, 64))
)
st.register_type_strategy(Table, _tables)
for _kind in (
    Attempt,
    Reads,
    Fleet,
    Worker,
    Reservation,
    Node,
    Cause,
    Fault,
    UserError,
    Incident,
    RunStats,
):
    st.register_type_strategy(_kind, _filled(_kind))
st.register_type_strategy(RunState, _filled(MutableRunState).map(freeze))


@settings(
    deadline=None,
    max_examples=5,
    # A run's state has hundreds of values; to make one smaller that fails would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(folded=_filled(Folded))
def test_every_field_comes_back_as_it_was(folded: Folded) -> None:
    """One that is forgotten has its default after a restart, which most tests would not see."""
    compaction = Compaction(basis=BASIS, place=PLACE, folded=folded)
    found = Compaction.read(compaction.document(), BASIS)

    assert found == compaction
    # Equal tables may have another order, by which the run goes, and True is equal to 1.
    assert repr(found.folded) == repr(folded)


@settings(
    deadline=None,
    max_examples=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(incident=_filled(Incident))
def test_an_incident_is_read_back_as_it_was_written(incident: Incident) -> None:
    """A field that its reader forgot would be missing in each report of the run."""
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
