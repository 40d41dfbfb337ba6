"""Reads YAML and keeps the place of every key and value, so that a message can name the line."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, TypeAlias

import yaml

from ucp_core.errors import Place, Problem

#: Keys and indices from the root, as in ``("train", "lr")``.
KeyPath: TypeAlias = tuple[str | int, ...]


class YamlText:
    """A YAML text as plain values, with the place of each, and the problems of its form."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name  #: Name of the file, for messages.
        self.problems: list[Problem] = []  #: All that were found so far.
        self.root: yaml.Node | None = None  #: None if the text is empty or not YAML.
        #: Where each key and each item of a list was written.
        self.places: dict[KeyPath, Place] = {}
        self.value: Any = None  #: The plain value of the text.
        try:
            self._loader = yaml.SafeLoader(text)
            self.root = self._loader.get_single_node()
            self.value = None if self.root is None else self._plain(self.root, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name, 1, 1)
            self.problems.append(Problem("", f"is not YAML: {error.problem or error.context}", at))
        except (yaml.YAMLError, RecursionError) as error:
            message = f"is not YAML: {str(error).splitlines()[0]}"
            self.problems.append(Problem("", message, Place(name, 1, 1)))

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.SequenceNode):
            self.places |= {(*path, i): self._place(item) for i, item in enumerate(node.value)}
            return [self._plain(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            values: dict[str, Any] = {}
            for key, value in node.value:
                here = *path, str(key.value)
                if not isinstance(key, yaml.ScalarNode):
                    self._wrong(key, path, "a key must be a word")
                elif key.value in values:
                    # YAML would silently keep the last one.
                    self._wrong(key, here, "is written twice; keep one of them")
                else:
                    self.places[here] = self._place(key)
                    values[key.value] = self._plain(value, here)
            return values
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            # Values that a tag contradicts, such as ``!!int ""``.
            self._wrong(node, path, f"cannot be read: {str(error).partition(chr(10))[0]}")
            return None

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def _wrong(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(dotted(path), message, self._place(node)))

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem at ``path``, where it or its nearest parent was written."""
        nearest = (self.places.get(path[:end]) for end in range(len(path), 0, -1))
        return Problem(dotted(path), message, next(filter(None, nearest), Place()))


def dotted(path: Collection[str | int]) -> str:
    """Return ``("train", "lr")`` as ``train.lr``."""
    return ".".join(map(str, path))


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return a hint for an unknown ``word``: the nearest known word, or all of them."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return (
        f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known)) or 'none'}"
    )
