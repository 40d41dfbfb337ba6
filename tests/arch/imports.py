"""The imports of the three packages as a graph of files, read from the source."""

import ast
import functools
from pathlib import Path
from typing import TypeAlias

from tests.arch.tree import PACKAGES, python_files, relative

#: The modules that each module imports, of the three packages only.
Graph: TypeAlias = dict[str, frozenset[str]]


def module_name(path: Path) -> str:
    """Return the dotted name of a file; a package's ``__init__.py`` has the package's name."""
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def import_graph() -> Graph:
    """Return every import, also those inside functions and under ``TYPE_CHECKING``."""
    files = {module_name(path): path for path in python_files(*PACKAGES)}
    graph = {}
    for module, path in files.items():
        names = imported_names(path.read_text(encoding="utf-8"))
        found = {_file_of(name, frozenset(files)) for name in names}
        graph[module] = frozenset(found - {"", module})
    return graph


def imported_names(source: str) -> list[str]:
    """Return what a file imports, as ``module.name`` where it imports a name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def _file_of(name: str, modules: frozenset[str]) -> str:
    """Return the module that defines ``name``, or "" if it is none of ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Graph) -> list[list[str]]:
    """Return each set of files that import one another (Tarjan's algorithm), sorted."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(found)
