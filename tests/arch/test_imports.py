"""Imports lead one way: between rooms, and between the files of one room."""

import ast
import importlib.util
from collections.abc import Iterator

from tests.arch import rooms
from tests.arch.imports import circles, import_graph, imported_names
from tests.arch.tree import PACKAGES, python_files, relative


def test_no_files_import_one_another() -> None:
    """Python runs most circles without complaint; a reader cannot start anywhere in them."""
    found = circles(import_graph())

    assert not found, "files import one another:\n" + "\n".join(map(" ".join, found))


def test_every_imported_name_exists() -> None:
    """Rooms load their files when a name is asked for, so mypy believes any name."""
    missing = [
        f"{relative(path)}:{node.lineno}: {node.module} has no {alias.name}"
        for path in python_files()
        for node in _imports_at_run_time(ast.parse(path.read_text(encoding="utf-8")))
        if node.module and node.module.split(".")[0] in PACKAGES
        for alias in node.names
        if not _exists(node.module, alias.name)
    ]

    assert not missing, "\n".join(missing)


def _imports_at_run_time(node: ast.AST) -> Iterator[ast.ImportFrom]:
    if isinstance(node, ast.ImportFrom):
        yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from _imports_at_run_time(child)


def _exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


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
    assert import_graph()["workers.protocol"] == {"ucp_core.layout", "workers.packed"}


def test_no_arrow_between_rooms_goes_up() -> None:
    """CONTRIBUTING promises the output of `make rooms`."""
    found = rooms.upward()

    assert not found, "\n".join(f"{here} imports {there}" for here, there in found)


def test_every_room_is_in_the_picture() -> None:
    """A room without imports that no other room imports is dead, or the graph misses it."""
    picture = rooms.picture()

    for package in PACKAGES:
        for room in rooms.room_order(package):
            assert f"  {room} " in picture, f"{package}.{room}"
