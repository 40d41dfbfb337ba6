"""Reads YAML and keeps the place of every key and value, so that a message can name the line."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import yaml

from ucp_core.errors import Place, Problem


class YamlText:
    """A YAML text as nodes, and the problems of its form.

    Attributes:
        name: Name of the file, for messages.
        problems: All that were found so far.
        root: None if the text is empty or not YAML.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.root: yaml.Node | None = None
        try:
            self._loader = yaml.SafeLoader(text)
            self.root = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name, 1, 1)
            self.problems.append(Problem("", f"is not YAML: {error.problem or error.context}", at))
        except (yaml.YAMLError, RecursionError) as error:
            message = f"is not YAML: {str(error).splitlines()[0]}"
            self.problems.append(Problem("", message, Place(name, 1, 1)))

    def place(self, node: yaml.Node) -> Place:
        """Return where a node begins."""
        return Place(self.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def wrong(self, node: yaml.Node, message: str, *, path: str = "") -> None:
        """Add a problem at ``node``."""
        self.problems.append(Problem(path, message, self.place(node)))

    def value(self, node: yaml.Node) -> Any:
        """Return the plain value of a node, mappings and lists included."""
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.wrong(node, f"cannot be read: {str(error).splitlines()[0]}")
            return None

    def pairs(self, node: yaml.MappingNode, *path: str | int) -> dict[str, tuple[Place, yaml.Node]]:
        """Return the place of each key and its value's node.

        A key that is written twice is a problem, because YAML would silently keep the last one.
        ``path`` leads to the mapping, for problems.
        """
        found: dict[str, tuple[Place, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.wrong(key, "a key must be a word", path=dotted(path))
            elif key.value in found:
                here = dotted((*path, key.value))
                self.wrong(key, "is written twice; keep one of them", path=here)
            else:
                found[key.value] = self.place(key), value
        return found


def dotted(path: Collection[str | int]) -> str:
    """Return ``("train", "lr")`` as ``train.lr``."""
    return ".".join(map(str, path))


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a hint for an unknown ``word``: the nearest known word, or all of them."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
