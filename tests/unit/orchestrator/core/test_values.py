"""Values of events and actions."""

from orchestrator.core.log.codec import encode
from orchestrator.core.values import Later


def test_a_later_sequence_is_made_once_and_only_when_it_is_looked_at() -> None:
    """A fold of the journal looks at no member of the attempts that it starts."""
    made: list[int] = []

    def pairs() -> list[tuple[str, int]]:
        made.append(1)
        return [("a", 1), ("b", 2)]

    later = Later(pairs)
    assert not made

    assert later == (("a", 1), ("b", 2))
    assert (("a", 1), ("b", 2)) == later != (("a", 1),)
    assert later == Later(pairs)
    assert hash(later) == hash((("a", 1), ("b", 2)))
    assert encode(later) == [["a", 1], ["b", 2]]
    assert (len(later), later[1], [*later], len(made)) == (2, ("b", 2), [("a", 1), ("b", 2)], 2)
