import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core import transition_records
from orchestrator.core.log.journal_lines import parse
from orchestrator.core.values import kinds
from ucp_core.layout import ParallelLayout

LAYOUTS = st.builds(
    ParallelLayout,
    pp=st.integers(1, 4),
    dp_replicate=st.integers(1, 4),
    dp_shard=st.integers(1, 64),
    tp=st.integers(1, 8),
)
NUMBERS = st.floats(allow_nan=False)
TEXT = st.text(max_size=30)

st.register_type_strategy(ParallelLayout, LAYOUTS)
st.register_type_strategy(float, NUMBERS)
st.register_type_strategy(str, TEXT)

EVENTS = [*kinds(ev, ev.Event).values()]
ITEMS: st.SearchStrategy[Any] = st.one_of(
    [st.from_type(kind) for kind in (*EVENTS, *kinds(act, act.Action).values())]
)


@settings(deadline=None)
@given(event=st.one_of([st.from_type(kind) for kind in EVENTS]), item=ITEMS)
def test_every_record_reads_back_as_what_was_written(event: ev.Event, item: Any) -> None:
    """Tuples become arrays and layouts objects in JSON; a replay needs them back exactly."""
    records = transition_records(event, (item,), attempt=3)
    read_back = [parse(json.loads(json.dumps(record))) for record in records]

    assert read_back == [event, item]
    assert [type(part) for part in read_back] == [type(event), type(item)]
