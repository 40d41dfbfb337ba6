"""Imports lead one way: between rooms, and between the files of one room."""

from __future__ import annotations

from tests.arch import rooms
from tests.arch._tree import PACKAGES
from tests.arch.imports import circles, import_graph, imported_names

#: Circles that are still to be opened. Take files out of it; add none.
KNOWN_CIRCLES = (
    {"ucp_core.reading.plan", "ucp_core.reading.rows"},
    {
        "ucp_core.conversion.convert",
        "ucp_core.conversion.job",
        "ucp_core.formats",
        "ucp_core.formats.universal.writer",
        "ucp_core.language.operators",
        "ucp_core.native.extents",
        "ucp_core.native.holding",
        "ucp_core.native.opening",
    },
    {"workers.collectives.attempt", "workers.collectives.group", "workers.collectives.work"},
    {
        "orchestrator.simulation.checkers.violations",
        "orchestrator.simulation.world.cluster",
        "orchestrator.simulation.world.loading",
        "orchestrator.simulation.world.memory",
        "orchestrator.simulation.world.parts",
        "orchestrator.simulation.world.saving",
    },
)
#: Arrows between rooms that are still to be turned. Take arrows out of it; add none.
KNOWN_UPWARD = {
    ("orchestrator.shell", "orchestrator.driver"),
    ("ucp_core.formats", "ucp_core.conversion"),
    ("ucp_core.native", "ucp_core.formats"),
    ("workers.keeper", "workers.process"),
    ("workers.memory", "workers.keeper"),
}


def test_no_files_import_one_another() -> None:
    """Python runs most circles without complaint; a reader cannot start anywhere in them."""
    found = [
        circle
        for circle in circles(import_graph())
        if not any(set(circle) <= known for known in KNOWN_CIRCLES)
    ]

    assert not found, "files import one another:\n" + "\n".join(map(" ".join, found))


def test_a_circle_is_found_with_all_its_files() -> None:
    """The test above passes for a graph that was read wrongly, too."""
    graph = {
        "top": frozenset({"a", "alone"}),
        "a": frozenset({"b"}),
        "b": frozenset({"c", "alone"}),
        "c": frozenset({"a"}),
        "alone": frozenset[str](),
    }

    assert circles(graph) == [["a", "b", "c"]]


def test_imports_inside_functions_and_for_types_count() -> None:
    """They hide circles from Python, not from readers."""
    source = """
import a.b
from c import d, e as f
def function():
    import g
if TYPE_CHECKING:
    from h.i import j
"""

    assert sorted(imported_names(source)) == ["a.b", "c.d", "c.e", "g", "h.i.j"]
    assert import_graph()["workers.protocol"] == {"ucp_core.layout"}


def test_no_arrow_between_rooms_goes_up() -> None:
    """What `make rooms` prints is what CONTRIBUTING promises."""
    found = [arrow for arrow in rooms.upward() if arrow not in KNOWN_UPWARD]

    assert not found, "\n".join(f"{here} imports {there}" for here, there in found)


def test_every_room_is_in_the_picture() -> None:
    """A room that imports nothing and that nobody imports is dead, or the graph misses it."""
    picture = rooms.picture()

    for package in PACKAGES:
        for room in rooms.room_order(package):
            assert f"  {room} " in picture, f"{package}.{room}"
